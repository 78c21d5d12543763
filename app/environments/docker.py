"""Environments in containers of a Docker engine."""

from __future__ import annotations

import posixpath
import shlex
import tarfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import structlog
from docker.errors import APIError, DockerException, NotFound
from docker.types import LogConfig
from requests import RequestException

from app.environments import archives
from app.environments.base import CommandResult, Origin, ResetProof, Tags
from app.environments.engine import ROLE, Engine, engine_of, missing
from app.environments.execution import Execution
from app.environments.host_slots import Gate, HostGate, turn
from app.environments.images import Images, host_of
from app.environments.layer import Layer
from app.environments.processes import COMMAND, ExecView, HostView, ProcessView, Tree, kill_tree
from app.errors import EnvironmentFailed, ImageUnavailable, StationError
from app.models.spec import Bundle, EnvironmentSpec, Network
from app.settings import Settings

log = structlog.get_logger()

SLEEP = ["sleep", "2147483647"]  # every `sleep` understands a number, not every one `infinity`

CAP_DROP = [
    "AUDIT_WRITE",  # writes to the host's audit log
    "MKNOD",  # device files
    "NET_BIND_SERVICE",  # ports below 1024 need no privilege inside: see the sysctl
    "NET_RAW",  # forged packets on a shared bridge
    "SETFCAP",  # privileges on files, which would outlive the process
    "SETPCAP",
    "SYS_CHROOT",
]
"""Taken from the engine's default set. What is left (CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETUID, SETGID) is what
root needs to install packages, change owners and run tests as another user."""

_FILE_LIMIT_BYTES = 256 << 20
_COMMAND_LIMIT_BYTES = 100_000
"""The kernel refuses a single argument of 128 KiB; a longer command becomes a script."""
_ENGINE_ONLY = ("/dev", "/proc", "/sys")
_AS_IF_ALL_DIED = (None, 137)
"""Exit codes of a command that was killed with its container, among others."""
_DYING_S = 5.0
"""So long the engine may take to note that a container has ended whose processes are dead."""


