"""Finds and installs optional programs of this host: an OCI runtime, zstd, skopeo.

Nothing here is needed: without the runtime each environment costs the engine's start, without the others no image is
pulled where there is no engine.
"""

from __future__ import annotations

import os
import shutil

from app.settings import Settings
from app.stack import packages
from app.stack.engine import Report
from app.stack.home import logs_folder, prepare, run_folder

PROGRAMS = ("crun", "zstd", "skopeo")
"""Each is in Debian's package of its name."""


def ensure_tools(settings: Settings, *, may_install: bool, report: Report) -> None:
    """Install what is missing, where that is possible."""
    prepare(settings)
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    tried = run_folder(settings) / "tools-tried"  # once for each set of what is missing: an index may be out of reach
    wanted = " ".join(lacking)
    if (
        lacking
        and (not tried.exists() or tried.read_text() != wanted)
        and may_install
        and os.geteuid() == 0
        and shutil.which("apt-get") is not None
    ):
        report(f"installing {wanted} from Debian's packages")
        for package in lacking:  # one by one: an index may lack one of them
            packages.install([package], logs_folder(settings) / "apt.log")
        tried.write_text(wanted)
    if shutil.which("crun") is None and settings.container_runtime != "docker":
        report("environments need a container engine: crun is missing (Debian: apt-get install crun)")
