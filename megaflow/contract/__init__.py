"""Contract suites for your own implementations: `environments` and `agents`. They need pytest."""
