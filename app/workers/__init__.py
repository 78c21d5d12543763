"""What runs on an instance: its Celery worker, and an attempt from its claim to its outcome."""
