"""Makes one folder per bundle once on a host, under a lock, and marks it complete at the end."""

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
_LAST_S = 40.0  # the supervisor gives up before


@dataclass(frozen=True, slots=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def start(argv: Sequence[str], *, locks: Sequence[int] = (), **options: Any) -> tuple[subprocess.Popen[Any], int, int]:
    """The supervisor of `argv`, with pipes for its outputs; the pipe that stops it, and the one that tells its end.

    options: of `subprocess.Popen`. Raises: OSError.
    """
    control, stopping = os.pipe()
    status, telling = os.pipe()
    words = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(control), str(telling), str(_GRACE_S), *argv]
    pipe, handed = subprocess.PIPE, (control, telling, *locks)
    try:
        supervisor = subprocess.Popen(  # noqa: S603  no shell; our own words and paths
            words, stdout=pipe, stderr=pipe, pass_fds=handed, start_new_session=True, **options
        )
        return supervisor, stopping, status
    except BaseException:
        os.close(stopping)
        os.close(status)
        raise
    finally:
        os.close(control)
        os.close(telling)


def run_bounded(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: Path | None,
    timeout_s: float,
    locks: Sequence[int],
) -> Done:
    """Run `argv` to its end; what it started is gone then, also what it left in the background.

    When we die it is killed, too. `locks` are files whose lock is held until all of it is gone: the next
    holder of the lock finds no process writing.

    Raises: OSError: it cannot be started; subprocess.TimeoutExpired: it was killed for its time.
    """
    how = {"env": env, "cwd": cwd, "stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
    supervisor, stopping, status = start(argv, locks=locks, **how)
    with open(status, encoding="utf-8", errors="replace") as told, supervisor:
        try:
            stdout, stderr = supervisor.communicate(timeout=timeout_s)
        finally:
            os.close(stopping)
            _await(supervisor)
        word, _, what = told.read().strip().partition(" ")
    if word == "failed":
        raise OSError(what)
    return Done(int(what) if word == "ended" and what.lstrip("-").isdigit() else -9, stdout, stderr)


def _await(supervisor: subprocess.Popen[str]) -> None:
    try:
        supervisor.wait(_LAST_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()


log = structlog.get_logger(__name__)

_STEP_TIMEOUT_S = 900.0  # a slow package index and half a gigabyte
_MARKER = ".complete"
_LOCKS: ContextVar[tuple[int, ...]] = ContextVar("locks", default=())
"""Of the bundles that are being made here: the programs that make them hold them as long as they write."""


@dataclass(frozen=True, slots=True)
class ToolStore:
    """Where bundles are, whether one may be added, and where others are that are only looked at."""

    folder: Path
    may_install: bool = True
    ready: Path | None = None

    def ensure(
        self, name: str, digest: str, make: Callable[[Path], None], *, fit: Callable[[Path], bool] = lambda _: True
    ) -> Path:
        """The folder `NAME-DIGEST`, complete; `make` fills it in place when it is not there.

        fit: whether a complete one is still good for something on this host.

        Raises: AgentUnavailable: `make` did, or nothing may be installed now.
        """
        place = self.folder.resolve() / f"{name}-{digest}"  # a venv's scripts name its path: not that of a link to it
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
    """The names in it are on the disk."""
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
    """Hold the lock beside `place`; the kernel frees it when the holder has died, and the last step that it began."""
    with place.with_name(f".{place.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        before = _LOCKS.set((*_LOCKS.get(), handle.fileno()))
        try:
            yield
        finally:
            _LOCKS.reset(before)


def digest_of(name: str, parts: Iterable[Path | str]) -> str:
    """Of the contents of files, and of words. Raises: AgentUnavailable: a file is missing."""
    found = hashlib.sha256()
    for part in parts:
        try:
            content = part.read_bytes() if isinstance(part, Path) else part.encode()
        except OSError as error:
            raise AgentUnavailable(
                f"agent {name}: expected its lock file; found {error}; reinstall MegaFlow with its package data"
            ) from error
        found.update(len(content).to_bytes(8, "big") + content)
    return found.hexdigest()[:12]


def step(name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run one step of an installation; what it printed. Raises: AgentUnavailable: with the end of what it said."""
    try:
        done = run_bounded(argv, env=env, cwd=cwd, timeout_s=_STEP_TIMEOUT_S, locks=_LOCKS.get())
        if done.returncode == 0:
            return done.stdout
        found = f"exit code {done.returncode}: {(done.stderr.strip() or done.stdout.strip())[-1200:]}"
    except subprocess.TimeoutExpired:
        found = f"no end within {_STEP_TIMEOUT_S:.0f} s"
    except OSError as error:
        found = str(error)
    raise AgentUnavailable(
        f"agent {name}: expected `{' '.join(argv[:3])} …` to succeed; found {found}; "
        "check the disk and that the package index is reachable, then try again"
    )


def try_out(name: str, argv: Sequence[str], path: str, env: Mapping[str, str]) -> None:
    """Run `argv` with a temporary home and without MegaFlow's variables. Raises: AgentUnavailable."""
    with tempfile.TemporaryDirectory(prefix="megaflow-agent-") as home:
        step(name, argv, env={"PATH": f"{path}:/usr/bin:/bin", "HOME": home, **env}, cwd=Path(home))


def uv(name: str) -> str:
    """The program. Raises: AgentUnavailable."""
    beside_us = Path(sys.executable).with_name("uv")
    if beside_us.exists():
        return str(beside_us)
    if found := shutil.which("uv"):
        return found
    raise AgentUnavailable(
        f"agent {name}: expected the program uv beside {sys.executable} or on PATH; found neither; "
        "install it with `pip install uv`"
    )