class DockerEnvironment:
    """One container. Its first process sleeps; every command is an exec beside it."""

    def __init__(
        self, engine: Engine, container_id: str, spec: EnvironmentSpec, image_id: str, layer: Layer | None
    ) -> None:
        self._engine = engine
        self._id = container_id
        self._spec = spec
        self._image_id = image_id
        self._layer = layer
        self._origin = Origin.FRESH
        self._gone = threading.Event()
        self._lock = threading.Lock()
        self._running: dict[str, Execution] = {}
        self._started = 0  # commands so far: tells whether one ran alone
        self._view: ProcessView | None = None
        self._oom_kills = 0

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
        }

    def adopt(self, tags: Tags) -> None:
        """From now on it belongs to this attempt: the name says so, since an engine cannot change labels."""
        with self._living("take over"):
            self._engine.api.rename(self._id, name_of(tags))

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
        begun = time.monotonic()
        mark = uuid.uuid4().hex
        with self._script(command) as argv:
            variables = {**(env or {}), COMMAND: mark}
            result = self._execute(argv, mark, cwd or self._spec.workdir, variables, begun, timeout_s, stdin)
        if result.exit_code == 137:
            return self._with_memory_note(result)
        return result

    def _execute(
        self,
        argv: list[str],
        mark: str,
        cwd: str,
        env: Mapping[str, str],
        begun: float,
        timeout_s: float,
        stdin: bytes | None,
    ) -> CommandResult:
        with self._living("run a command"):
            exec_id = self._engine.api.exec_create(
                self._id, argv, stdin=stdin is not None, environment=dict(env), workdir=cwd
            )["Id"]
            with self._registered(mark, exec_id, stdin) as execution:
                record = execution.finish(begun + timeout_s)
        self._raise_if_gone()
        out, err = execution.stdout, execution.stderr
        never_started = record["ExitCode"] in (126, 127) and not record["Pid"]
        if not execution.timed_out and (never_started or record["ExitCode"] in _AS_IF_ALL_DIED):
            self._raise_if_dead()
        if never_started and not execution.timed_out:
            # The engine's reason came over the stream. No such folder, no shell.
            out, err = err, out
        return CommandResult(
            exit_code=None if execution.timed_out else record["ExitCode"],
            stdout=out.content(),
            stderr=err.content(),
            timed_out=execution.timed_out,
            truncated=out.truncated or err.truncated,
            duration_s=time.monotonic() - begun,
        )

    @contextmanager
    def _registered(self, mark: str, exec_id: str, stdin: bytes | None) -> Iterator[Execution]:
        with self._lock:
            self._started += 1
            number, others = self._started, len(self._running)

        def kill() -> None:
            tree = Tree(mark, alone=others == 0 and number == self._started)
            if not kill_tree(self._processes(), tree):
                log.warning("environment.kill_incomplete", environment=self._id)

        execution = Execution(self._engine, exec_id, stdin, kill)
        with self._lock:
            self._running[mark] = execution
        if self._gone.is_set():
            execution.abort()
        try:
            yield execution
        finally:
            with self._lock:
                del self._running[mark]

    @contextmanager
    def _script(self, command: str) -> Iterator[list[str]]:
        """The argv for `command`; one too long for an argument is put into a file for as long as it runs."""
        if len(command.encode()) < _COMMAND_LIMIT_BYTES:
            yield ["/bin/sh", "-c", command]
            return
        path = f"/tmp/.command-{uuid.uuid4().hex}"
        self.put(path, command.encode(), mode=0o755)
        try:
            yield ["/bin/sh", path]
        finally:
            self._quiet(["rm", "-f", path])

    def _with_memory_note(self, result: CommandResult) -> CommandResult:
        """Say so when it was the memory limit that killed: the engine's state does not tell it for an exec."""
        files = "/sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events"
        kills = 0
        for line in self._quiet(["/bin/sh", "-c", f"exec cat {files} 2>/dev/null"]).splitlines():
            if line.startswith(b"oom_kill "):
                kills = int(line.split()[1])
        if kills <= self._oom_kills:
            return result
        self._oom_kills = kills
        log.warning("environment.out_of_memory", environment=self._id, limit_bytes=self._spec.resources.memory_bytes)
        note = f"\n[killed: the memory limit of {self._spec.resources.memory_bytes} bytes was reached]\n".encode()
        return CommandResult(
            result.exit_code, result.stdout, result.stderr + note, False, result.truncated, result.duration_s
        )

    def _processes(self) -> ProcessView:
        if self._view is None:
            init = self._engine.api.inspect_container(self._id)["State"]["Pid"]
            self._view = HostView.of_container(self._id, init) or ExecView(self._quiet)
        return self._view

    def _quiet(self, argv: list[str]) -> bytes:
        """Standard output of a command of ours, run as root and not counted as the task's."""
        with self._living("look inside"):
            exec_id = self._engine.api.exec_create(self._id, argv, user="0", workdir="/")["Id"]
            execution = Execution(self._engine, exec_id, None, lambda: None)
            execution.finish(time.monotonic() + 30.0)
        return execution.stdout.content()

    # --- Files ----------------------------------------------------------------------------------------------------

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self._put_archive("/", archives.of_file(_on_disk(path), content, mode=mode), f"write {path}")

    def put_tree(self, archive: bytes, path: str) -> None:
        archives.check(archive)
        folder = _on_disk(path)
        try:
            self._put_archive(folder, archive, f"unpack into {path}")
        except EnvironmentFailed as error:
            if not missing(error) or self._gone.is_set():
                raise
            self._put_archive("/", archives.of_folder(folder), f"make {path}")
            self._put_archive(folder, archive, f"unpack into {path}")

    def _put_archive(self, folder: str, archive: bytes, doing: str) -> None:
        with self._living(doing):
            self._engine.api.put_archive(self._id, folder, archive)

    def get(self, path: str) -> bytes:
        where = _on_disk(path)
        for _ in range(16):
            member, content = self._get_member(where)
            if not member.issym():
                break
            where = archives.absolute(posixpath.join(posixpath.dirname(where), member.linkname))
        if not member.isreg():
            raise FileNotFoundError(f"expected a file at {path} in environment {self._id[:12]}, found something else.")
        return content

    def _get_member(self, path: str) -> tuple[tarfile.TarInfo, bytes]:
        with self._living(f"read {path}", absent=path):
            chunks, about = self._engine.api.get_archive(self._id, path)
            # A folder's archive holds all that is below it: not read, only told from a file.
            if about["mode"] & (1 << 31):
                chunks.close()
                folder = tarfile.TarInfo(path)
                folder.type = tarfile.DIRTYPE
                return folder, b""
            if about["size"] > _FILE_LIMIT_BYTES:
                chunks.close()
                raise EnvironmentFailed(f"expected at most {_FILE_LIMIT_BYTES} bytes in {path}, found {about['size']}.")
            return archives.only_member(b"".join(chunks))

    # --- Life -----------------------------------------------------------------------------------------------------

    def reset(self) -> ResetProof:
        """See `Layer`: kill everything, empty the container's own layer, prove it empty, start again."""
        if self._spec.setup:
            return ResetProof(clean=False, left=("set-up commands ran: what they made is not in the image",))
        if self._layer is None:
            return ResetProof(clean=False, left=("the engine's layers are not visible here: nothing can be proven",))
        try:
            return self._reset(self._layer)
        except (DockerException, RequestException, OSError, StationError) as error:
            log.warning("environment.reset_failed", environment=self._id, reason=str(error))
            return ResetProof(clean=False, left=(f"the reset itself failed: {error}",))

    def _reset(self, layer: Layer) -> ResetProof:
        killed = sum(not p.dead for p in self._processes().scan()) - 2  # the init and the sleeper
        api = self._engine.api
        api.kill(self._id, signal="KILL")
        api.wait(self._id, timeout=30)
        state = api.inspect_container(self._id)  # answers only after the engine has unmounted the file system
        if state["State"]["Running"] or state["Mounts"]:
            return ResetProof(clean=False, left=("it would not stop, or has volumes",))
        removed = layer.empty()
        left = layer.residue()
        api.start(self._id)
        self._view, self._oom_kills, self._origin = None, 0, Origin.RECYCLED
        left += layer.changed_outside()
        return ResetProof(clean=not left, removed=removed, restored=0, killed=max(0, killed), left=tuple(left[:20]))

    def destroy(self) -> None:
        self._gone.set()
        with self._lock:
            running = list(self._running.values())
        for execution in running:
            execution.abort()
        with self._engine.named(f"remove environment {self._id[:12]}", EnvironmentFailed):
            self._engine.remove(self._id)

    @contextmanager
    def _living(self, doing: str, absent: str | None = None) -> Iterator[None]:
        """Name what goes wrong inside; with `absent`, that path's absence is FileNotFoundError."""
        self._raise_if_gone()
        try:
            with self._engine.named(f"cannot {doing} in environment {self._id[:12]}", EnvironmentFailed):
                yield
        except EnvironmentFailed as error:
            self._raise_if_gone()
            if absent is not None and missing(error) and "No such container" not in str(error):
                raise FileNotFoundError(f"no file {absent} in environment {self._id[:12]}.") from error
            raise EnvironmentFailed(f"{error}{self._fate()}") from error.__cause__
        except OSError as error:
            self._raise_if_gone()
            raise EnvironmentFailed(f"cannot {doing} in environment {self._id[:12]}: {error}{self._fate()}") from error

    def _raise_if_gone(self) -> None:
        if self._gone.is_set():
            raise EnvironmentFailed(f"environment {self._id[:12]} was destroyed.")

    def _raise_if_dead(self) -> None:
        """Tell a command that died from a container that did: the engine hears of a command's end first."""
        with self._living("look whether it lives"):
            give_up = time.monotonic() + _DYING_S
            while not self._answers():
                state = self._engine.api.inspect_container(self._id)["State"]
                if not state["Running"]:
                    raise EnvironmentFailed(f"environment {self._id[:12]} is not running any more")
                if time.monotonic() > give_up:  # full of processes, then
                    return
                time.sleep(0.05)

    def _answers(self) -> bool:
        """Whether a process can be started inside: not once its first process is dead, whatever the engine believes."""
        try:
            return self._quiet(["/bin/sh", "-c", "echo here"]) == b"here\n"
        except EnvironmentFailed as error:
            if missing(error):
                raise
            return False

    def _fate(self) -> str:
        """How the container ended, when it did."""
        with suppress(DockerException, RequestException):
            state = self._engine.api.inspect_container(self._id)["State"]
            if not state["Running"]:
                why = ", out of memory" if state["OOMKilled"] else ""
                return f" (it ended with exit code {state['ExitCode']}{why})"
        return ""


