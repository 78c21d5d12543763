"""Qwen Code as an agent: `adapter.QwenCode`. README.md says why it is set up as it is."""
