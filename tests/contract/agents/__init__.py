"""The agents' contract suite, with fixtures of its own."""
