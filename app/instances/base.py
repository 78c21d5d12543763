"""Defines the interface of a provider: it makes instances, each of which runs one Celery worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, runtime_checkable
from uuid import UUID

from app.models.instance import InstanceRequest

OnExit = Callable[[UUID, int | None, str], None]
"""Told of an end: the instance, its exit code where one is known, and why."""


OnWarning = Callable[[UUID, str], None]
"""Told that an instance will be taken away soon, and why: it drains."""


class Provider(Protocol):
    """Makes, ends and lists instances. Exits are reported by `ledger.instances.exited`, as soon as they are seen."""

    name: ClassVar[str]

    def launch(self, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        """Start instances; returns the handle of each that was started. Not all need to be.

        May be asked for again with the same ids: what lives is not started twice.

        Raises: InstanceFailed when the provider cannot be reached at all; LaunchUnclear when it was and said nothing.
        """
        ...

    def terminate(self, instance_id: UUID, handle: str, *, grace_s: float) -> None:
        """End an instance and everything in it; no error when it is gone already."""
        ...

    def alive(self) -> dict[UUID, str]:
        """The instances that exist now, with their handles. Raises: InstanceFailed: the provider is not reached."""
        ...


@runtime_checkable
class WatchedProvider(Protocol):
    """A provider whose engine sends events: the control worker keeps a thread in `watch`."""

    def watch(self, on_exit: OnExit, stop: threading.Event) -> None:
        """Report ends until `stop` is set, at first the earlier ones; an end may be reported twice."""
        ...


@runtime_checkable
class QueueingProvider(Protocol):
    """A provider whose engine has a queue of its own, in which an instance may wait before it starts."""

    def started(self) -> dict[UUID, float | None]:
        """Seconds since each existing instance began to run; None: it waits. Raises: InstanceFailed."""
        ...


@runtime_checkable
class WarnedProvider(Protocol):
    """A provider that hears beforehand of machines that will be taken away: its `watch` passes it on."""

    def warn(self, on_warning: OnWarning) -> None:
        """Whom to tell from here on."""
        ...
