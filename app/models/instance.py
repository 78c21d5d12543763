"""Defines the request for an instance to a provider."""

from __future__ import annotations

from enum import StrEnum
from uuid import UUID

from app.models.spec import Wire

MARK = "MF_INSTANCE"
"""Environment variable that every process of an instance inherits; its launcher finds processes to kill by it."""


class InstanceMode(StrEnum):
    """Work of an instance: one attempt, many attempts, or gradings. The first two have the names of task modes."""

    EPHEMERAL = "ephemeral"
    PERSISTENT = "persistent"
    GRADING = "grading"


class InstanceRequest(Wire):
    """Request for one instance. `lifetime_s` is enforced from outside its worker; None: a standing instance."""

    instance_id: UUID
    mode: InstanceMode
    resource_class: str = "standard"
    slots: int = 1
    lifetime_s: float | None = None
    cpus: float | None = None  # this and the next: sizes of its resource class; None: any
    memory_bytes: int | None = None
    gpus: int = 0
    architecture: str | None = None

    @property
    def queue(self) -> str:
        """The Celery queue that its worker consumes."""
        return queue_of(self.mode, self.resource_class)


def queue_of(mode: StrEnum, resource_class: str) -> str:
    """Returns the queue of a mode (of a task or an instance) and resource class, e.g. `ephemeral.standard`."""
    return f"{mode.value}.{resource_class}"
