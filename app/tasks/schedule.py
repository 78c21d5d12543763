"""Defines the task `schedule.tick`, sent by beat: fires every due schedule once."""

from __future__ import annotations

from celery import shared_task

from app.workers import context


@shared_task(name="schedule.tick", send_events=False)  # an event every few seconds would fill Flower's memory
def tick() -> int:
    """Fires due schedules; returns the number of due times fired."""
    return context.tick()
