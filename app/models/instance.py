"""What a provider is asked for."""

from __future__ import annotations

from enum import StrEnum
from uuid import UUID

from app.models.spec import Wire

MARK = "MF_INSTANCE"
"""Environment variable that every process of an instance inherits: what its launcher kills by."""


class InstanceMode(StrEnum):
    """What an instance takes: one attempt, attempts, or gradings. The first two are called as the tasks' modes."""

    EPHEMERAL = "ephemeral"
    PERSISTENT = "persistent"
    GRADING = "grading"


class InstanceRequest(Wire):
    """One instance to make. `lifetime_s` bounds it from outside its own worker; None: a standing instance."""

    instance_id: UUID
    mode: InstanceMode
    resource_class: str = "standard"
    slots: int = 1
    lifetime_s: float | None = None
    cpus: float | None = None  # from here on: what its resource class offers; None: any
    memory_bytes: int | None = None
    gpus: int = 0
    architecture: str | None = None

    @property
    def queue(self) -> str:
        """The Celery queue that its worker takes from."""
        return queue_of(self.mode, self.resource_class)


def queue_of(mode: StrEnum, resource_class: str) -> str:
    """Queues are per mode (a task's or an instance's) and resource class: `ephemeral.standard`."""
    return f"{mode.value}.{resource_class}"
