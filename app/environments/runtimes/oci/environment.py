"""Environment that is run by an OCI runtime, behind the common interface."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from app.environments.contract import Forward, Origin, ResetProof, Route, Serve, Tags, Times
from app.environments.isolation.sizes import size_variables
from app.environments.networks import forwarding, open_egress, variables
from app.environments.runtimes.oci.instance import OciHost, OciInstance, StartOptions, usage_of
from app.environments.runtimes.oci.system_layer import HELPER
from app.environments.runtimes.session_environment import SessionEnvironment
from app.environments.session.client import SessionClient
from app.environments.session.connection import Connect, unix_connector
from app.environments.tools import Tool
from app.errors import EnvironmentFailed, EnvironmentVanished
from app.host import kernel
from app.host.cgroup_counts import MemoryWatch, PidsWatch
from app.host.disk import DiskUsage
from app.host.environment_records import Records
from app.images.layer_store import StoredImage
from app.models.shell import DecideFile, Restart
from app.models.spec import EnvironmentSpec, Reuse

log = structlog.get_logger()

_READY_S = 20.0


class OciEnvironment(SessionEnvironment):
    """An environment made by `OciProvider.create`, which has written its record."""

    def __init__(
        self,
        site: OciHost,
        identity: str,
        spec: EnvironmentSpec,
        image: StoredImage,
        times: Times,
        tools: tuple[Tool, ...] = (),
    ) -> None:
        super().__init__(spec, times, tools)
        self._site = site
        self._image = image  # with the snapshot's layer, if it is based on one
        self._body = OciInstance(site, identity)
        self._life = threading.Lock()  # one start, reset or end at a time
        self._session: SessionClient = self._new_session(unix_connector(self._body.place.address))
        self._pids = PidsWatch((self._body.cgroup.pids_folder,))
        self._cpu_folders = (self._body.cgroup.cpu_folder,)

    @property
    def id(self) -> str:
        return self._body.id

    def describe(self) -> dict[str, Any]:
        return self._described("oci", self._image.id, runtime=self._body.started_by)

    def adopt(self, tags: Tags) -> None:
        """Records that it belongs to this attempt from now on."""
        with self.times.handed_on():
            self._raise_if_gone()
            self._note(lambda records: records.relabel(self.id, tags.labels()))

    def _note(self, change: Callable[[Records], bool]) -> None:
        try:
            known = change(self._site.records)
        except OSError as error:
            raise EnvironmentFailed(f"the record of environment {self.id[:12]} cannot be written: {error}.") from error
        if not known:
            raise EnvironmentVanished(f"environment {self.id[:12]} was removed from outside.")

    def forward(self, port: int, serve: Serve) -> Forward:
        with self._life, self._alive_during(f"listen at port {port}"):
            return self._forward(port, serve)

    def _forward(self, port: int, serve: Serve) -> Forward:
        """Forwards a port; the caller holds the life lock."""
        port_forward = forwarding.forward(self._body.pid, self.stream, port, serve, lives=lambda: self._body.lives)
        self._forwards.add(port_forward)
        return port_forward

    def written(self) -> DiskUsage:
        """Returns the disk usage of its files beyond the image, including the few that we gave it."""
        return usage_of(self.id, self._body.place.folder)

    def start(self, *, deadline: float) -> None:
        """Starts it for the first time. deadline: monotonic. Raises: EnvironmentFailed, DiskFull; end it also then."""
        with self._life:
            self._start(deadline)

    def _start(self, deadline: float) -> None:
        self._raise_if_gone()
        spec = self._spec
        with self.times.measure("start"):
            wish = StartOptions(
                self._image,
                spec.resources,
                spec.env,
                spec.workdir,
                self._read_only,
                deadline=deadline,
                tools=self._tools,
            )
            self._body.start(wish)
        self._watch_memory(self._new_memory_watch())
        with self.times.measure("session"):
            self._session.wait_ready(max(0.1, min(_READY_S, deadline - time.monotonic())))
        self._egress = open_egress(spec, self._forward)

    def _new_memory_watch(self) -> MemoryWatch:
        return MemoryWatch(self._body.cgroup.memory_events, lambda: None)

    def _start_anew(self, image: StoredImage) -> None:
        self._close_ports()
        self._session.close()
        self._image = image
        self._session = self._new_session(unix_connector(self._body.place.address))
        self._start(time.monotonic() + _READY_S)

    def _new_session(self, connect: Connect) -> SessionClient:
        sizes = size_variables(self._spec.resources, os.cpu_count() or 1)
        return SessionClient(
            connect,
            label=self.id[:12],
            cwd=self._spec.workdir,
            env={**sizes, **variables(self._spec), **self._spec.env},
            user=self._image.user or None,
        )

    def _reset_files(self) -> ResetProof:
        """Ends everything in it, deletes its layer, starts it again under the same id: new in all but name."""
        with self._life:
            return self._emptied()

    def _emptied(self) -> ResetProof:
        self._raise_if_gone()
        killed = len(self._body.processes())
        self._body.stop()
        removed = self._body.wipe()
        left = tuple(str(place) for place in (self._body.place.upper, *self._body.cgroup.folders) if place.exists())
        if left:
            return ResetProof(clean=False, left=left)
        self._start_anew(self._image)
        self._origin, self.times.route = Origin.RECYCLED, Route.RECYCLED
        return ResetProof(clean=True, removed=removed, killed=killed)

    def _restarted(self, decide: DecideFile) -> Restart:
        with self._life:
            killed = len(self._body.processes())
            self._body.stop()
            put_back = self._body.put_back(self._image.layers, decide, self._set_up_until_ns)
            self._body.clear()
            self._start_anew(self._image)
        return Restart(killed, *put_back)

    @property
    def _read_only(self) -> bool:
        return self._spec.reuse is Reuse.SHARED_READONLY and not self._set_up_inside

    def keep(self, key: str) -> str | None:
        """Makes what was written since the start a layer under `key`, and continues from it. Returns why not, or None.

        Processes and files in memory are no part of a layer: while there are any, nothing is kept.
        """
        with self._life:
            self._raise_if_gone()
            if (reason := self._outside_of_files()) is not None:
                return reason
            size_bytes = DiskUsage.of(self._body.place.upper).size_bytes
            self._body.stop()
            image = self._site.store.add_snapshot(key, self._image, self._body.place.upper, size_bytes)
            self._body.wipe()
            self._site.records.restack(self.id, image.layers)
            self._set_up_inside = False
            self._start_anew(image)
            return None

    def _outside_of_files(self) -> str | None:
        if self._body.processes():
            return "processes are running in it"
        if os.path.lexists(self._body.place.upper / HELPER):
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

    def fail(self, why: str, *, kind: type[EnvironmentFailed] = EnvironmentFailed) -> None:
        """Ends what runs in it; all later calls raise `why`. Its owner still destroys it."""
        log.warning("environment.failed", environment=self.id, reason=why)
        self._fate = (kind, why)
        self._session.close()
        self._body.cgroup.end(timeout_s=_READY_S)

    def _destroy(self) -> None:
        with self._teardown():
            self._session.close()
            with self._life:
                self._close_ports()
                self._session.close()  # a reset may have opened another
                self._memory.close()
                self._body.end()

    def _how_it_ended(self) -> str:
        if self._body.lives:
            return ""
        if not self._site.records.exists(self.id):
            raise EnvironmentVanished(f"environment {self.id[:12]} was removed from outside.")
        why = ", out of memory" if self._memory.killed(suspected=True) else ""
        return f" (it is not running: its first process was killed{why})"
