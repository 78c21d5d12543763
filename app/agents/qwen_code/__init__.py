"""Qwen Code as an agent: `adapter.QwenCode`. README.md explains its configuration."""
