"""Defines the interface of a provider: it makes instances, each of which runs one Celery worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, runtime_checkable
from uuid import UUID

from app.models.instance import InstanceRequest

OnExit = Callable[[UUID, int | None, str], None]
"""Callback for an end: the instance, its exit code if known, and the reason."""


OnWarning = Callable[[UUID, str], None]
"""Callback for an instance that will be taken away soon, with the reason: it drains."""


class Provider(Protocol):
    """Makes, ends and lists instances. Exits are reported by `ledger.instances.exited`, as soon as they are seen."""

    name: ClassVar[str]

    def launch(self, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        """Starts instances. Returns the handle of each that was started, which need not be all.

        May be called again with the same ids: living instances are not started twice.

        Raises: InstanceFailed when the provider cannot be reached at all; LaunchUnclear when it was and did not answer.
        """
        ...

    def terminate(self, instance_id: UUID, handle: str, *, grace_s: float) -> None:
        """Ends an instance and everything in it; no error when it is gone already."""
        ...

    def alive(self) -> dict[UUID, str]:
        """Returns the instances that exist now, with their handles. Raises: InstanceFailed: not reachable."""
        ...


@runtime_checkable
class WatchedProvider(Protocol):
    """A provider whose engine sends events: the control worker runs `watch` in a thread."""

    def watch(self, on_exit: OnExit, stop: threading.Event) -> None:
        """Reports ends until `stop` is set, at first the earlier ones; an end may be reported twice."""
        ...


@runtime_checkable
class QueueingProvider(Protocol):
    """A provider whose engine has a queue of its own, in which an instance may wait before it starts."""

    def started(self) -> dict[UUID, float | None]:
        """Returns the seconds since each existing instance began to run; None: it waits. Raises: InstanceFailed."""
        ...


@runtime_checkable
class WarnedProvider(Protocol):
    """A provider with early warnings of machines that will be taken away: its `watch` passes them on."""

    def warn(self, on_warning: OnWarning) -> None:
        """Sets the callback for warnings."""
        ...
