"""Finds optional programs of this host: an OCI runtime, zstd, skopeo.

Nothing here is needed: without the runtime each environment costs the engine's start, without the others no image is
pulled where there is no engine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from app.settings import Settings
from app.stack.engine import Report
from app.stack.home import logs_folder, prepare, run_folder

PACKAGES = {"crun": ("crun",), "zstd": ("zstd",), "skopeo": ("skopeo",)}
"""Debian's packages of each program."""
_PATIENCE_S = 120.0


def ensure_tools(settings: Settings, *, may_install: bool, report: Report) -> tuple[str, ...]:
    """Install what is missing, where that is possible; returns what is still missing."""
    prepare(settings)
    missing = [program for program in PACKAGES if shutil.which(program) is None]
    packages = [package for program in missing for package in PACKAGES[program]]
    tried = run_folder(settings) / "tools-tried"  # once for each set of what is missing: an index may be out of reach
    wanted = " ".join(packages)
    if (
        packages
        and (not tried.exists() or tried.read_text() != wanted)
        and may_install
        and os.geteuid() == 0
        and shutil.which("apt-get") is not None
    ):
        report(f"installing {' '.join(packages)} from Debian's packages")
        _install(packages, logs_folder(settings) / "apt.log")
        tried.write_text(wanted)
    still = tuple(program for program in PACKAGES if shutil.which(program) is None)
    if "crun" in still and settings.container_runtime != "docker":
        report("environments need a container engine: crun is missing (Debian: apt-get install crun)")
    return still


def _install(packages: list[str], log: Path) -> None:
    """All at once, else one by one: an index may lack one of them."""
    if not _installed(packages, log) and len(packages) > 1:
        for package in packages:
            _apt(["install", package], log)


def _installed(packages: list[str], log: Path) -> bool:
    """Perhaps after a look at what there is."""
    if _apt(["install", *packages], log):
        return True
    _apt(["update"], log)
    return _apt(["install", *packages], log)


def _apt(words: list[str], log: Path) -> bool:
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", words[0], "-y", "--no-install-recommends", *words[1:]]
    with log.open("ab") as output, suppress(subprocess.TimeoutExpired):
        done = subprocess.run(  # noqa: S603 (constants of this module)
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE_S,
        )
        return done.returncode == 0
    return False
