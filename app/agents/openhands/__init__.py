"""The OpenHands SDK: `adapter` configures it, `drive.py` runs it, `requirements.lock` is installed."""
