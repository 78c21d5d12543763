"""Builds the Celery application: queues, reliability options, beat.

PostgreSQL holds the state; messages only wake workers. Acks are therefore early, results are not stored, and nothing is
prefetched. A test asserts every option on `app.conf`, because Celery ignores a misspelt name.
"""

from __future__ import annotations

from typing import Any

import structlog
from celery import Celery
from celery.signals import beat_init
from kombu import Exchange, Queue  # type: ignore[attr-defined]
from kombu.transport import redis as redis_transport
from kombu.transport.virtual import Empty

from app.models.instance import InstanceMode, queue_of
from app.settings import Settings, load

log = structlog.get_logger(__name__)

CONTROL = "control"
"""Queue of the control worker: beat's ticks and other commands to the control plane."""
MODE_QUEUES = tuple(queue_of(mode, "standard") for mode in InstanceMode)
"""Queues of the resource class that always exists, for Flower; each worker names the queues that it consumes."""


def options(settings: Settings) -> dict[str, Any]:
    """Returns Celery's configuration; a comment gives the reason for most options."""
    return {
        "broker_url": settings.broker(),
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,  # a worker survives any restart of the broker
        "broker_transport_options": {
            "socket_timeout": 10,  # well above a consumer's wait of one second; bounds how long a stop takes
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 10,  # detects a half-open connection
        },
        "task_ignore_result": True,  # the ledger has the outcome
        "task_acks_late": False,  # a late ack makes Redis deliver a long task twice
        "task_default_queue": CONTROL,
        "task_queues": [Queue(CONTROL), *(Queue(name, Exchange(name), routing_key=name) for name in MODE_QUEUES)],
        "task_create_missing_queues": True,  # one per mode and resource class, and one per host
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_send_sent_event": True,  # Flower shows the queue of each task
        "worker_send_task_events": True,
        "worker_prefetch_multiplier": 1,
        "worker_disable_prefetch": True,  # otherwise one message waits behind a running attempt
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "worker_log_format": "%(asctime)s %(levelname)s %(message)s",
        "worker_cancel_long_running_tasks_on_connection_loss": False,  # the lease decides, not the broker
        "worker_enable_remote_control": True,  # off on ephemeral workers: two connections each instead of four
        "timezone": "UTC",
        "enable_utc": True,
        "include": ["app.tasks.attempt", "app.tasks.schedule"],
        "beat_scheduler": "celery.beat:Scheduler",  # holds no state: due times live in PostgreSQL
        "beat_schedule": {
            "schedule.tick": {
                "task": "schedule.tick",
                "schedule": settings.schedule_tick_s,
                "options": {"queue": CONTROL, "expires": settings.schedule_tick_s * 2},
            },
        },
    }


def build(settings: Settings) -> Celery:
    """Creates a Celery application of this installation. Connects to nothing."""
    celery = Celery("megaflow")
    celery.conf.update(options(settings))
    return celery


class _Channel(redis_transport.Channel):
    """Channel that drops malformed queue entries: such an entry would end the worker that receives it."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("broker.message_dropped", error=f"{type(error).__name__}: {error}"[:300])
            raise Empty from error


redis_transport.Transport.Channel = _Channel


@beat_init.connect
def _send_ticks_quietly(sender: Any, **_: Any) -> None:
    """Turns off sent events in beat: it sends only ticks, which Flower need not show."""
    sender.app.conf.task_send_sent_event = False


app = build(load())
