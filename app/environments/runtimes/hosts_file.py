"""Writes /etc/hosts and /etc/hostname for containers without a network, which the engine does not.

The engine's network `none` is not used: for it, an engine executes itself twice at each start, keeps a sandbox and
writes both down: 148 ms instead of 67 (20.10, its own runtime). The container has the same without it: a network
namespace of its own, with nothing but a loopback.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from app.host import archives
from app.host.disk import disk_named
from app.host.engine import Engine

_MODE = 0o644


def texts(hostname: str) -> dict[str, str]:
    """Returns the files of an environment that has only a loopback, by their names in /etc."""
    return {
        "hosts": f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{hostname}\n",
        "hostname": f"{hostname}\n",
        "resolv.conf": "# no network\n",
    }


def write(engine: Engine, container: dict[str, Any]) -> None:
    """Writes the files of a writable container that never ran, given its description. Raises: APIError, DiskFull."""
    files = {name: text.encode() for name, text in texts(container["Config"]["Hostname"]).items()}
    with disk_named("make an environment"):
        if _written_here(container, files):
            return
    engine.api.put_archive(str(container["Id"]), "/etc", archives.of_files(files, mode=_MODE))


def _written_here(container: dict[str, Any], files: dict[str, bytes]) -> bool:
    """Writes into the layer that the engine makes for such files below the container's: they are not its changes."""
    data = container.get("GraphDriver", {}).get("Data") or {}
    topmost = Path(str(data.get("LowerDir") or "").partition(":")[0])
    if os.geteuid() != 0 or not topmost.parent.name.endswith("-init"):
        return False
    for name, content in files.items():
        try:
            handle = os.open(topmost / "etc" / name, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # of another host, or of another kind of engine
            return False
        try:
            os.write(handle, content)
            os.fchmod(handle, _MODE)
        finally:
            os.close(handle)
    return True
