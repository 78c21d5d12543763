"""Runs on an instance: the Celery worker, and each attempt from its claim to its outcome."""
