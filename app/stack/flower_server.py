"""Runs Flower on this installation's Celery application, with two changes.

The page of Prometheus metrics requires the password, as every other page does. The broker page lists the queues of both
modes even while only some workers answer.
"""

from __future__ import annotations

import sys

from celery.bin.celery import main as celery
from flower.views import BaseHandler
from flower.views.monitor import Metrics
from tornado.web import authenticated

from app.celery_app import MODE_QUEUES


def adapt() -> None:
    """Changes Flower's handlers in this process."""
    original = BaseHandler.get_active_queue_names

    def names(handler: BaseHandler) -> list[str]:
        return sorted({*original(handler), *MODE_QUEUES})

    BaseHandler.get_active_queue_names = names
    Metrics.get = authenticated(Metrics.get)


if __name__ == "__main__":
    adapt()
    sys.argv = ["celery", "-A", "app.celery_app", "flower", *sys.argv[1:]]
    sys.exit(celery())
