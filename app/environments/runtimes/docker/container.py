"""A container as an environment: its life, and how it ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from docker.errors import APIError, DockerException, NotFound
from requests import RequestException

from app.environments.contract import UNSEEN, Forward, Origin, ResetProof, Route, Serve, Tags
from app.environments.networks import open_egress
from app.environments.networks.forwarding import forward
from app.environments.runtimes.session_environment import SessionEnvironment
from app.environments.runtimes.setup import EnvironmentRequest
from app.environments.session.transports import ContainerTarget, Transport
from app.environments.tools import Tool, archived
from app.errors import EnvironmentFailed, EnvironmentVanished, StationError
from app.host import layer_files, unseen_layer
from app.host.cgroup_counts import MemoryWatch, PidsWatch, container_memory_events
from app.host.cgroups import container_folders, container_processes, in_container
from app.host.container_layer import ContainerLayer, outside_of, places_of, usage_of
from app.host.disk import DiskUsage
from app.host.engine import Engine
from app.models.shell import DecideFile, Restart

log = structlog.get_logger()

_DYING_S = 5.0
"""Seconds for the engine to notice that a container without processes has ended."""
_SWEPT_SOON_S = 10.0
"""Minimum time left; with less, a sweeper might come before the engine has given it a new deadline."""
_HANDED_OUT_S = 0.05
"""Delay of a rename, so that it takes no processor time from the hand-out."""
KIND = "docker"


class DockerEnvironment(SessionEnvironment):
    """A container whose first process is the session's helper, see `session.transports`."""

    def __init__(
        self,
        engine: Engine,
        inside: ContainerTarget,
        request: EnvironmentRequest,
        transport: Transport,
        layer: ContainerLayer | None,
        tools: tuple[Tool, ...] = (),
        *,
        name: str,
        alone: bool,
    ) -> None:
        """alone: without any network of the engine."""
        super().__init__(request.spec, request.times, tools)
        self._engine = engine
        self._inside = inside
        self._image_id = request.image_id  # the task's, also when the container is based on a set-up's result
        self._transport = transport
        self._layer = layer
        self._name = name
        self._alone = alone
        self._naming: threading.Thread | None = None
        self._hurry = threading.Event()

    def start(self, *, proven: bool) -> None:
        """Starts it, for the first time or again, and opens its session. Raises: TransportUnusable; APIError."""
        with self.times.measure("start"):
            self._transport.before_start(self.id)
            self._engine.api.start(self.id)
        with self.times.measure("session"):
            self._session = self._transport.open(self._inside, proven=proven)
        try:
            self._look()
            self._egress = open_egress(self._spec, self.forward)
        except BaseException:
            self._close_ports()
            self._session.close()
            raise

    def _look(self) -> None:
        """Finds out what must be known before the first command; asks the engine only for what is not visible."""
        init, outside = self._transport.init(), self._outside()
        if init is not None and outside is not None and in_container(self.id, init):
            self._pid = init
        else:
            about = self._engine.api.inspect_container(self.id)
            self._pid = int(about["State"]["Pid"])
            outside = outside_of(about)
        self._watch_limits()
        if self._layer is not None and self._origin is Origin.FRESH and not self._layer.outside:
            try:
                self._layer.note_outside(outside)
            except OSError as error:
                raise EnvironmentVanished(
                    f"environment {self.id[:12]} was removed while it started: {error}"
                ) from error

    def _outside(self) -> list[Path] | None:
        """Returns paths for `ContainerLayer.note_outside`; None: only the engine knows them."""
        if self._layer is None or self._origin is not Origin.FRESH:
            return []
        alone = self._engine.folder_of(self.id) / "hostname" if self._alone else None
        return [alone] if alone is not None and alone.exists() else None

    def _watch_limits(self) -> None:
        memory = container_memory_events(self.id, self._pid)
        self._watch_memory(MemoryWatch(memory, lambda: self._session.stats().oom_kills))
        self._pids = PidsWatch(container_folders(self.id, self._pid, "pids"))
        self._cpu_folders = tuple(container_folders(self.id, self._pid, "cpu"))

    @property
    def id(self) -> str:
        return self._inside.container_id

    def describe(self) -> dict[str, Any]:
        return self._described(KIND, self._image_id)

    def bring_tools(self) -> None:
        """Copies in the tools that the engine could not mount. Raises: EnvironmentFailed, EngineUnavailable."""
        if self._transport.shares_files:
            return
        for tool in self._tools:
            doing = f"bring {tool.name} into environment {self.id[:12]}"
            with archived(tool) as packed, self._engine.named(doing, EnvironmentFailed):
                self._engine.api.put_archive(self.id, "/", packed)

    def volumes(self) -> list[str]:
        """Returns mount points inside that are neither its own nor the session's. Raises: EnvironmentFailed."""
        ours = {*(str(mount["Target"]) for mount in self._transport.mounts), *(tool.target for tool in self._tools)}
        with self._engine.named(f"look at environment {self.id[:12]}", EnvironmentFailed):
            mounts = self._engine.api.inspect_container(self.id)["Mounts"]
        return [str(mount["Destination"]) for mount in mounts if mount["Destination"] not in ours]

    @property
    def layer_in_sight(self) -> bool:
        """Whether its own file layer is on a disk of this host's."""
        return self._layer is not None

    def written(self) -> DiskUsage | None:
        """Returns disk use of its files, volumes; None: not visible. Raises: EnvironmentFailed, EngineUnavailable."""
        if self._layer is not None:
            places = (self._layer.upper, self._engine.folder_of(self.id))
            return DiskUsage.added(
                [DiskUsage.of(*places), DiskUsage.held(container_processes(self.id, self._pid), *places)]
            )
        with self._engine.named(f"look where environment {self.id[:12]} writes", EnvironmentFailed):
            about = self._engine.api.inspect_container(self.id)
        return usage_of(self._engine, [about]) if places_of(self._engine, about) else None

    def forward(self, port: int, serve: Serve) -> Forward:
        with self._alive_during(f"open port {port}"):
            pid = self._pid if in_container(self.id, self._pid) else None
            port_forward = forward(pid, self.stream, port, serve, lives=lambda: in_container(self.id, self._pid))
            self._forwards.add(port_forward)
            return port_forward

    def adopt(self, tags: Tags) -> None:
        """Records in its name that it belongs to this attempt from now on, since an engine cannot change labels.

        The rename comes a moment later, where that is safe: an engine takes longer over it than a hand-out may take.
        Until then it has the name and the deadline of the previous attempt.
        """
        with self.times.handed_on():
            self._await_name()
            with self._alive_during("take it over"):
                self._hurry.clear()
                self._naming = threading.Thread(target=self._name_it, args=(tags.name(),), name="naming", daemon=True)
                self._naming.start()
            if time.time() > float(self._name.rpartition("-")[2]) - _SWEPT_SOON_S:
                self._await_name()
                self._raise_if_gone()

    def _name_it(self, name: str) -> None:
        """Renames it. Without its owner's name it would be swept at the previous owner's deadline, during the work."""
        self._hurry.wait(_HANDED_OUT_S)
        try:
            self._rename(name, "take over")
        except StationError as error:
            if not self.gone:
                log.warning("environment.not_named", environment=self.id, reason=str(error))
                with suppress(StationError):
                    self.fail(f"it could not be given its owner's name: {error}")

    def _await_name(self) -> None:
        if self._naming is not None and self._naming is not threading.current_thread():
            self._hurry.set()
            self._naming.join()

    def _rename(self, name: str, doing: str) -> None:
        """Renames it: the sweeper uses the deadline in the name."""
        named = self._engine.named(f"{doing} environment {self.id[:12]}", EnvironmentFailed)
        with self._alive_during(doing), named:
            if name != self._name:
                self._engine.api.rename(self.id, name)
                self._name = name

    def _reset_files(self) -> ResetProof:
        """Kills everything, empties the container's layer, proves it empty, starts again. See `ContainerLayer`."""
        layer = self._layer
        if layer is None:
            return ResetProof(clean=False, left=(UNSEEN,))
        self._await_name()
        with self._engine.named(f"reset environment {self.id[:12]}", EnvironmentFailed):
            return self._emptied(layer)

    def _emptied(self, layer: ContainerLayer) -> ResetProof:
        killed, state = self._stop()
        if state["State"]["Running"] or layer.has_volumes(state):
            return ResetProof(clean=False, left=("it would not stop, or has volumes",))
        removed = layer.empty()
        left = layer.residue()
        self._origin, self.times.route = Origin.RECYCLED, Route.RECYCLED
        self.start(proven=True)
        self.bring_tools()
        left += layer.changed_outside()
        return ResetProof(clean=not left, removed=removed, restored=0, killed=killed, left=tuple(left[:20]))

    def _stop(self) -> tuple[int, dict[str, Any]]:
        killed = self._session.stats().processes
        self._close_ports()
        self._session.close()
        api = self._engine.api
        if not self._killed_here():
            api.kill(self.id, signal="KILL")
        api.wait(self.id, timeout=30)
        return killed, api.inspect_container(self.id)  # it answers only when the file system is unmounted

    def _restarted(self, decide: DecideFile) -> Restart:
        """Restarts it. Where its layer is not visible from here: by `unseen_layer`."""
        self._await_name()
        with self._engine.named(f"restart environment {self.id[:12]}", EnvironmentFailed):
            killed, state = self._stop()
            restart = Restart(killed, *self._put_back(state, decide))
            self.start(proven=True)
            self.bring_tools()
        return restart

    def _put_back(self, state: dict[str, Any], decide: DecideFile) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if self._layer is None and self._set_up_inside:  # its changes cannot be distinguished from the agent's
            return (), ("set-up commands ran, and their changes cannot be told from the agent's",)
        if self._layer is None:
            self._transport.before_start(self.id)  # the engine shows files only when all mounts are there
            return unseen_layer.put_back(self._engine, self.id, decide)
        lower = str((state["GraphDriver"].get("Data") or {}).get("LowerDir", ""))
        layers = [Path(one) for one in lower.split(":") if one]
        return layer_files.put_back(self._layer.upper, layers, decide, since_ns=self._set_up_until_ns)

    def _killed_here(self) -> bool:
        """Kills the first process, and so all, if it is on this host: an engine takes longer. Whether it did."""
        try:
            handle = os.pidfd_open(self._pid)
        except OSError:
            return False
        try:
            if not in_container(self.id, self._pid):
                return False
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except OSError:
            return False
        finally:
            os.close(handle)
        return True

    def fail(self, why: str, *, kind: type[EnvironmentFailed] = EnvironmentFailed) -> None:
        """Ends what runs in it; all later calls raise `why`. Its owner still destroys it."""
        log.warning("environment.failed", environment=self.id, reason=why)
        self._fate = (kind, why)
        self._close_ports()
        self._session.close()
        with self._engine.named(f"end environment {self.id[:12]}", EnvironmentFailed), suppress(APIError):  # ended
            self._engine.api.kill(self.id, signal="KILL")

    def _destroy(self) -> None:
        with self._teardown():
            self._close_ports()
            self._session.close()
            self._memory.close()
            try:
                with self._engine.named(f"remove environment {self.id[:12]}", EnvironmentFailed):
                    self._engine.remove(self.id)
            finally:
                self._transport.close()

    def _how_it_ended(self) -> str:
        return "" if self._answers() else self._engine_state()

    def _answers(self) -> bool:
        try:
            self._session.stats()
        except EnvironmentFailed:
            return False
        return True

    def _engine_state(self) -> str:
        """Describes how the container ended, if it did: the engine notices it later than its processes."""
        give_up = time.monotonic() + _DYING_S
        try:
            while time.monotonic() < give_up:
                state = self._engine.api.inspect_container(self.id)["State"]
                if not state["Running"]:
                    why = ", out of memory" if state["OOMKilled"] else ""
                    return f" (it is not running: it ended with exit code {state['ExitCode']}{why})"
                if self._gone.wait(0.02):
                    break
        except NotFound:
            raise EnvironmentVanished(f"No such container: {self.id[:12]} was removed from outside.") from None
        except (DockerException, RequestException) as error:
            return f" (and the engine does not answer: {error})"
        return ""
