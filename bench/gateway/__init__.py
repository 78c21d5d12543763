"""The model gateway measured: ours and LiteLLM's proxy, taking turns in front of one engine."""
