"""SWE-agent, from a checkout: `adapter` says how it is run and what it is told."""
