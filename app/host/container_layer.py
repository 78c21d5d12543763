"""Empties a container's writable layer from this host, so that it equals its image again.

The engine's own `diff` is not enough: it compares size and time, so it misses a file overwritten in place whose time
was restored (engine 20.10). The layer has that file, and every deletion, mode, owner and attribute. The kernel allows
changes to an overlay's upper folder while it is not mounted, that is, while the container is stopped.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.host import trees
from app.host.cgroups import container_processes
from app.host.disk import DiskUsage
from app.host.engine import Engine

_OVERLAY = "trusted.overlay."
_GET_FLAGS = 0x80086601  # FS_IOC_GETFLAGS
_OUTSIDE_BYTES = 1 << 20
"""Compared part of each of the engine's files: a task may have made one as large as its disk limit allows."""


@dataclass(frozen=True, slots=True)
class FolderState:
    """Metadata of a folder that a container may change."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    attributes: dict[str, bytes]

    @classmethod
    def of(cls, folder: Path) -> FolderState:
        status = folder.stat()
        attributes = {name: os.getxattr(folder, name) for name in os.listxattr(folder) if not name.startswith(_OVERLAY)}
        return cls(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns, attributes)

    def restore(self, folder: Path) -> None:
        for name in set(os.listxattr(folder)) - set(self.attributes):
            with suppress(OSError):
                os.removexattr(folder, name)
        for name, value in self.attributes.items():
            os.setxattr(folder, name, value)
        os.chown(folder, self.uid, self.gid)
        os.chmod(folder, self.mode)
        os.utime(folder, ns=(self.mtime_ns, self.mtime_ns))


@dataclass
class ContainerLayer:
    """Writable layer of one container, and its state before the container first started."""

    upper: Path
    folders: dict[Path, FolderState]  # the root, and folders that the engine made (the working folder), parents first
    ours: frozenset[str]  # mount points that a task cannot change
    outside: dict[Path, tuple[bytes, int, int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, container: dict[str, Any], ours: Iterable[str] = ()) -> ContainerLayer | None:
        """Reads the layer of a container that never ran; None: not visible, or it has volumes other than `ours`."""
        upper = upper_of(container)
        try:
            if os.geteuid() != 0 or any(files for _, _, files in os.walk(upper)):
                return None
            folders = [upper, *(Path(folder) for folder, _, _ in os.walk(upper) if Path(folder) != upper)]
            layer = cls(upper, {folder: FolderState.of(folder) for folder in folders}, frozenset(ours))
        except OSError:
            return None
        return None if layer.has_volumes(container) else layer

    def has_volumes(self, container: dict[str, Any]) -> bool:
        """Whether a task could leave something in a mount."""
        return any(mount["Destination"] not in self.ours for mount in container["Mounts"])

    def note_outside(self, files: Iterable[Path]) -> None:
        """Records /etc/hosts and its like. Call before the first command. Raises: OSError: the container is gone."""
        self.outside = {file: _content(file) for file in files}

    def empty(self) -> int:
        """Resets the layer to its first state; returns the number of removed entries. The container must be stopped."""
        count = trees.empty(self.upper)
        for folder in self.folders:
            folder.mkdir(exist_ok=True)
        for folder, state in reversed(self.folders.items()):  # a parent's time changes with its children
            state.restore(folder)
        return count

    def residue(self) -> list[str]:
        """Returns the paths that differ from the first state: empty if `empty` worked."""
        now = {Path(folder): FolderState.of(Path(folder)) for folder, _, _ in os.walk(self.upper)}
        files = [Path(folder) / name for folder, _, names in os.walk(self.upper) for name in names]
        changed = [folder for folder in now.keys() | self.folders.keys() if now.get(folder) != self.folders.get(folder)]
        return [f"/{path.relative_to(self.upper)}" for path in (*files, *changed)]

    def changed_outside(self) -> list[str]:
        """Returns the names of the engine's own files that changed. The engine writes them anew at each start."""
        return [path.name for path, known in self.outside.items() if _content(path) != known]


def outside_of(container: dict[str, Any]) -> list[Path]:
    """Returns the engine's own files that a running container sees in addition to its layer."""
    paths = (container.get(name) for name in ("HostsPath", "HostnamePath", "ResolvConfPath"))
    return [Path(path) for path in paths if path]


def upper_of(container: dict[str, Any]) -> Path:
    """Returns the folder of a container's own files, by its description. It may not exist on this host."""
    data = container.get("GraphDriver", {}).get("Data") or {}
    return Path(data.get("UpperDir") or "/nonexistent")


def places_of(engine: Engine, container: dict[str, Any]) -> list[Path]:
    """Returns the folders that a container writes to, by its description; only those visible from this host.

    They are its own files, its volumes, and the engine's folder for it, with its log and with /etc/hosts, /etc/hostname
    and /etc/resolv.conf, which are mounted from there and are writable.
    """
    volumes = [Path(mount["Source"]) for mount in container["Mounts"] if mount["Type"] == "volume"]
    places = (upper_of(container), engine.folder_of(str(container["Id"])), *volumes)
    return [place for place in places if os.access(place, os.R_OK | os.X_OK)]


def usage_of(engine: Engine, containers: Iterable[dict[str, Any]]) -> DiskUsage:
    """Returns the disk usage of containers together, by their current descriptions. Raises: OSError."""
    descriptions = list(containers)
    places = {place for one in descriptions for place in places_of(engine, one)}
    processes = [pid for one in descriptions for pid in container_processes(str(one["Id"]), int(one["State"]["Pid"]))]
    return DiskUsage.added([DiskUsage.of(*places), DiskUsage.held(processes, *places)])


def _content(path: Path) -> tuple[bytes, int, int, int]:
    """Returns content, attributes and flags. The engine rewrites only the content of its files, not the rest."""
    status = path.stat()
    metadata = sorted((name, os.getxattr(path, name)) for name in os.listxattr(path)), _flags(path), status.st_size
    with path.open("rb") as file:
        content = file.read(_OUTSIDE_BYTES)
    return content + repr(metadata).encode(), status.st_mode, status.st_uid, status.st_gid


def _flags(path: Path) -> int:
    """Returns the inode's flags, as set by chattr; 0 where the file system has none."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(struct.unpack("l", fcntl.ioctl(handle, _GET_FLAGS, bytes(8)))[0])
    except OSError:
        return 0
    finally:
        os.close(handle)
