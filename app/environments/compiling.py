"""Small programs in C, compiled on the host that they are for, once for each source.

With musl where it is: a program with its C library begins in a third of the time. The usual one first asks the
processor what it is, some thirty questions that a virtual machine's host answers one by one.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import structlog

from app.errors import EnvironmentFailed

log = structlog.get_logger()

STATIC = ("-std=c11", "-static", "-O2", "-Wall", "-Wextra", "-s")
"""Flags of a program that runs in any image."""
_MUSL = "musl-gcc"
_PATIENCE_S = 120.0


class NotCompiled(EnvironmentFailed):
    """There is no compiler here, or it refused; the message says which, and what to install."""


def kept(path: Path, sources: Sequence[Path], flags: Sequence[str] = STATIC) -> Path:
    """The program of these sources and flags at `path`-HASH-MACHINE; compiled there when it is missing.

    One compiled with musl has that at the end of its name, and goes before. Safe when several processes ask at once.

    Raises: NotCompiled.
    """
    made = path.with_name(f"{path.name}-{_key(tuple(sources), tuple(flags))}-{platform.machine()}")
    sooner = made.with_name(f"{made.name}-musl")
    if sooner.exists():  # made where there was musl, and brought here perhaps
        return sooner
    made.parent.mkdir(parents=True, exist_ok=True)
    if (musl := _musl(flags)) is not None:
        try:
            _compile([musl, *flags, *_KERNELS_HEADERS], sooner, sources)
        except NotCompiled as error:
            log.info("program.compiled_otherwise", reason=str(error))
        else:
            log.info("program.compiled", path=str(sooner))
            return sooner
    if not made.exists():
        compile_to(made, sources, flags)
        log.info("program.compiled", path=str(made))
    return made


def compile_to(path: Path, sources: Sequence[Path], flags: Sequence[str] = STATIC) -> None:
    """Into a file of our own, then renamed to `path`: another process sees none of it or all. Raises: NotCompiled."""
    compiler = find()
    if compiler is None:
        raise NotCompiled(f"expected a C compiler for {path.name}, found none; install Debian's gcc and libc6-dev.")
    _compile([compiler, *flags], path, sources)


def _compile(command: Sequence[str], path: Path, sources: Sequence[Path]) -> None:
    number, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(number)
    try:
        _call([*command, "-o", scratch, *(str(source) for source in sources)], path.name)
        os.chmod(scratch, 0o755)
        os.replace(scratch, path)
    except OSError as error:
        raise NotCompiled(f"cannot keep {path.name} at {path}: {error}.") from error
    finally:
        Path(scratch).unlink(missing_ok=True)


def find() -> str | None:
    """The compiler of this host."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def _musl(flags: Sequence[str]) -> str | None:
    """musl's compiler, for programs that take their library along."""
    return shutil.which(_MUSL) if "-static" in flags else None


_KERNELS_HEADERS = ("-idirafter", "/usr/include", "-idirafter", f"/usr/include/{platform.machine()}-linux-gnu")
"""musl's compiler does not look where they are."""


def _call(command: list[str], name: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"cannot compile {name}: {error}.") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace")[-2000:]
        raise NotCompiled(
            f"cannot compile {name} with {command[0]} (exit code {done.returncode}); are Debian's gcc and libc6-dev"
            f" installed? It said:\n{said}"
        )


@functools.cache
def _key(sources: tuple[Path, ...], flags: tuple[str, ...]) -> str:
    """Changes with the sources, what lies beside them to be included, and the flags."""
    digest = hashlib.sha256("\0".join(flags).encode())
    for file in sorted({*sources, *(header for one in sources for header in one.parent.glob("*.h"))}):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
