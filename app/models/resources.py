"""The two sizes of a task: what it is guaranteed, and what it may take at most."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic import Field, model_validator

from app.models.wire import Wire

MOST_BYTES = 1 << 50
MOST_CPUS = 256
MOST_KILL_AT = 64
"""Times what is guaranteed."""
_UNSTATED = 3.0
"""`kill_at` of a task that states no size, times the default size."""


class KillAt(Wire):
    """How much of processors and memory a task may take at most; swap is not added."""

    cpus: float = Field(gt=0, le=MOST_CPUS)
    memory_bytes: int = Field(ge=16 << 20, le=MOST_BYTES)


class Resources(Wire):
    """What one task container has. `cpus` and `memory_bytes` are guaranteed; up to `kill_at` it may take more.

    Source of the two numbers: "Quantifying infrastructure noise in agentic coding evals" (Anthropic, 2026).
    """

    cpus: float = Field(default=2.0, gt=0, le=MOST_CPUS)
    memory_bytes: int = Field(default=2 << 30, ge=16 << 20, le=MOST_BYTES)
    kill_at: KillAt | None = None  # None: as much as is guaranteed
    pids: int = Field(default=512, ge=16, le=1 << 22)
    disk_bytes: int | None = Field(
        default=None, ge=64 << 20, le=MOST_BYTES
    )  # written; None: 16 GiB, where it is watched

    @model_validator(mode="after")
    def _kill_at_guaranteed_or_more(self) -> Resources:
        if self.kill_at and (self.kill_at.cpus < self.cpus or self.kill_at.memory_bytes < self.memory_bytes):
            raise ValueError("expected `kill_at` of at least what is guaranteed, found less")
        return self

    @property
    def most(self) -> KillAt:
        """What its control group is limited to."""
        return self.kill_at or KillAt(cpus=self.cpus, memory_bytes=self.memory_bytes)

    @property
    def label(self) -> str:
        """Both numbers, for a person."""
        most = self.most
        guaranteed = f"{self.cpus:g} cpus, {self.memory_bytes >> 20} MiB guaranteed"
        return f"{guaranteed}; kill at {most.cpus:g} cpus, {most.memory_bytes >> 20} MiB"

    def times(self, cpus: float, memory: float) -> KillAt:
        """These multiples of what is guaranteed, as far as there is a number for them."""
        memory_bytes = min(MOST_BYTES, round(self.memory_bytes * memory))
        return KillAt(cpus=min(MOST_CPUS, self.cpus * cpus), memory_bytes=memory_bytes)

    def sized(self, factor: float | None, default: Resources) -> Resources:
        """With both numbers. What was never set is the default's size, and may grow to three times of it.

        factor: of what is guaranteed, whatever the task says; None: its own `kill_at`, or 1 where it states a size.
        """
        stated = {name: getattr(self, name) for name in self.model_fields_set}
        return _sized(tuple(stated.items()), factor, default)


@lru_cache(maxsize=1024)  # the tasks of a dataset are mostly of one size
def _sized(stated: tuple[tuple[str, Any], ...], factor: float | None, default: Resources) -> Resources:
    """As `Resources.sized`; stated: what was set."""
    given = Resources.model_validate(dict(stated))
    unstated = {name: getattr(default, name) for name in ("cpus", "memory_bytes") if name not in given.model_fields_set}
    found = given.model_copy(update=unstated)
    if factor is None and (own := given.kill_at) is not None:
        most = KillAt(cpus=max(own.cpus, found.cpus), memory_bytes=max(own.memory_bytes, found.memory_bytes))
    else:
        most = found.times(*(factor or (_UNSTATED if n in unstated else 1.0) for n in ("cpus", "memory_bytes")))
    return found.model_copy(update={"kill_at": most})
