"""The Celery tasks, named noun.verb."""
