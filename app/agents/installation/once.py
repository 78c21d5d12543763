"""Makes each bundle's folder once per host, under a lock, and marks it complete at the end."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from app.errors import AgentUnavailable

_SUPERVISOR = Path(__file__).parents[1] / "running" / "supervisor.py"
_GRACE_S = 2.0  # between SIGTERM and SIGKILL
_LAST_S = 40.0  # longer than the supervisor needs to give up


@dataclass(frozen=True, slots=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def start(argv: Sequence[str], *, locks: Sequence[int] = (), **options: Any) -> tuple[subprocess.Popen[Any], int, int]:
    """Starts a supervisor of `argv`. Returns it with the pipe that stops it and the pipe that reports its end.

    options: of `subprocess.Popen`. Raises: OSError.
    """
    control, stopping = os.pipe()
    status, status_writer = os.pipe()
    words = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(control), str(status_writer), str(_GRACE_S), *argv]
    pipe, handed = subprocess.PIPE, (control, status_writer, *locks)
    try:
        supervisor = subprocess.Popen(  # noqa: S603  no shell; our own arguments and paths
            words, stdout=pipe, stderr=pipe, pass_fds=handed, start_new_session=True, **options
        )
        return supervisor, stopping, status
    except BaseException:
        os.close(stopping)
        os.close(status)
        raise
    finally:
        os.close(control)
        os.close(status_writer)


def run_bounded(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: Path | None,
    timeout_s: float,
    locks: Sequence[int],
) -> Done:
    """Runs `argv` to its end. No process that it started is left then, not even in the background.

    When this process dies it is killed, too. `locks` are files whose lock is held until all its processes have ended:
    the next holder of the lock finds no process writing.

    Raises: OSError: it cannot be started; subprocess.TimeoutExpired: it was killed for its time.
    """
    how = {"env": env, "cwd": cwd, "stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
    supervisor, stopping, status = start(argv, locks=locks, **how)
    with open(status, encoding="utf-8", errors="replace") as status_reader, supervisor:
        try:
            stdout, stderr = supervisor.communicate(timeout=timeout_s)
        finally:
            os.close(stopping)
            _await(supervisor)
        word, _, detail = status_reader.read().strip().partition(" ")
    if word == "failed":
        raise OSError(detail)
    return Done(int(detail) if word == "ended" and detail.lstrip("-").isdigit() else -9, stdout, stderr)


def _await(supervisor: subprocess.Popen[str]) -> None:
    try:
        supervisor.wait(_LAST_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()


log = structlog.get_logger(__name__)

_STEP_TIMEOUT_S = 900.0  # enough for a slow package index and half a gigabyte
_MARKER = ".complete"
_LOCKS: ContextVar[tuple[int, ...]] = ContextVar("locks", default=())
"""Locks of the bundles that are being made here: the programs that make them hold these while they write."""


@dataclass(frozen=True, slots=True)
class ToolStore:
    """Folder of bundles, whether bundles may be added to it, and a second folder that is only read."""

    folder: Path
    may_install: bool = True
    ready: Path | None = None

    def ensure(
        self, name: str, digest: str, make: Callable[[Path], None], *, fit: Callable[[Path], bool] = lambda _: True
    ) -> Path:
        """Returns the folder `NAME-DIGEST`, complete; `make` fills it in place if it is missing.

        fit: whether a complete one still works on this host.

        Raises: AgentUnavailable: from `make`, or nothing may be installed now.
        """
        place = self.folder.resolve() / f"{name}-{digest}"  # the real path: a venv's scripts contain it
        for folder in (self.folder, self.ready):
            if folder is not None and _complete(there := folder.resolve() / place.name) and fit(there):
                return there
        if not self.may_install:
            raise AgentUnavailable(
                f"agent {name}: expected it to be installed on this host; found no complete {place}; the first task "
                "that needs it installs it, and so does `megaflow agents install`"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(place):
                if not (_complete(place) and fit(place)):
                    _fill(place, name, make)
        except (OSError, subprocess.SubprocessError) as error:
            raise AgentUnavailable(f"agent {name}: expected to install it in {place}; found {error}") from error
        return place


def _fill(place: Path, name: str, make: Callable[[Path], None]) -> None:
    started = time.monotonic()
    log.info("agent.installing", agent=name, folder=str(place))
    _remove(place)
    place.mkdir()
    try:
        make(place)
    except BaseException:
        _remove(place)
        raise
    with (place / _MARKER).open("wb") as marker:
        os.fsync(marker.fileno())
    _sync(place)
    _sync(place.parent)
    log.info("agent.installed", agent=name, folder=str(place), took_s=round(time.monotonic() - started, 1))


def _sync(folder: Path) -> None:
    """Writes the folder's names to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(place: Path) -> None:
    """Removes read-only folders, too."""
    for folder, _, _ in os.walk(place):
        os.chmod(folder, 0o700)
    shutil.rmtree(place, ignore_errors=True)


def _complete(place: Path) -> bool:
    return (place / _MARKER).is_file()


@contextmanager
def _one_at_a_time(place: Path) -> Iterator[None]:
    """Holds the lock next to `place`; the kernel frees it when the holder and its last step have ended."""
    with place.with_name(f".{place.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        before = _LOCKS.set((*_LOCKS.get(), handle.fileno()))
        try:
            yield
        finally:
            _LOCKS.reset(before)


def digest_of(name: str, parts: Iterable[Path | str]) -> str:
    """Returns a digest of files' contents and of words. Raises: AgentUnavailable: a file is missing."""
    digest = hashlib.sha256()
    for part in parts:
        try:
            content = part.read_bytes() if isinstance(part, Path) else part.encode()
        except OSError as error:
            raise AgentUnavailable(
                f"agent {name}: expected its lock file; found {error}; reinstall MegaFlow with its package data"
            ) from error
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:12]


def step(name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Runs one step of an installation. Returns its output. Raises: AgentUnavailable: with the end of its output."""
    try:
        result = run_bounded(argv, env=env, cwd=cwd, timeout_s=_STEP_TIMEOUT_S, locks=_LOCKS.get())
        if result.returncode == 0:
            return result.stdout
        problem = f"exit code {result.returncode}: {(result.stderr.strip() or result.stdout.strip())[-1200:]}"
    except subprocess.TimeoutExpired:
        problem = f"no end within {_STEP_TIMEOUT_S:.0f} s"
    except OSError as error:
        problem = str(error)
    raise AgentUnavailable(
        f"agent {name}: expected `{' '.join(argv[:3])} …` to succeed; found {problem}; "
        "check the disk and that the package index is reachable, then try again"
    )


def try_out(name: str, argv: Sequence[str], path: str, env: Mapping[str, str]) -> None:
    """Runs `argv` with a temporary home and without MegaFlow's variables. Raises: AgentUnavailable."""
    with tempfile.TemporaryDirectory(prefix="megaflow-agent-") as home:
        step(name, argv, env={"PATH": f"{path}:/usr/bin:/bin", "HOME": home, **env}, cwd=Path(home))


def uv(name: str) -> str:
    """Returns the program's path. Raises: AgentUnavailable."""
    beside_us = Path(sys.executable).with_name("uv")
    if beside_us.exists():
        return str(beside_us)
    if path := shutil.which("uv"):
        return path
    raise AgentUnavailable(
        f"agent {name}: expected the program uv beside {sys.executable} or on PATH; found neither; "
        "install it with `pip install uv`"
    )
