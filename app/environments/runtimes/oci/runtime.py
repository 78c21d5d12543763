"""Calls the OCI runtime, crun."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from app.environments.isolation import seccomp, spawning
from app.environments.isolation.spawning import LISTENING, program_at, sealed
from app.errors import EnvironmentFailed
from app.host import kernel

_BPF = "run.oci.seccomp_bpf_data"
"""crun's annotation for a compiled filter; compiling takes as long as all the rest of a start."""
_CRUN_LOG_BYTES = 2000


class EnvironmentFolder:
    """Paths in an environment's own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.upper, self.work = folder / "upper", folder / "work"  # of overlayfs; `upper` has the written files
        self.address = folder / "s"  # socket on which its helper listens
        self.pid = folder / "pid"  # file with the number of the first process
        self.configuration = folder / "config.json"
        self.log = folder / "runtime.log"


@dataclass(frozen=True)
class Runtime:
    """A runtime of this host. Its own state of an environment is deleted once that runs: it is not needed."""

    program: Path

    @property
    def version(self) -> str:
        return _version(self.program)

    def seccomp(self) -> tuple[dict[str, str], dict[str, Any] | None]:
        """Returns annotations and `linux.seccomp` of a specification: the compiled filter, if any, or the rules."""
        if (compiled := _filters.get(self.program)) is not None:
            return {_BPF: base64.b64encode(compiled).decode()}, None
        return {}, seccomp.profile(kernel.machine())

    def start(
        self,
        launch: Launch,
        listening: socket.socket,
        prefix: Sequence[str],
        *,
        timeout_s: float,
    ) -> None:
        """Starts an environment; its first process inherits `listening`.

        prefix: a command that then executes the runtime. Returns when the first process runs.

        Raises: EnvironmentFailed with the runtime's message, or: it hung.
        """
        command = [*prefix, *self._command(launch, shell=bool(prefix))]
        try:
            device = os.open(launch.nothing, os.O_RDWR | os.O_CLOEXEC)
            try:
                files = {0: device, 1: device, 2: device, LISTENING: listening.fileno()}
                code = spawning.run(command, files, timeout_s=timeout_s)
            finally:
                os.close(device)
            if code != 0:
                message = (
                    launch.place.log.read_text(errors="replace")[-_CRUN_LOG_BYTES:].strip()
                    if launch.place.log.exists()
                    else ""
                )
                raise EnvironmentFailed(f"crun could not start an environment (exit code {code}): {message}")
            if self.program not in _filters:
                with suppress(FileNotFoundError):  # another crun may keep it elsewhere: it compiles each time
                    _filters[self.program] = (launch.state / launch.name / "seccomp.bpf").read_bytes()
        finally:
            shutil.rmtree(launch.state / launch.name, ignore_errors=True)

    def _command(self, launch: Launch, *, shell: bool) -> list[str]:
        program = str(self.program) if shell else _sealed(self.program)
        return [
            *(program, "--cgroup-manager=disabled", "--root", str(launch.state), "--log", str(launch.place.log)),
            *("run", "--detach", "--pid-file", str(launch.place.pid), "--preserve-fds", "1"),
            *("--bundle", str(launch.place.folder), launch.name),
        ]


@dataclass(frozen=True)
class Launch:
    """Paths for one start."""

    name: str
    place: EnvironmentFolder  # with config.json
    state: Path  # the runtime's own state, in memory
    nothing: Path
    """A device like /dev/null, but not the host's: a runtime makes its root the owner of what the first process reads
    and writes."""


_ELSEWHERE = "/usr/local/sbin:/usr/sbin:/sbin"
"""Folders of system programs, also searched when a user's PATH does not name them."""


def runtime_of() -> Runtime | None:
    """Finds the runtime of this host, or None."""
    program = shutil.which("crun", path=f"{os.environ.get('PATH', '')}:{_ELSEWHERE}")
    return None if program is None else Runtime(Path(program).resolve())


@lru_cache(maxsize=4)
def _version(program: Path) -> str:
    command = [str(program), "--version"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout  # noqa: S603 (ours)
    return output.splitlines()[0].strip() if output else program.name


_filters: dict[Path, bytes] = {}
"""Compiled filters for system calls by runtime, from this process's first environment."""


def _sealed(program: Path) -> str:
    """Returns a path to an unchangeable copy of crun in memory.

    From a file, crun makes such a copy at each start (so that no process inside can overwrite the runtime) and executes
    itself again. From such a copy, it does not.
    """
    return program_at(sealed((program, program.stat().st_mtime_ns), program.read_bytes))
