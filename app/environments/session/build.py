"""The helper's binary: compiled once per source and machine, or named by path."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import structlog

from app.errors import EnvironmentFailed

log = structlog.get_logger()

_SOURCE = Path(__file__).parent / "helper"
_FLAGS = ["-std=c11", "-static", "-O2", "-Wall", "-Wextra", "-s"]
_PATIENCE_S = 120.0


class HelperUnavailable(EnvironmentFailed):
    """The session helper could not be compiled here; the message names what is missing."""


def binary(home: Path, *, prebuilt: Path | None = None) -> Path:
    """The static helper, executable, at `home`/cache/session/helper-HASH-MACHINE; compiled there when it is missing.

    Safe when several processes ask at once. `prebuilt` is taken as it is.

    Start it inside an environment as one of
      helper --listen SOCKET [--orphan-exit SECONDS]   listens (mode 0600); as PID 1 it is also the init
      helper --listen-fd N [--orphan-exit SECONDS]     the same on a listening socket that it inherits (crun
                                                       --preserve-fds): no path is visible inside
      helper --stdio                                   one lane over stdin and stdout (`docker exec -i`)
      helper --bridge SOCKET                           carries stdin and stdout to a helper that listens

    Raises: HelperUnavailable: no compiler (Debian: gcc and libc6-dev), or it failed.
    """
    if prebuilt is not None:
        if not os.access(prebuilt, os.X_OK):
            raise HelperUnavailable(f"expected an executable session helper at {prebuilt}, found none.")
        return prebuilt
    path = home / "cache" / "session" / f"helper-{_fingerprint()}-{platform.machine()}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _compile(path)
    return path


@functools.cache
def _fingerprint() -> str:
    """Changes with the source and the flags."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for file in _sources():
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _sources() -> list[Path]:
    return sorted(_SOURCE.glob("*.[ch]"))


def _compile(path: Path) -> None:
    """Into a file of our own, then renamed: another process sees none of it or all."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise HelperUnavailable(
            "expected a C compiler for the session helper, found none; install Debian's gcc and libc6-dev, "
            "or name a prebuilt helper."
        )
    number, name = tempfile.mkstemp(prefix=".helper-", dir=path.parent)
    os.close(number)
    made = Path(name)
    try:
        _call([compiler, *_FLAGS, "-o", name, *(str(file) for file in _sources() if file.suffix == ".c")])
        made.chmod(0o755)
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)
    log.info("session.helper_compiled", path=str(path))


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HelperUnavailable(f"cannot compile the session helper: {error}.") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace")[-2000:]
        raise HelperUnavailable(
            f"cannot compile the session helper with {command[0]} (exit code {done.returncode}); "
            f"are Debian's gcc and libc6-dev installed? It said:\n{said}"
        )
