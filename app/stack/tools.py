"""Finds and installs optional programs of this host: an OCI runtime, zstd, skopeo.

All are optional. Without the runtime, each environment costs a start by the engine; without the others, no image can be
pulled when there is no engine.
"""

from __future__ import annotations

import os
import shutil

from app.settings import Settings
from app.stack import packages
from app.stack.engine import Report
from app.stack.home import logs_folder, prepare, run_folder

PROGRAMS = ("crun", "zstd", "skopeo")
"""Programs; each has a Debian package of the same name."""


def ensure_tools(settings: Settings, *, may_install: bool, report: Report) -> None:
    """Installs missing programs where possible: as root, with apt-get."""
    prepare(settings)
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    tried = run_folder(settings) / "tools-tried"  # try once per set: the index may be unreachable
    names = " ".join(lacking)
    if (
        lacking
        and (not tried.exists() or tried.read_text() != names)
        and may_install
        and os.geteuid() == 0
        and shutil.which("apt-get") is not None
    ):
        report(f"installing {names} from Debian's packages")
        for package in lacking:  # one by one: the index may lack one of them
            packages.install([package], logs_folder(settings) / "apt.log")
        tried.write_text(names)
    if shutil.which("crun") is None and settings.container_runtime != "docker":
        report("environments need a container engine: crun is missing (Debian: apt-get install crun)")
