"""The peers' environment: made once in the user's cache, because their packages are not in our lock."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

REQUIREMENTS = (
    "celery==5.7.*",
    "kombu==5.7.*",
    "packaging",  # kombu's Redis transport imports it without saying so
    "procrastinate==3.10.*",
    "psycopg[binary,pool]==3.3.*",
    "redis",
)
_TIMEOUT_S = 600


def python() -> Path:
    """The interpreter of an environment that has the peers; installed from the package index when it is missing.

    Raises: RuntimeError: it could not be installed; the installer's own words are in the message.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megaflow-bench"
    wanted = hashlib.sha256("\n".join((sys.version, *REQUIREMENTS)).encode()).hexdigest()[:12]
    place = base / f"peers-{wanted}"
    if not (place / "complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        base.mkdir(parents=True, exist_ok=True)
        _run([_uv(), "venv", "--quiet", "--python", sys.executable, str(place)])
        _run(
            [
                _uv(),
                "pip",
                "install",
                "--quiet",
                "--compile-bytecode",
                "--python",
                str(place / "bin" / "python"),
                *REQUIREMENTS,
            ]
        )
        (place / "complete").touch()
    return place / "bin" / "python"


def measure(script: str, *arguments: str) -> dict[str, Any]:
    """Run `bench/peers/<script>.py` there and return what it printed.

    Raises: RuntimeError: the script failed.
    """
    path = Path(__file__).parent / f"{script}.py"
    # Away from our checkout, and without our variables: a peer sees its own packages and nothing of ours.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MEGAFLOW_", "PYTHON"))}
    found: dict[str, Any] = json.loads(_run([str(python()), str(path), *arguments], env=clean))
    return found


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise RuntimeError("the peers' environment needs uv, which `make bootstrap` installs")
    return found


def _run(command: list[str], env: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S, env=env, cwd="/")  # noqa: S603
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        detail = (getattr(error, "stderr", "") or str(error)).strip()
        raise RuntimeError(f"could not run {Path(command[0]).name} {command[1]}: {detail[-1000:]}") from error
    return done.stdout
