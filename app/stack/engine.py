"""Finds the Docker engine, or installs it from Debian's packages and starts it.

We never stop an engine that ran before. For an engine that we started, the process id and start time are recorded;
`stop_engine` ends exactly that process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.utils
import psutil
import requests
import structlog
from docker.errors import DockerException

from app.errors import EngineUnavailable
from app.models.provider_keys import without_keys
from app.settings import Settings
from app.stack import packages
from app.stack.home import MARKER, logs_folder, prepare, run_folder, tail
from app.stack.processes import end, family, has_ended, wait_for_end

log = structlog.get_logger(__name__)

PACKAGES = ("docker.io", "iptables", "ca-certificates")
"""Debian packages of the engine and its dependencies.

Newer releases have the `docker` command in `docker-cli`, which is installed when the command is missing.
"""

_ANSWER_S = 10
_START_S = 40.0
_STOP_S = 30.0
_POLL_S = 0.1
_SAME_START_S = 1.0  # start times are rounded to clock ticks

_NOT_ISOLATED = "tasks can then run only in the environment `local`, on this host without isolation"

Report = Callable[[str], None]


@dataclass(frozen=True)
class EngineReport:
    """Whether a container engine answers, and what was done to start it."""

    available: bool
    version: str = ""
    started: bool = False
    """We started it in this call; `stop_engine` will stop it."""
    why: str = ""
    """Reason, when not available."""
    fix: str = ""
    """Suggested fix, when not available."""


@dataclass(frozen=True)
class Dockerd:
    """Command of the engine that MegaFlow starts, and the address at which it answers."""

    command: tuple[str, ...] = ("dockerd",)
    url: str = "unix:///var/run/docker.sock"
    pidfile: Path = Path("/var/run/docker.pid")
    exec_root: Path = Path("/var/run/docker")

    @property
    def pidfiles(self) -> dict[str, Path]:
        """Pid files of dockerd and of the containerd that it starts, by program name."""
        return {"dockerd": self.pidfile, "containerd": self.exec_root / "containerd" / "containerd.pid"}


DOCKERD = Dockerd()
"""Docker's own default paths."""


@contextmanager
def connected(settings: Settings, *, timeout_s: float = 60) -> Iterator[docker.DockerClient]:
    """Opens a client of the engine in the settings.

    Raises: EngineUnavailable: it does not answer.
    """
    try:
        _knock(engine_url(settings))
        client = docker.DockerClient(timeout=int(timeout_s), **_address(settings))
    except (OSError, DockerException, requests.RequestException) as error:
        raise EngineUnavailable(f"no container engine answers at {engine_url(settings)}: {error}") from error
    try:
        yield client
    finally:
        client.close()


def engine_url(settings: Settings) -> str:
    """Returns the engine's expected URL: MEGAFLOW_DOCKER_URL, else DOCKER_HOST, else the default socket."""
    return str(_address(settings).get("base_url") or DOCKERD.url)


def _knock(url: str) -> None:
    # docker-py does not close a Unix socket when the connection fails.
    if url.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as trial:
            trial.settimeout(_ANSWER_S)
            trial.connect(url.removeprefix("unix://"))


def version(settings: Settings) -> str | None:
    """Returns the engine's version, or None when no engine answers."""
    try:
        with connected(settings, timeout_s=_ANSWER_S) as client:
            return str(client.version()["Version"])
    except (EngineUnavailable, DockerException, requests.RequestException):
        return None


def ensure_engine(
    settings: Settings,
    *,
    may_install: bool,
    dockerd: Dockerd = DOCKERD,
    report: Report = lambda line: None,
) -> EngineReport:
    """Uses the engine that answers; else, as root, installs and starts one. Never raises: see `why` and `fix`."""
    prepare(settings)
    if (engine_version := version(settings)) is not None:
        return EngineReport(available=True, version=engine_version)
    if (refusal := _refusal(settings, dockerd, may_install=may_install)) is not None:
        return refusal
    if shutil.which(_program(dockerd)) is None:
        report(f"installing the Docker engine from Debian's packages ({', '.join(PACKAGES)})")
        if (failure := _install(settings)) is not None:
            return failure
        if (engine_version := _wait_for_init_system(settings)) is not None:
            return EngineReport(available=True, version=engine_version)
    report("starting the Docker engine")
    return _start(settings, dockerd)


def is_ours(settings: Settings) -> bool:
    """Whether the running engine was started by us."""
    return _recorded_process(settings) is not None


def stop_engine(settings: Settings) -> bool:
    """Stops the engine that we started and its containerd, and waits for their end; False: we started none."""
    process = _recorded_process(settings)
    if process is not None:
        end([process], signal.SIGTERM, _STOP_S, below=family(process.pid))
        _reap(process.pid)
        log.info("engine.stopped", pid=process.pid)
    _record_file(settings).unlink(missing_ok=True)
    return process is not None