class DockerProvider:
    """Makes containers on the engine of the settings; `gate` bounds how many at a time (None: on this host alone)."""

    def __init__(
        self, settings: Settings, *, fetch_bundle: Callable[[Bundle], bytes], gate: Gate | None = None
    ) -> None:
        self._settings = settings
        self._gate = gate or HostGate(settings.home / "run" / "slots")
        self._images = Images(settings, fetch_bundle=fetch_bundle, gate=self._gate)
        self._init = True

    @property
    def _engine(self) -> Engine:
        return engine_of(self._settings)

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        return self._images.ensure(spec, timeout_s=timeout_s)

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> DockerEnvironment:
        deadline = time.monotonic() + timeout_s
        image_id = self.prepare_image(spec, timeout_s=timeout_s)
        limit, capacity = f"environment_starts:{host_of(self._engine)}", self._settings.environment_starts
        try:
            with self._gate.hold(limit, capacity, timeout_s=deadline - time.monotonic()):
                environment = self._start(spec, tags, image_id)
        except TimeoutError as error:
            raise EnvironmentFailed(f"no environment could be started within {timeout_s:.0f} s: {error}.") from error
        try:
            _set_up(environment, spec, deadline)
        except BaseException:
            environment.destroy()
            raise
        log.info("environment.created", environment=environment.id, image=spec.label)
        return environment

    def _start(self, spec: EnvironmentSpec, tags: Tags, image_id: str) -> DockerEnvironment:
        network = self._network(tags.installation) if spec.network is Network.OPEN else "none"
        engine = self._engine
        with engine.named(f"create an environment from {spec.label}", EnvironmentFailed):
            while True:
                container_id = self._create(engine, spec, tags, image_id, network)
                try:
                    layer = Layer.of(engine.api.inspect_container(container_id))
                    engine.api.start(container_id)
                    if layer is not None:
                        layer.note_outside(engine.api.inspect_container(container_id))
                    return DockerEnvironment(engine, container_id, spec, image_id, layer)
                except BaseException as error:
                    with suppress(DockerException, RequestException):
                        engine.remove(container_id)
                    if not (self._init and isinstance(error, APIError) and "docker-init" in str(error)):
                        raise
                    log.warning("environment.no_init", reason="no docker-init: zombies stay until the end")
                    self._init = False

    def _create(self, engine: Engine, spec: EnvironmentSpec, tags: Tags, image_id: str, network: str) -> str:
        try:
            answer = engine.api.create_container(
                image_id,
                entrypoint=SLEEP,
                command=[],
                name=name_of(tags),
                environment=spec.env,
                working_dir=spec.workdir,
                labels={**tags.labels(), ROLE: "environment"},
                healthcheck={"Test": ["NONE"]},
                host_config=self._limits(engine, spec, network),
            )
        except NotFound as error:
            raise ImageUnavailable(f"image {spec.label} was here and is gone ({image_id}); try again.") from error
        return str(answer["Id"])

    def _limits(self, engine: Engine, spec: EnvironmentSpec, network: str) -> Any:
        resources = spec.resources
        return engine.api.create_host_config(
            init=self._init,
            network_mode=network,
            nano_cpus=int(min(resources.cpus, engine.cpus) * 1e9),
            mem_limit=resources.memory_bytes,
            memswap_limit=resources.memory_bytes,
            pids_limit=resources.pids,
            cap_drop=CAP_DROP,
            sysctls={"net.ipv4.ip_unprivileged_port_start": "0"},
            security_opt=["no-new-privileges"],
            ipc_mode="private",
            log_config=LogConfig(type="none"),
            oom_score_adj=500,  # a host short of memory ends a task before a worker
        )

    def _network(self, installation: str) -> str:
        """Our own bridge, on which containers do not see each other; made once per installation."""
        name = f"megaflow-{installation}"
        engine = self._engine
        with (
            turn(self._settings.home / "run" / "slots" / "network", timeout_s=60.0),
            engine.named(f"create network {name}", EnvironmentFailed),
        ):
            if not any(found["Name"] == name for found in engine.api.networks(names=[name])):
                engine.api.create_network(
                    name,
                    driver="bridge",
                    options={"com.docker.network.bridge.enable_icc": "false"},
                    labels={"megaflow": installation, ROLE: "environment"},
                    check_duplicate=True,
                )
        return name

    def sweep(self, *, installation: str, keep: Mapping[str, bool] | None = None) -> list[str]:
        """Also removes our network when nothing uses it. Only objects with the role label: instances are not ours."""
        engine, kept = self._engine, keep or {}
        labels = {"label": [f"megaflow={installation}", f"{ROLE}=environment"]}
        removed: list[str] = []
        with engine.named("sweep environments", EnvironmentFailed):
            for container in engine.api.containers(all=True, filters=labels):
                if not kept.get(container["Id"], False):
                    engine.remove(container["Id"])
                    removed.append(container["Id"])
            for network in engine.api.networks(filters=labels):
                with suppress(APIError):  # in use
                    engine.api.remove_network(network["Id"])
                    removed.append(network["Id"])
        return removed


def name_of(tags: Tags) -> str:
    """`megaflow-ATTEMPT-RANDOM-DEADLINE`; what `deadline_of` reads."""
    return f"megaflow-{tags.attempt_id}-{uuid.uuid4().hex[:6]}-{tags.deadline_unix_s:.0f}"


def _set_up(environment: DockerEnvironment, spec: EnvironmentSpec, deadline: float) -> None:
    for command in spec.setup:
        result = environment.run(command, timeout_s=max(0.1, deadline - time.monotonic()))
        if not result.ok:
            how = "ran out of time" if result.timed_out else f"exit code {result.exit_code}"
            raise EnvironmentFailed(f"set-up command {shlex.quote(command)}: {how}: {result.text()[-2000:]}")


def _on_disk(path: str) -> str:
    clean = archives.absolute(path)
    if clean.startswith(tuple(f"{mount}/" for mount in _ENGINE_ONLY)):
        raise EnvironmentFailed(f"expected a path on the environment's disk, found {path}; use a command for it.")
    return clean
