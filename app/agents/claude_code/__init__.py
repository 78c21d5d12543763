"""Claude Code as an agent: `adapter.ClaudeCode`. README.md explains its configuration."""
