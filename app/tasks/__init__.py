"""Verbs on the queues: thin Celery tasks, named noun.verb on the wire."""
