"""mini-swe-agent: `adapter` runs it, it loads `megaflow_environment`, `requirements.lock` is installed."""
