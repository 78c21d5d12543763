"""A pod as an environment: its session, its ports, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from app.environments.contract import Forward, ResetProof, Serve, Times
from app.environments.networks import open_egress
from app.environments.networks.forwarding import forward
from app.environments.runtimes.kubernetes.changes import judged
from app.environments.runtimes.kubernetes.cluster import Cluster
from app.environments.runtimes.kubernetes.exec_streams import PodStream
from app.environments.runtimes.kubernetes.pod import BRIDGE, PodEnd, pod_end
from app.environments.runtimes.session_environment import SessionEnvironment, give_up
from app.environments.session.client import SessionClient
from app.environments.session.protocol import FileListing
from app.environments.tools import Tool, archived
from app.errors import EnvironmentFailed, EnvironmentVanished, StationError
from app.host.cgroup_counts import MemoryWatch
from app.models.shell import DecideFile, Restart
from app.models.spec import TOOLS_INSIDE, EnvironmentSpec

log = structlog.get_logger()

KIND = "kubernetes"
_READY_S = 20.0
_DYING_S = 5.0
"""Seconds for a node to report that a pod has ended."""
_UNPROVEN = "a pod cannot be emptied from outside"
_READ_BYTES, _FETCHED_BYTES = 64 << 10, 16 << 20


class KubernetesEnvironment(SessionEnvironment):
    """A pod whose first process is the session's helper; each concurrent command has an exec that stays open."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        spec: EnvironmentSpec,
        *,
        image_id: str,
        machine: str,
        tools: tuple[Tool, ...],
        times: Times,
        fresh: Callable[[], KubernetesEnvironment],
    ) -> None:
        """name: of the pod; image_id: its digest; machine: its processor; fresh: makes another of the same image."""
        super().__init__(spec, times, tools)
        self._cluster = cluster
        self._name = name
        self._image_id = image_id
        self._machine = machine
        self._fresh = fresh
        self._begun_ns = 0

    def open(self, first: PodStream, user: str | None) -> None:
        """Opens the session over its first connection. user: of commands; None: root. Raises: EnvironmentFailed."""
        waiting = [first]

        def connect() -> PodStream:
            return waiting.pop() if waiting else self._cluster.exec(self._name, BRIDGE)

        self._session = SessionClient(connect, label=self._name[:12], cwd=self._spec.workdir, user=user, bridged=True)
        try:
            self._session.wait_ready(_READY_S)
            self._watch_memory(MemoryWatch(None, lambda: self._session.stats().oom_kills))
            self._egress = open_egress(self._spec, self.forward)
        except BaseException:
            self._session.close()
            raise

    @property
    def id(self) -> str:
        return self._name

    def describe(self) -> dict[str, Any]:
        return self._described(KIND, self._image_id, namespace=self._cluster.namespace)

    def bring_tools(self) -> None:
        """Copies in the tools that the spec names. Raises: EnvironmentFailed."""
        for tool in self._tools:
            with self._alive_during(f"bring {tool.name}"), archived(tool, TOOLS_INSIDE) as packed:
                self._session.put_tree(packed, TOOLS_INSIDE)

    def note_begun(self) -> None:
        """Notes that the current files are the task's, and later changes the agent's."""
        self._begun_ns = self.list_files("/dev").now_ns

    def list_files(self, folder: str) -> FileListing:
        """Lists files below a folder, on its file system. Raises: EnvironmentFailed."""
        with self._alive_during(f"list {folder}"):
            return self._session.list_files(folder)

    def forward(self, port: int, serve: Serve) -> Forward:
        with self._alive_during(f"open port {port}"):
            port_forward = forward(None, self.stream, port, serve, machine=self._machine)
            self._forwards.add(port_forward)
            return port_forward

    def restart(self, decide: DecideFile) -> Restart:
        """Ends every process but the helper, and has the agent's changes judged: see `changes`."""
        with self._alive_during("restart it"):
            self._close_ports()
            killed = self._kill_all()
            now = self._session.list_files("/")
        fresh = self._fresh()
        try:
            image = fresh.list_files("/")
        finally:
            give_up(fresh)
        emptied, suspect = judged(now, image, self._begun_ns, decide, self._read_some)
        for path in emptied:
            self.put(path, b"")
        self._egress = open_egress(self._spec, self.forward)
        return Restart(killed, emptied, suspect)

    def _kill_all(self) -> int:
        """Kills all but the helper; returns how many. Bridges end, too: no reply comes. Raises: EnvironmentFailed."""
        killed, give_up_at = self._session.stats().processes, time.monotonic() + _DYING_S
        while True:
            with suppress(EnvironmentFailed):
                self._session.kill_all()
            if not self._session.stats().processes:
                return killed
            if time.monotonic() > give_up_at:
                raise EnvironmentFailed(f"environment {self.id[:12]}: processes in it outlive their end.")

    def _read_some(self, path: str) -> bytes | None:
        try:
            return self._session.get(path, limit_bytes=_FETCHED_BYTES)[:_READ_BYTES]
        except FileNotFoundError:
            return None
        except EnvironmentFailed:  # it is too large: as many bytes as are read of any file
            return bytes(_READ_BYTES)

    def _reset_files(self) -> ResetProof:
        return ResetProof(clean=False, left=(_UNPROVEN,))

    def _destroy(self) -> None:
        with self._teardown():
            self._close_ports()
            self._session.close()
            self._memory.close()
            self._cluster.delete_pod(self._name)

    def _how_it_ended(self) -> str:
        try:
            self._session.stats()
        except EnvironmentFailed:
            pass
        else:
            return ""
        try:
            end = self._pod_end()
        except StationError as error:
            return f" ({error})"
        if end is None:
            return ""
        if not issubclass(end.kind, EnvironmentVanished):
            self._fate = (end.kind, end.why)
            self._raise_if_ended()
        return f" ({end.why})"

    def _pod_end(self) -> PodEnd | None:
        """Returns how the pod ended. Waits, as a node reports an end later than its streams do."""
        give_up = time.monotonic() + _DYING_S
        while not self._gone.wait(0.05):
            end = pod_end(self._cluster.pod(self._name))
            if end is not None or time.monotonic() > give_up:
                return end
        return None
