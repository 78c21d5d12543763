"""Starts the launcher with a worker's imports already loaded.

python -m app.workers.launcher
"""

from __future__ import annotations

import sys

import celery.apps.worker
import celery.concurrency.thread
import celery.worker.components
import celery.worker.consumer  # noqa: F401  preloaded for the forks, like the next two
import docker  # noqa: F401
import kombu.transport.redis  # noqa: F401

import app.tasks.attempt
import app.tasks.schedule  # noqa: F401
from app import logs
from app.celery_app import app as celery_app
from app.environments.runtimes.oci import available
from app.errors import MegaFlowError
from app.instances import launcher
from app.models.instance import MARK
from app.settings import load
from app.workers import instance


def main() -> None:
    settings = load()
    logs.configure(settings.log_level)
    celery_app.loader.import_default_modules()
    if settings.container_runtime != "docker":
        available(settings)  # checked once here; forks inherit the result
    launcher.main(settings, MARK, lambda request: instance.host(celery_app, request, settings))


if __name__ == "__main__":
    try:
        main()
    except MegaFlowError as error:
        sys.exit(f"launcher: {error}")
