"""Other task queues, measured beside ours: each a script that runs in an environment of its own and prints JSON.

The scripts import nothing of ours, so that they run with their own packages alone (`venv.py` makes that environment).
"""
