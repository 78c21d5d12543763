"""Finds the static programs that ship with the package (x86-64, arm64): session helper and port relay.

`make helper` builds them from their sources with Debian's compilers and writes `built.json`, which holds the digest of
the sources and of each program. A test rebuilds them and compares.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

from app.errors import EnvironmentFailed

HERE = Path(__file__).parent
BUILT = HERE / "built.json"
MACHINES = ("x86_64", "aarch64")
SOURCES = {"helper": HERE.parent / "session" / "helper", "relay": HERE.parent / "networks" / "forwarding"}
"""Folder of each program: all C files in it are its sources."""


class HelperUnavailable(EnvironmentFailed):
    """No program for this machine; the message names the machine."""


def content(program: str, machine: str) -> bytes:
    """Returns a program's bytes. Raises: HelperUnavailable: none for this machine, or not the built one."""
    file = HERE / f"{program}-{machine}"
    if machine not in MACHINES or not file.is_file():
        raise HelperUnavailable(
            f"expected a processor among {', '.join(MACHINES)} for the {program}, found {machine!r}; use another host"
        )
    data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != _built()["programs"][file.name]["sha256"]:
        raise HelperUnavailable(f"{file} is not the program that was built; install the package again")
    return data


def binary(home: Path, machine: str | None = None) -> Path:
    """Returns the session helper, executable: `home`/cache/session/helper-HASH-MACHINE, copied there if missing.

    machine: of the environment, as in `uname -m`; None: this host's. Safe when several processes call it at once.

    Start it inside an environment as one of
      helper --listen SOCKET [--orphan-exit SECONDS]   listens (mode 0600); as PID 1 it is also the init
      helper --listen-fd N [--orphan-exit SECONDS]     the same on a listening socket that it inherits (crun
                                                       --preserve-fds): no path is visible inside
      helper --stdio                                   one lane over stdin and stdout (`docker exec -i`)
      helper --bridge SOCKET                           carries stdin and stdout to a helper that listens

    On this host it also makes user namespaces:
      helper --apart                                   writes a byte when it is in one, and stays until its stdin ends

    Raises: HelperUnavailable; OSError: the folder cannot be written.
    """
    machine = machine or platform.machine()
    key = _built()["programs"].get(f"helper-{machine}", {}).get("sha256", "none")
    target = home / "cache" / "session" / f"helper-{key[:16]}-{machine}"
    if not target.exists():
        program = content("helper", machine)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            temporary = Path(folder, target.name)
            temporary.write_bytes(program)
            temporary.chmod(0o755)
            temporary.replace(target)
    return target


def source_digest(program: str) -> str:
    """Returns the digest of all that the program is built from."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES[program].glob("*.[ch]")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _built() -> dict[str, Any]:
    return dict(json.loads(BUILT.read_text()))
