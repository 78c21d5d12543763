"""One container as an environment: its life, and its end told apart from a command's."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import structlog
from docker.errors import DockerException, NotFound
from requests import RequestException

from app.environments.base import CommandResult, Origin, ResetProof, Route, Stats, Tags, Times
from app.environments.engine import Engine
from app.environments.layer import Layer
from app.environments.memory_watch import MemoryWatch, file_of
from app.environments.ways import Entrance, Inside, Session
from app.errors import EnvironmentFailed, StationError
from app.models.shell import Interactive, StatefulShell
from app.models.spec import EnvironmentSpec

log = structlog.get_logger()

_DYING_S = 5.0
"""So long the engine may take to note that a container has ended whose processes are dead."""


class DockerEnvironment:
    """One container. Its first process is the session's helper, or sleeps: see `ways`."""

    def __init__(
        self,
        engine: Engine,
        inside: Inside,
        spec: EnvironmentSpec,
        image_id: str,
        entrance: Entrance,
        layer: Layer | None,
        times: Times,
    ) -> None:
        self._engine = engine
        self._inside = inside
        self._id = inside.container_id
        self._spec = spec
        self._image_id = image_id
        self._entrance = entrance
        self._layer = layer
        self._origin = Origin.FRESH
        self._gone = threading.Event()
        self.times = times

    def start(self, *, proven: bool) -> None:
        """Start it, for the first time or again, and open its session. Raises: WayClosed, APIError and its like."""
        with self.times.measure("start"):
            self._entrance.before_start(self._id)
            self._engine.api.start(self._id)
        with self.times.measure("session"):
            self._session: Session = self._entrance.open(self._inside, proven=proven)
        try:
            self._look()
        except BaseException:
            self._session.close()
            raise

    def _look(self) -> None:
        """What must be known before the first command."""
        about = self._engine.api.inspect_container(self._id)
        file = file_of(self._id, about["State"]["Pid"])
        self._memory = MemoryWatch(file, lambda: self._session.stats().oom_kills)
        if self._layer is not None and self._origin is Origin.FRESH:
            self._layer.note_outside(about)

    @property
    def id(self) -> str:
        return self._id

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "docker",
            "id": self._id,
            "image": self._spec.label,
            "image_id": self._image_id,
            "origin": self._origin.value,
            "network": self._spec.network.value,
            **self.times.describe(),
        }

    def adopt(self, tags: Tags) -> None:
        """From now on it belongs to this attempt: the name says so, since an engine cannot change labels."""
        told = self._engine.named(f"take over environment {self._id[:12]}", EnvironmentFailed)
        with self._living("take over"), told:
            self._engine.api.rename(self._id, tags.name())
        if self.times.route is Route.COLD:
            self.times.route = Route.WARM

    # --- Commands -------------------------------------------------------------------------------------------------

    def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        stdin: bytes | None = None,
    ) -> CommandResult:
        return self._watched(lambda: self._session.run(command, cwd=cwd, env=env, timeout_s=timeout_s, stdin=stdin))

    def _watched(self, run: Callable[[], CommandResult]) -> CommandResult:
        """The result, with a word on memory when that was short."""
        with self._living("run a command"):
            result = run()
            if not self._memory.killed(suspected=not result.ok):
                return result
        limit_bytes = self._spec.resources.memory_bytes
        log.warning("environment.out_of_memory", environment=self._id, limit_bytes=limit_bytes)
        note = b"" if result.ok else f"\n[killed: the memory limit of {limit_bytes} bytes was reached]\n".encode()
        return dataclasses.replace(result, stderr=result.stderr + note, out_of_memory=True)

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> StatefulShell:
        with self._living("open a shell"):
            return WatchedShell(self._session.shell(cwd=cwd, env=env), self._watched)

    def stream(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        tty: bool = False,
        rows: int = 24,
        columns: int = 80,
    ) -> Interactive:
        with self._living(f"start {argv[0]}"):
            return self._session.stream(argv, cwd=cwd, env=env, tty=tty, rows=rows, columns=columns)

    # --- Files ----------------------------------------------------------------------------------------------------

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        with self._living(f"write {path}"):
            self._session.put(path, content, mode=mode)

    def get(self, path: str) -> bytes:
        with self._living(f"read {path}"):
            return self._session.get(path)

    def put_tree(self, archive: bytes, path: str) -> None:
        with self._living(f"unpack into {path}"):
            self._session.put_tree(archive, path)

    def get_tree(self, path: str) -> bytes:
        with self._living(f"read {path}"):
            return self._session.get_tree(path)

    # --- Life -----------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        with self._living("count what it uses"):
            return Stats(**dataclasses.asdict(self._session.stats()))

    def reset(self) -> ResetProof:
        """See `Layer`: kill everything, empty the container's own layer, prove it empty, start again."""
        if self._spec.setup:
            return ResetProof(clean=False, left=("set-up commands ran: what they made is not in the image",))
        if self._layer is None:
            return ResetProof(clean=False, left=("the engine's layers are not visible here: nothing can be proven",))
        try:
            self.times.phases.clear()  # what it cost to make it was the last attempt's
            with self.times.measure("reset"):
                return self._reset(self._layer)
        except (DockerException, RequestException, OSError, StationError) as error:
            log.warning("environment.reset_failed", environment=self._id, reason=str(error))
            return ResetProof(clean=False, left=(f"the reset itself failed: {error}",))

    def _reset(self, layer: Layer) -> ResetProof:
        killed = self._session.stats().processes
        self._session.close()
        api = self._engine.api
        api.kill(self._id, signal="KILL")
        api.wait(self._id, timeout=30)
        state = api.inspect_container(self._id)  # answers only after the engine has unmounted the file system
        if state["State"]["Running"] or layer.has_volumes(state):
            return ResetProof(clean=False, left=("it would not stop, or has volumes",))
        removed = layer.empty()
        left = layer.residue()
        self._origin, self.times.route = Origin.RECYCLED, Route.RECYCLED
        self.start(proven=True)
        left += layer.changed_outside()
        return ResetProof(clean=not left, removed=removed, restored=0, killed=killed, left=tuple(left[:20]))

    def destroy(self) -> None:
        first = not self._gone.is_set()
        self._gone.set()
        begun = time.monotonic()
        self._session.close()
        try:
            with self._engine.named(f"remove environment {self._id[:12]}", EnvironmentFailed):
                self._engine.remove(self._id)
        finally:
            self._entrance.close()
            if first:
                self.times.phases["teardown"] = time.monotonic() - begun

    @contextmanager
    def _living(self, doing: str) -> Iterator[None]:
        """Say how the container ended, when that is what was wrong."""
        self._raise_if_gone()
        try:
            yield
        except EnvironmentFailed as error:
            self._raise_if_gone()
            fate = "" if self._answers() else self._fate()
            raise EnvironmentFailed(f"cannot {doing}: {error}{fate}") from error
        except StationError:
            self._raise_if_gone()
            raise

    def _raise_if_gone(self) -> None:
        if self._gone.is_set():
            raise EnvironmentFailed(f"environment {self._id[:12]} was destroyed.")

    def _answers(self) -> bool:
        try:
            self._session.stats()
        except EnvironmentFailed:
            return False
        return True

    def _fate(self) -> str:
        """How the container ended, when it did: the engine hears of it later than its processes."""
        give_up = time.monotonic() + _DYING_S
        try:
            while time.monotonic() < give_up:
                state = self._engine.api.inspect_container(self._id)["State"]
                if not state["Running"]:
                    why = ", out of memory" if state["OOMKilled"] else ""
                    return f" (it is not running: it ended with exit code {state['ExitCode']}{why})"
                if self._gone.wait(0.02):
                    break
        except NotFound:
            return f" (No such container: {self._id[:12]} was removed by somebody else)"
        except (DockerException, RequestException) as error:
            return f" (and the engine does not answer: {error})"
        return ""


class WatchedShell:
    """A session's shell whose results are looked at as those of other commands."""

    def __init__(self, shell: StatefulShell, watched: Callable[[Callable[[], CommandResult]], CommandResult]) -> None:
        self._shell = shell
        self._watched = watched

    def run(self, command: str, *, timeout_s: float) -> CommandResult:
        return self._watched(lambda: self._shell.run(command, timeout_s=timeout_s))

    def close(self) -> None:
        self._shell.close()
