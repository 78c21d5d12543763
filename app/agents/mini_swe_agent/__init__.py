"""mini-swe-agent: `adapter` runs it, `megaflow_environment` is loaded by it, `requirements.lock` is installed."""
