"""An environment without a daemon, as the rest of the system sees it."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import structlog

from app.environments.base import CommandResult, Origin, ResetProof, Route, Stats, Tags, Times
from app.environments.container import WatchedShell
from app.environments.memory_watch import MemoryWatch
from app.environments.oci import kernel
from app.environments.oci.body import Body, Site, Wish, written_bytes
from app.environments.oci.store import StoredImage
from app.environments.oci.system_layer import HELPER
from app.environments.session import SessionClient, unix_connector
from app.errors import EnvironmentFailed, StationError
from app.models.shell import Interactive, StatefulShell
from app.models.spec import EnvironmentSpec

log = structlog.get_logger()

_READY_S = 20.0


class OciEnvironment:
    """One environment. Made by `OciProvider.create`, which has written its record."""

    def __init__(self, site: Site, identity: str, spec: EnvironmentSpec, image: StoredImage, times: Times) -> None:
        self._site = site
        self._spec = spec
        self._image = image  # with the snapshot's layer, when it stands on one
        self._body = Body(site, identity)
        self._origin = Origin.FRESH
        self._gone = threading.Event()
        self._life = threading.Lock()  # one start, reset or end at a time
        self._fate = ""
        self._set_up_inside = False
        self._session = self._new_session()
        self.times = times

    @property
    def id(self) -> str:
        return self._body.id

    @property
    def gone(self) -> bool:
        """Whether it was ended, by its owner or for what it did."""
        return self._gone.is_set() or bool(self._fate)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "oci",
            "id": self.id,
            "image": self._spec.label,
            "image_id": self._image.id,
            "origin": self._origin.value,
            "network": self._spec.network.value,
            "runtime": self._site.runtime.version,
            **self.times.describe(),
        }

    def adopt(self, tags: Tags) -> None:
        """From now on it belongs to this attempt."""
        self._raise_if_gone()
        try:
            self._site.records.relabel(self.id, tags.labels())
        except OSError as error:
            raise EnvironmentFailed(f"environment {self.id[:12]} cannot be given on: {error}.") from error
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
        self._raise_if_gone()
        if not self._memory.killed(suspected=not result.ok):
            return result
        limit_bytes = self._spec.resources.memory_bytes
        log.warning("environment.out_of_memory", environment=self.id, limit_bytes=limit_bytes)
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

    def written_bytes(self) -> int:
        """What its files take on disk beyond the image, the few that we gave it included."""
        return written_bytes(self._body.folder)

    # --- Life -----------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        with self._living("count what it uses"):
            return Stats(**dataclasses.asdict(self._session.stats()))

    def start(self) -> None:
        """Start it for the first time. Raises: EnvironmentFailed, DiskFull; then it must still be ended."""
        with self._life:
            self._start()

    def _start(self) -> None:
        self._raise_if_gone()
        with self.times.measure("start"):
            self._body.start(Wish(self._image, self._spec.resources, self._spec.env, self._spec.workdir))
        self._memory = MemoryWatch(self._body.cgroup.memory_events, lambda: None)
        with self.times.measure("session"):
            self._session.wait_ready(_READY_S)

    def _restart(self, image: StoredImage) -> None:
        self._session.close()
        self._image = image
        self._session = self._new_session()
        self._start()

    def _new_session(self) -> SessionClient:
        return SessionClient(
            unix_connector(self._body.address),
            label=f"environment {self.id[:12]}",
            cwd=self._spec.workdir,
            env=self._spec.env,
            user=self._image.user or None,
        )

    def reset(self) -> ResetProof:
        """End everything in it, throw its layer away, start it again under the same id: a new one in all but name."""
        if self._set_up_inside:
            return ResetProof(clean=False, left=("set-up commands ran: what they made is not in the image",))
        try:
            with self._life:
                self.times.phases.clear()  # what follows is another environment's beginning
                with self.times.measure("reset"):
                    return self._reset()
        except (OSError, StationError) as error:
            log.warning("environment.reset_failed", environment=self.id, reason=str(error))
            return ResetProof(clean=False, left=(f"the reset itself failed: {error}",))

    def _reset(self) -> ResetProof:
        self._raise_if_gone()
        killed = len(self._body.processes())
        self._body.stop()
        removed = self._body.wipe()
        left = tuple(str(place) for place in (self._body.upper, *self._body.cgroup.folders) if place.exists())
        if left:
            return ResetProof(clean=False, left=left)
        self._restart(self._image)
        self._origin, self.times.route = Origin.RECYCLED, Route.RECYCLED
        return ResetProof(clean=True, removed=removed, killed=killed)

    def mark_set_up(self) -> None:
        """Note that set-up commands ran in it, so that a reset would lose what they made."""
        self._set_up_inside = True

    def snapshot(self, key: str) -> str | None:
        """Keep what was written since the start as a layer under `key`, and go on from it; None, or why it cannot be.

        Processes and what lies in memory are no part of a snapshot: while there are any, nothing is kept.
        """
        with self._life:
            self._raise_if_gone()
            if (reason := self._outside_of_files()) is not None:
                return reason
            size_bytes = written_bytes(self._body.upper)
            self._body.stop()
            image = self._site.store.add_snapshot(key, self._image, self._body.upper, size_bytes)
            self._body.wipe()
            self._site.records.restack(self.id, image.layers)
            self._set_up_inside = False
            self._restart(image)
            return None

    def _outside_of_files(self) -> str | None:
        if self._body.processes():
            return "processes are running in it"
        if os.path.lexists(self._body.upper / HELPER):
            return "the session's helper was changed"
        first = self._body.pid
        if first is None:
            return "its first process is not known"
        with suppress(FileNotFoundError):
            root = os.open(f"/proc/{first}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                memory = kernel.open_inside(root, "dev/shm", os.O_RDONLY | os.O_DIRECTORY)
            finally:
                os.close(root)
            try:
                if os.listdir(memory):
                    return "there are files in /dev/shm"
            finally:
                os.close(memory)
        return None

    def fail(self, why: str) -> None:
        """End what runs in it, and say why to all who use it from now on; its owner still destroys it."""
        log.warning("environment.failed", environment=self.id, reason=why)
        self._fate = why
        self._session.close()
        self._body.cgroup.end(timeout_s=_READY_S)

    def destroy(self) -> None:
        first = not self._gone.is_set()
        self._gone.set()
        begun = time.monotonic()
        self._session.close()
        with self._life:
            self._session.close()  # a reset may have opened another
            self._body.end()
        if first:
            self.times.phases["teardown"] = time.monotonic() - begun

    @contextmanager
    def _living(self, doing: str) -> Iterator[None]:
        """Say what became of the environment, when that is what was wrong."""
        self._raise_if_gone()
        try:
            yield
        except EnvironmentFailed as error:
            self._raise_if_gone()
            raise EnvironmentFailed(f"cannot {doing}: {error}{self._how_it_ended()}") from error
        except StationError:
            self._raise_if_gone()
            raise

    def _how_it_ended(self) -> str:
        """Nothing, while its first process lives."""
        if self._body.lives:
            return ""
        if not self._site.records.exists(self.id):
            return f" ({self.id[:12]} was removed by somebody else)"
        why = ", out of memory" if self._memory.killed(suspected=True) else ""
        return f" (it is not running: its first process was killed{why})"

    def _raise_if_gone(self) -> None:
        if self._fate:
            raise EnvironmentFailed(f"environment {self.id[:12]} was ended: {self._fate}.")
        if self._gone.is_set():
            raise EnvironmentFailed(f"environment {self.id[:12]} was destroyed.")
