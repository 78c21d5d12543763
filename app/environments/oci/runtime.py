"""The OCI runtime: crun, or runc where there is no crun. Told to start; everything else is done without it."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
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

from app.environments.oci import kernel, seccomp
from app.environments.oci.cgroups import DEVICES, NESTED
from app.environments.oci.specification import LISTENING
from app.errors import EnvironmentFailed

_BPF = "run.oci.seccomp_bpf_data"
"""crun's annotation for a filter that is compiled already; compiling takes as long as all the rest of a start."""
_CRUN_LOG_BYTES = 2000


@dataclass(frozen=True)
class Runtime:
    """One runtime of this host. `state` is the folder where it keeps what it knows of running environments."""

    name: str  # crun or runc
    program: Path
    state: Path
    cache: Path  # for the compiled filter

    @property
    def version(self) -> str:
        return _version(self.program)

    @property
    def devices(self) -> Sequence[str]:
        """Rules that the environment's cgroup must allow: runc adds some that mean nothing without the capability."""
        return DEVICES if self.name == "crun" else (*DEVICES, "c *:* m", "b *:* m", "c 10:200 rwm")

    def cgroup(self, name: str) -> str | None:
        """Where the runtime puts the environment below its cgroup; None when it can be told to leave it there."""
        return None if self.name == "crun" else f"/megaflow-{name}/{NESTED}"

    def seccomp(self) -> tuple[dict[str, str], dict[str, Any] | None]:
        """Annotations and `linux.seccomp` of a specification: the compiled filter where there is one, or the rules."""
        if self.name == "crun" and self._filter_file.exists():
            return {_BPF: _compiled(self._filter_file)}, None
        return {}, seccomp.profile(kernel.machine())

    def keep_filter(self, name: str) -> None:
        """Keep the filter that crun compiled for the running environment `name`, for all others."""
        compiled = self.state / name / "seccomp.bpf"
        with suppress(FileNotFoundError):  # an old or a new crun may keep it elsewhere: then each start compiles it
            content = compiled.read_bytes()
            if content:
                self.cache.mkdir(parents=True, exist_ok=True)
                fresh = self._filter_file.with_suffix(f".{os.getpid()}")
                fresh.write_bytes(content)
                fresh.rename(self._filter_file)

    @property
    def _filter_file(self) -> Path:
        rules = json.dumps(seccomp.profile(kernel.machine()), sort_keys=True)
        about = self.program.stat()
        key = f"{rules}\0{self.program}\0{about.st_mtime_ns}\0{about.st_size}"
        return self.cache / f"seccomp-{hashlib.sha256(key.encode()).hexdigest()[:24]}.bpf"

    def start(self, name: str, bundle: Path, log_file: Path, listening: socket.socket, prefix: Sequence[str]) -> None:
        """Start the environment of `bundle`; its first process inherits `listening`.

        prefix: a command that becomes the runtime's. Returns when the first process runs.

        Raises: EnvironmentFailed with the runtime's words.
        """
        self.state.mkdir(parents=True, exist_ok=True)
        command = [*prefix, *self._command(name, bundle, log_file, shell=bool(prefix))]
        code = _spawned(command, listening.fileno())
        if code != 0:
            said = log_file.read_text(errors="replace")[-_CRUN_LOG_BYTES:].strip() if log_file.exists() else ""
            raise EnvironmentFailed(f"{self.name} could not start an environment (exit code {code}): {said}")

    def _command(self, name: str, bundle: Path, log_file: Path, *, shell: bool) -> list[str]:
        program = str(self.program) if shell or self.name != "crun" else _sealed(self.program)
        before = ["--cgroup-manager=disabled"] if self.name == "crun" else []
        return [
            *(program, *before, "--root", str(self.state), "--log", str(log_file)),
            *("run", "--detach", "--preserve-fds", "1", "--bundle", str(bundle), name),
        ]

    def pid(self, name: str) -> int | None:
        """The first process of a running environment by this host's numbers; None when it is not known here."""
        try:
            if self.name == "crun":
                return int(json.loads((self.state / name / "status").read_text())["pid"])
            return int(json.loads((self.state / name / "state.json").read_text())["init_process_pid"])
        except (OSError, ValueError, KeyError):
            return None

    def forget(self, name: str) -> None:
        """Remove what the runtime keeps of an environment whose processes are gone."""
        shutil.rmtree(self.state / name, ignore_errors=True)


_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
_FREE_FROM = 10
"""Files of ours have numbers from here on, so that none lies where the child's are put."""


def _spawned(command: list[str], listening: int) -> int:
    """Run to the end, with `listening` as the third file after nothing in, nothing out; the exit code.

    Not by `subprocess`, which cannot say which number a file gets.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    kept = [fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, _FREE_FROM) for handle in (nothing, listening)]
    os.close(nothing)
    try:
        files = [(os.POSIX_SPAWN_DUP2, kept[0], number) for number in (0, 1, 2)]
        files.append((os.POSIX_SPAWN_DUP2, kept[1], LISTENING))
        pid = os.posix_spawn(command[0], command, _ENVIRONMENT, file_actions=files)
    finally:
        for handle in kept:
            os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def runtime_of(home: Path) -> Runtime | None:
    """The best runtime of this host, or None."""
    path = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
    for name in ("crun", "runc"):
        if (found := shutil.which(name, path=path)) is not None:
            return Runtime(name, Path(found).resolve(), home / "run" / "oci", home / "cache" / "oci")
    return None


@lru_cache(maxsize=4)
def _version(program: Path) -> str:
    command = [str(program), "--version"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout  # noqa: S603 (ours)
    return told.splitlines()[0].strip() if told else program.name


@lru_cache(maxsize=4)
def _compiled(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _sealed(program: Path) -> str:
    """A path to an unchangeable copy of crun in memory.

    From a file, crun makes such a copy at each start (so that nobody inside can overwrite the runtime) and executes
    itself again. Given one, it does not.
    """
    key = (os.getpid(), program, program.stat().st_mtime_ns)
    if key not in _copies:
        copy = os.memfd_create("crun", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(copy, program.read_bytes())
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
        _copies[key] = fcntl.fcntl(copy, fcntl.F_DUPFD_CLOEXEC, _FREE_FROM)  # two threads may both make one: both work
        os.close(copy)
    return f"/proc/self/fd/{_copies[key]}"


_copies: dict[tuple[int, Path, int], int] = {}
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
