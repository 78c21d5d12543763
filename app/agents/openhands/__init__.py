"""The OpenHands SDK: `adapter` says how it is run, `drive.py` runs it, `requirements.lock` is installed."""
