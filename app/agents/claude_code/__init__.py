"""Claude Code as an agent: `adapter.ClaudeCode`. README.md says why it is set up as it is."""
