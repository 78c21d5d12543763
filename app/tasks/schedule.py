"""Task `schedule.tick`, sent by beat: fires every due schedule once."""

from __future__ import annotations

from celery import shared_task

from app.workers import context


@shared_task(name="schedule.tick", send_events=False)  # one each few seconds would fill Flower's memory
def tick() -> int:
    """How many due times were fired."""
    return context.tick()
