"""Messages on the queues that are none, or not ours: a real Redis, a real Celery worker, which goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import redis

from app.celery_app import CONTROL, build
from app.stack.home import process_environment
from tests.services import MakeSettings
from tests.waiting import eventually

RAW = (
    b"not json",
    b"\xff\xfe",
    b"[]",
    b"{}",
    b"[" * 5000,
    b'{"body": "e30=", "headers": {}, "properties": 3}',
    b'{"body": "not base64", "content-type": "application/json", "properties": {"delivery_info": {}}}',
)
WORKER = ["-m", "celery", "-A", "app.celery_app", "worker", "-P", "solo", "-l", "INFO", "-Q"]


def a_message(**changes: object) -> bytes:
    """A message as kombu writes it, with one thing wrong."""
    whole = {
        "body": "W1tdLCB7fSwgbnVsbF0=",
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"task": "no.such.task", "id": str(uuid.uuid4()), "lang": "py"},
        "properties": {
            "delivery_mode": 2,
            "delivery_tag": str(uuid.uuid4()),
            "body_encoding": "base64",
            "delivery_info": {"exchange": "", "routing_key": CONTROL},
        },
    }
    return json.dumps({**whole, **changes}).encode()


@pytest.mark.timeout(120)
def test_a_worker_survives_messages_that_are_none(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings()
    log = tmp_path / "worker.log"
    with log.open("wb") as output, redis.Redis.from_url(settings.redis()) as broker:
        environ = os.environ | process_environment(settings)
        worker = subprocess.Popen([sys.executable, *WORKER, CONTROL], stdout=output, stderr=output, env=environ)
        try:
            eventually(lambda: b" ready." in log.read_bytes(), within_s=60)
            wrong = [
                a_message(),
                a_message(**{"content-type": "application/x-python-serialize"}),
                a_message(headers={}),
            ]
            for message in (*RAW, *wrong):
                broker.lpush(CONTROL, message)
            eventually(lambda: broker.llen(CONTROL) == 0, within_s=60)
            build(settings).send_task("schedule.tick", queue=CONTROL)  # no control worker: it is taken and fails
            eventually(lambda: b"this worker serves no schedules" in log.read_bytes(), within_s=60)
            assert worker.poll() is None, log.read_text()
        finally:
            worker.terminate()
            worker.wait(30)
