"""Defines the two sizes of a task: the guaranteed size and the maximum."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic import Field, model_validator

from app.models.wire import Wire

MOST_BYTES = 1 << 50
MOST_CPUS = 256
MOST_KILL_AT = 64
"""Limit of `kill_at`, as a factor of the guaranteed size."""
_UNSTATED = 3.0
"""`kill_at` of a task without a stated size, as a factor of the default size."""


class KillAt(Wire):
    """Maximum of processors and memory that a task may use; no extra swap."""

    cpus: float = Field(gt=0, le=MOST_CPUS)
    memory_bytes: int = Field(ge=16 << 20, le=MOST_BYTES)


class Resources(Wire):
    """Resources of one task container. `cpus` and `memory_bytes` are guaranteed; it may use more, up to `kill_at`.

    Source of the two numbers: "Quantifying infrastructure noise in agentic coding evals" (Anthropic, 2026).
    """

    cpus: float = Field(default=2.0, gt=0, le=MOST_CPUS)
    memory_bytes: int = Field(default=2 << 30, ge=16 << 20, le=MOST_BYTES)
    kill_at: KillAt | None = None  # None: the guaranteed size
    pids: int = Field(default=512, ge=16, le=1 << 22)
    disk_bytes: int | None = Field(
        default=None, ge=64 << 20, le=MOST_BYTES
    )  # limit of written data; None: 16 GiB, if the host measures it

    @model_validator(mode="after")
    def _kill_at_guaranteed_or_more(self) -> Resources:
        if self.kill_at and (self.kill_at.cpus < self.cpus or self.kill_at.memory_bytes < self.memory_bytes):
            raise ValueError("expected `kill_at` of at least what is guaranteed, found less")
        return self

    @property
    def most(self) -> KillAt:
        """Limits of its control group."""
        return self.kill_at or KillAt(cpus=self.cpus, memory_bytes=self.memory_bytes)

    @property
    def label(self) -> str:
        """Both sizes as text for people."""
        most = self.most
        guaranteed = f"{self.cpus:g} cpus, {self.memory_bytes >> 20} MiB guaranteed"
        return f"{guaranteed}; kill at {most.cpus:g} cpus, {most.memory_bytes >> 20} MiB"

    def times(self, cpus: float, memory: float) -> KillAt:
        """Returns these multiples of the guaranteed size, up to the highest allowed values."""
        memory_bytes = min(MOST_BYTES, round(self.memory_bytes * memory))
        return KillAt(cpus=min(MOST_CPUS, self.cpus * cpus), memory_bytes=memory_bytes)

    def sized(self, factor: float | None, default: Resources) -> Resources:
        """Returns the resources with both sizes. A size never set is the default's, and may grow to three times that.

        factor: maximum as a factor of the guaranteed size; None: the task's own `kill_at`, or 1 if it states a size.
        """
        stated = {name: getattr(self, name) for name in self.model_fields_set}
        return _sized(tuple(stated.items()), factor, default)


@lru_cache(maxsize=1024)  # the tasks of a dataset mostly have the same size
def _sized(stated: tuple[tuple[str, Any], ...], factor: float | None, default: Resources) -> Resources:
    """Implements `Resources.sized`. stated: the fields that were set."""
    given = Resources.model_validate(dict(stated))
    unstated = {name: getattr(default, name) for name in ("cpus", "memory_bytes") if name not in given.model_fields_set}
    resources = given.model_copy(update=unstated)
    if factor is None and (own := given.kill_at) is not None:
        most = KillAt(cpus=max(own.cpus, resources.cpus), memory_bytes=max(own.memory_bytes, resources.memory_bytes))
    else:
        most = resources.times(*(factor or (_UNSTATED if n in unstated else 1.0) for n in ("cpus", "memory_bytes")))
    return resources.model_copy(update={"kill_at": most})
