"""Contract suites that anybody can run on theirs: `environments` and `agents`. They take pytest."""
