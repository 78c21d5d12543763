"""SWE-agent, from a checkout: `adapter` defines how it is started and configured."""
