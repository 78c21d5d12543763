"""The command session: a static helper program inside an environment, and its client."""
