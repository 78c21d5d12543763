"""A peer's own virtual environment: made once in the user's cache, because no two peers want the same packages."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be installed. `forced` is installed as it is: neither its requirements nor its Python are checked."""

    name: str
    requirements: tuple[str, ...]
    forced: tuple[str, ...] = ()


def cache() -> Path:
    """Where peers are kept between two runs."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megaflow-bench"
    base.mkdir(parents=True, exist_ok=True)
    return base


def python_with(wanted: Wanted) -> Path:
    """The interpreter of a virtual environment that has it.

    Raises: RuntimeError: it could not be installed; the installer's own words are in the message.
    """
    words = (sys.version, *wanted.requirements, *wanted.forced)
    place = cache() / f"{wanted.name}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:12]}"
    python = place / "bin" / "python"
    if not (place / "complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        run([_uv(), "venv", "--quiet", "--python", sys.executable, str(place)])
        run([_uv(), "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python), *wanted.requirements])
        if wanted.forced:
            pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
            run([*pip, "--ignore-requires-python", *wanted.forced])
        (place / "complete").touch()
    return python


def folder_with(name: str, requirements: Sequence[str], *, python_version: str) -> Path:
    """A folder of packages for another machine's Python of this version (to go into an image).

    Raises: RuntimeError, as above.
    """
    words = (python_version, *requirements)
    place = cache() / f"{name}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:12]}"
    if not (place / "complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        target = ("--target", str(place), "--python-version", python_version)
        run(
            [
                _uv(),
                "pip",
                "install",
                "--quiet",
                "--compile-bytecode",
                *target,
                "--python",
                sys.executable,
                *requirements,
            ]
        )
        (place / "complete").touch()
    return place


def run(command: list[str], *, cwd: str = "/", env: dict[str, str] | None = None) -> str:
    """What a program printed. Raises: RuntimeError: it failed; the end of what it said is in the message."""
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=cwd, env=env)  # noqa: S603
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        detail = (getattr(error, "stderr", "") or str(error)).strip()
        raise RuntimeError(f"could not run {Path(command[0]).name} {command[1]}: {detail[-600:]}") from error
    return done.stdout


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise RuntimeError("the peers' environments need uv, which `make bootstrap` installs")
    return found