def _refusal(settings: Settings, dockerd: Dockerd, *, may_install: bool) -> EngineReport | None:
    url = engine_url(settings)
    missing = shutil.which(_program(dockerd)) is None
    if url != dockerd.url:
        return _unavailable(f"no engine answers at {url}", "start it, or unset MEGAFLOW_DOCKER_URL and DOCKER_HOST")
    if os.geteuid() != 0:
        return _unavailable(
            f"no engine answers at {url} to this user, and only root may start one",
            "run as root once, start Docker, or add this user to the group docker",
        )
    if missing and not may_install:
        return _unavailable("no engine answers and dockerd is not installed", "allow the installation, or install it")
    if missing and shutil.which("apt-get") is None:
        return _unavailable(
            "no engine answers, dockerd is not installed and there is no apt-get to install it with",
            "install Docker by this system's own means, or set MEGAFLOW_DOCKER_URL to an engine elsewhere",
        )
    return None


def _unavailable(why: str, fix: str) -> EngineReport:
    return EngineReport(available=False, why=why, fix=f"{fix}; {_NOT_ISOLATED}")


def _address(settings: Settings) -> dict[str, Any]:
    # Docker's own variables (DOCKER_HOST, DOCKER_CERT_PATH) apply when our setting is not given.
    return {"base_url": settings.docker_url} if settings.docker_url else dict(docker.utils.kwargs_from_env())


def _install(settings: Settings) -> EngineReport | None:
    logfile = logs_folder(settings) / "apt.log"
    for names in (PACKAGES, ("docker-cli",)):
        if names != PACKAGES and shutil.which("docker") is not None:
            continue
        if not packages.install(names, logfile):
            why = f"`apt-get install {' '.join(names)}` failed: {_last_error(tail(logfile, lines=30))}"
            return _unavailable(why, f"read {logfile}, repair apt's sources and try again, or install Docker yourself")
    return None


def _wait_for_init_system(settings: Settings) -> str | None:
    """Waits for the engine that the package starts under systemd. It belongs to the system, not to us."""
    if not Path("/run/systemd/system").is_dir():
        return None
    give_up = time.monotonic() + _ANSWER_S
    while (engine_version := version(settings)) is None and time.monotonic() < give_up:
        time.sleep(_POLL_S)
    return engine_version


def _start(settings: Settings, dockerd: Dockerd) -> EngineReport:
    _remove_stale_pidfiles(dockerd)
    logfile = logs_folder(settings) / "dockerd.log"
    offset = logfile.stat().st_size if logfile.exists() else 0
    pid = _spawn(dockerd.command, logfile)
    process = psutil.Process(pid)
    entry = {"pid": pid, "started_at": process.create_time()}
    _record_file(settings).write_text(json.dumps(entry))
    give_up = time.monotonic() + _START_S
    while time.monotonic() < give_up and not has_ended(process):
        if (engine_version := version(settings)) is not None:
            log.info("engine.started", pid=pid, version=engine_version)
            return EngineReport(available=True, version=engine_version, started=True)
        time.sleep(_POLL_S)
    why = "dockerd ended at once" if has_ended(process) else f"dockerd did not answer within {_START_S:g} s"
    stop_engine(settings)
    _reap(pid)
    last_error = _last_error(tail(logfile, lines=40, offset=offset))
    return _unavailable(f"{why}: {last_error}", f"read {logfile}; an engine needs a privileged root")


def _spawn(command: tuple[str, ...], logfile: Path) -> int:
    # Not subprocess: the engine outlives this process in its own session, and nothing waits for it.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawnp(
        command[0],
        command,
        # Without the stack's marker: `down` ends all processes that have it, but decides separately about the engine.
        {name: value for name, value in without_keys(os.environ).items() if name != MARKER},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(logfile), flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):  # started by another process
        os.waitpid(pid, os.WNOHANG)


def _remove_stale_pidfiles(dockerd: Dockerd) -> None:
    # dockerd refuses to start while any process has the number in its pid file, and waits for the process in
    # containerd's pid file: also for unrelated processes, and for killed ones that are not yet reaped.
    running = {program: _running(pidfile, program) for program, pidfile in dockerd.pidfiles.items()}
    containerd = running["containerd"]
    if running["dockerd"] is None and containerd is not None:
        wait_for_end([containerd], _STOP_S)  # it ends together with its dockerd
    for program, pidfile in dockerd.pidfiles.items():
        if _running(pidfile, program) is None:
            pidfile.unlink(missing_ok=True)


def _running(pidfile: Path, program: str) -> psutil.Process | None:
    try:
        process = psutil.Process(int(pidfile.read_text()))
        return process if process.name() == program and not has_ended(process) else None
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return None


def _program(dockerd: Dockerd) -> str:
    return next((part for part in dockerd.command if Path(part).name == "dockerd"), dockerd.command[0])


def _record_file(settings: Settings) -> Path:
    return run_folder(settings) / "engine.json"


def _recorded_process(settings: Settings) -> psutil.Process | None:
    try:
        entry = json.loads(_record_file(settings).read_text())
        process = psutil.Process(entry["pid"])
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return None
    # The pid alone is not enough: another process may have it now.
    return (
        process if not has_ended(process) and abs(process.create_time() - entry["started_at"]) < _SAME_START_S else None
    )


def _last_error(text: str) -> str:
    """Returns the last line that reports a failure: dockerd's `msg=`, apt's `E:`, else simply the last line."""
    lines = text.splitlines()
    failures = [line for line in lines if re.search(r"level=(fatal|error)|^E: |failed to start daemon", line)]
    last = (failures or lines or ["it wrote no log"])[-1]
    message = re.search(r'msg="((?:[^"\\]|\\.)*)"', last)
    return message.group(1).replace('\\"', '"') if message else last.strip()
