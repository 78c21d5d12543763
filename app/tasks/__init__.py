"""Celery tasks, named noun.verb."""
