"""SWE-agent, from a checkout: `adapter` says how it is run, `settings` what it is told."""
