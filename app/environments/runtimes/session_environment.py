"""Base class of environments with a session: runs commands, moves files, and names how the environment ended.

A subclass opens the session and its watches and reports how it ended; this class never starts or ends anything.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Unpack

import structlog

from app.environments.contract import Environment, Forward, Origin, ResetProof, Stats, Times
from app.environments.networks import Egress
from app.environments.session.client import SessionClient
from app.environments.sharing import WatchedShell
from app.environments.tools import Tool, versions
from app.errors import EnvironmentFailed, EnvironmentVanished, NotRestarted, StationError
from app.host import layer_files
from app.host.cgroup_counts import GroupUsage, MemoryWatch, PidsWatch, throttled_s, usage
from app.models.shell import (
    CommandOptions,
    CommandResult,
    DecideFile,
    InteractiveProgram,
    OutputLogs,
    ProgramOptions,
    Restart,
    StatefulShell,
)
from app.models.spec import EnvironmentSpec

log = structlog.get_logger()


class SessionEnvironment(Environment, ABC):
    """An environment accessed through its session. Safe for many threads."""

    _session: SessionClient

    def __init__(self, spec: EnvironmentSpec, times: Times, tools: tuple[Tool, ...] = ()) -> None:
        self._spec = spec
        self.times = times
        self._tools = tools
        self._origin = Origin.FRESH
        self._set_up_inside = False
        self._set_up_until_ns = 0
        self._forwards: weakref.WeakSet[Forward] = weakref.WeakSet()  # closed ones are dropped
        self._egress: Egress | None = None
        self._gone = threading.Event()  # ended by its owner
        self._memory = MemoryWatch(None, lambda: None)
        self._pids = PidsWatch()
        self._cpu_folders: tuple[Path, ...] = ()
        self._fate: tuple[type[EnvironmentFailed], str] | None = None  # why it was ended, other than by its owner

    def _described(self, kind: str, image_id: str, **more: Any) -> dict[str, Any]:
        """Returns what `describe` gives for a kind with images. more: what this kind adds."""
        return {
            "kind": kind,
            "id": self.id,
            "image": self._spec.label,
            "image_id": image_id,
            "origin": self._origin.value,
            "network": self._spec.network.value,
            **more,
            **({"tools": versions(self._tools)} if self._tools else {}),
            **({} if self._egress is None else {"egress": self._egress.describe()}),
            **self.times.describe(),
        }

    def mark_set_up(self) -> None:
        """Notes that set-up commands run in it, so that a reset would lose their results."""
        self._set_up_inside = True

    def note_set_up_done(self) -> None:
        """Notes that the current files are the set-up's, and later changes the agent's."""
        self._set_up_until_ns = layer_files.time_between_changes_ns()

    def _close_ports(self) -> None:
        """Closes the ports, which belong to this process and to the environment's current network."""
        for port_forward in list(self._forwards):
            port_forward.close()
        self._forwards.clear()

    @contextmanager
    def _teardown(self) -> Iterator[None]:
        """Marks the end: the environment cannot be used from here on. Records the block's time, the first time only."""
        first, begun = not self._gone.is_set(), time.monotonic()
        self._gone.set()
        try:
            yield
        finally:
            if first:
                self.times.phases["teardown"] = time.monotonic() - begun

    def _watch_memory(self, watch: MemoryWatch) -> None:
        """Replaces the memory watch: what it watches was started just now, or taken over."""
        self._memory.close()
        self._memory = watch

    def restart(self, decide: DecideFile) -> Restart:
        with self._alive_during("restart it", NotRestarted):
            try:
                return self._restarted(decide)
            except OSError as error:
                raise EnvironmentFailed(f"environment {self.id[:12]} could not be restarted: {error}") from error

    def _restarted(self, decide: DecideFile) -> Restart:
        """Does what `restart` says. Raises: StationError, OSError."""
        return super().restart(decide)

    def _reset(self) -> ResetProof:
        if self._set_up_inside:
            return ResetProof(clean=False, left=("set-up commands ran: what they made is not in the image",))
        try:
            self._raise_if_gone()
            self.times.phases.clear()  # its times so far were the last attempt's
            with self.times.measure("reset"):
                return self._reset_files()
        except (OSError, StationError) as error:
            log.warning("environment.reset_failed", environment=self.id, reason=str(error))
            return ResetProof(clean=False, left=(f"the reset itself failed: {error}",))

    @abstractmethod
    def _reset_files(self) -> ResetProof:
        """Restores the state after creation, or says why that cannot be proven. Raises: StationError, OSError."""

    @abstractmethod
    def _how_it_ended(self) -> str:
        """Describes its end, in brackets, for a message; empty while it lives. Raises: EnvironmentVanished: removed."""

    @property
    def gone(self) -> bool:
        """Whether it was ended, by its owner or for what it did."""
        return self._gone.is_set() or self._fate is not None

    def run(self, command: str, **how: Unpack[CommandOptions]) -> CommandResult:
        return self._watched(lambda: self._session.run(command, **how))

    def _watched(self, run: Callable[[], CommandResult]) -> CommandResult:
        with self._alive_during("run a command"):
            result = run()
            if not self._memory.killed(suspected=not result.ok):
                return result
        limit_bytes = self._spec.resources.most.memory_bytes
        log.warning("environment.out_of_memory", environment=self.id, limit_bytes=limit_bytes)
        note = b"" if result.ok else f"\n[killed: the memory limit of {limit_bytes} bytes was reached]\n".encode()
        return dataclasses.replace(result, stderr=result.stderr + note, out_of_memory=True)

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> StatefulShell:
        with self._alive_during("open a shell"):
            return WatchedShell(self._session.shell(cwd=cwd, env=env), self._watched)

    def stream(self, argv: Sequence[str], **how: Unpack[ProgramOptions]) -> InteractiveProgram:
        with self._alive_during(f"start {argv[0]}"):
            return self._session.stream(argv, **how)

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        with self._alive_during(f"write {path}"):
            self._session.put(path, content, mode=mode)

    def get(self, path: str) -> bytes:
        with self._alive_during(f"read {path}"):
            return self._session.get(path)

    def put_tree(self, archive: bytes, path: str) -> None:
        with self._alive_during(f"unpack into {path}"):
            self._session.put_tree(archive, path)

    def get_tree(self, path: str) -> bytes:
        with self._alive_during(f"read {path}"):
            return self._session.get_tree(path)

    def keep_logs(self, logs: OutputLogs | None) -> bool:
        self._session.logs = logs
        return True

    def memory_kills(self) -> int | None:
        with suppress(StationError):
            return self._memory.count()
        return None

    def host_kills(self) -> int | None:
        return self._memory.host_kills()

    def throttled_s(self) -> float | None:
        return throttled_s(self._cpu_folders)

    def usage(self) -> GroupUsage | None:
        return usage(self._memory.folder, self._cpu_folders)

    def processes_refused(self) -> int | None:
        return self._pids.refused()

    def stats(self) -> Stats:
        with self._alive_during("count what it uses"):
            return self._session.stats()

    @contextmanager
    def _alive_during(self, doing: str, failed: type[EnvironmentFailed] | None = None) -> Iterator[None]:
        """Adds to an error how the environment ended, if it has. failed: the error class to raise instead."""
        self._raise_if_gone()
        try:
            yield
        except EnvironmentFailed as error:
            self._raise_if_gone()
            how = self._how_it_ended()
            kind = failed or (EnvironmentVanished if how else EnvironmentFailed)
            raise kind(f"cannot {doing}: {error}{how}") from error
        except StationError:
            self._raise_if_gone()
            raise
        self._raise_if_ended()

    def _raise_if_gone(self) -> None:
        self._raise_if_ended()
        if self._gone.is_set():
            raise EnvironmentFailed(f"environment {self.id[:12]} was destroyed.")

    def _raise_if_ended(self) -> None:
        if self._fate is not None:
            kind, why = self._fate
            raise kind(f"environment {self.id[:12]} was ended: {why}.")


def give_up(environment: Environment) -> None:
    """Ends it after another failure, which is raised first; the sweeper removes what could not be removed."""
    try:
        environment.destroy()
    except StationError as error:
        log.warning("environment.destroy_failed", environment=environment.id, reason=str(error))


@contextmanager
def ended_on_error(environment: Environment) -> Iterator[None]:
    """Ends it when the block raises."""
    try:
        yield
    except BaseException:
        give_up(environment)
        raise
