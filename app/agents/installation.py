"""Installs an agent framework on this host, once, in a Python environment of its own.

The frameworks' dependencies are large and contradict each other and ours, so none of them is ever in our
environment. What gets installed is what the lock file says, hash by hash.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog

from app.errors import AgentUnavailable

log = structlog.get_logger(__name__)

_STEP_TIMEOUT_S = 900.0  # a slow package index and half a gigabyte
_MARKER = ".complete"


def ensure(
    tools_dir: Path,
    name: str,
    lock: Path,
    *,
    first_use: Sequence[str] = (),
    first_use_env: Mapping[str, str] | None = None,
) -> Path:
    """The folder of a virtual environment that holds exactly the packages of `lock`; made when it is not there.

    Its name carries a digest of the lock file and of our Python's version, so a changed lock is a new folder and a
    running agent keeps the one that it started from. Processes that ask at the same time wait for the first one; what
    a killed one left half done is made anew. `first_use` are arguments for the environment's Python, run once at the
    end with `first_use_env`, a home folder that is thrown away, and nothing else of ours: they prove that the
    framework starts, and leave its byte code behind for every later start.

    Raises: AgentUnavailable: no `uv`, no lock file, or the installation fails.
    """
    venv = tools_dir.absolute() / f"{name}-{_digest(name, lock)}"
    if _complete(venv):
        return venv
    tools_dir.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(venv):
        if not _complete(venv):
            started = time.monotonic()
            log.info("agent.installing", agent=name, folder=str(venv))
            _install(venv, name, lock)
            if first_use:
                _try_out(venv, name, first_use, first_use_env or {})
            (venv / _MARKER).touch()
            log.info("agent.installed", agent=name, folder=str(venv), took_s=round(time.monotonic() - started, 1))
    return venv


def _digest(name: str, lock: Path) -> str:
    try:
        content = lock.read_bytes()
    except OSError as error:
        raise AgentUnavailable(
            f"agent {name}: expected its lock file; found {error}; reinstall MegaFlow with its package data"
        ) from error
    python = "{}.{}".format(*sys.version_info[:2])
    return hashlib.sha256(content + python.encode()).hexdigest()[:12]


def _complete(venv: Path) -> bool:
    # The interpreter is a link into the base Python, which an upgrade of the host may have taken away.
    return (venv / _MARKER).is_file() and (venv / "bin" / "python").exists()


@contextmanager
def _one_at_a_time(venv: Path) -> Iterator[None]:
    """Hold the lock beside `venv`; the kernel frees it when the holder dies."""
    with venv.with_name(f".{venv.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _install(venv: Path, name: str, lock: Path) -> None:
    """Build in place, because a virtual environment cannot be moved; the caller sets the marker last."""
    shutil.rmtree(venv, ignore_errors=True)
    uv, python = _uv(name), str(venv / "bin" / "python")
    _step(name, [uv, "venv", "--quiet", "--no-python-downloads", "--python", sys.executable, str(venv)])
    _step(name, [uv, "pip", "install", "--quiet", "--require-hashes", "--python", python, "-r", str(lock)])


def _try_out(venv: Path, name: str, first_use: Sequence[str], env: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix="megaflow-agent-") as home:
        minimal = {"PATH": f"{venv}/bin:/usr/bin:/bin", "HOME": home, **env}
        _step(name, [str(venv / "bin" / "python"), *first_use], env=minimal)


def _uv(name: str) -> str:
    beside_us = Path(sys.executable).with_name("uv")
    if beside_us.exists():
        return str(beside_us)
    if found := shutil.which("uv"):
        return found
    raise AgentUnavailable(
        f"agent {name}: expected the program uv beside {sys.executable} or on PATH; found neither; "
        "install it with `pip install uv`"
    )


def _step(name: str, argv: list[str], *, env: Mapping[str, str] | None = None) -> None:
    try:
        subprocess.run(  # noqa: S603  our own words and paths
            argv,
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=_STEP_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        found = f"exit code {error.returncode}: {(error.stderr or error.stdout).strip()[-800:]}"
    except subprocess.TimeoutExpired:
        found = f"no end within {_STEP_TIMEOUT_S:.0f} s"
    else:
        return
    raise AgentUnavailable(
        f"agent {name}: expected `{' '.join(argv[:3])} …` to succeed; found {found}; "
        "check the disk and that the package index is reachable, then try again"
    )
