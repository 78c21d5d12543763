"""A container's own file layer, seen from this host: emptied, the container is its image again, provably.

Why not the engine's own `diff`: it compares size and time of files, so a file overwritten in place whose time was put
back is not in it (engine 20.10). In the layer it is, as is every deletion, mode, owner and attribute. The kernel allows
changes to an overlay's upper folder while it is not mounted, that is, while the container is stopped.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_OVERLAY = "trusted.overlay."


@dataclass(frozen=True, slots=True)
class Face:
    """What a container may change of a folder itself."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    attributes: dict[str, bytes]

    @classmethod
    def of(cls, folder: Path) -> Face:
        found = folder.stat()
        attributes = {name: os.getxattr(folder, name) for name in os.listxattr(folder) if not name.startswith(_OVERLAY)}
        return cls(stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, found.st_mtime_ns, attributes)

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
class Layer:
    """The layer of one container, and how it was before the container first started."""

    upper: Path
    faces: dict[Path, Face]  # the root's, and those of folders that the engine made (the working folder), parents first
    ours: frozenset[str]  # mount points that are no part of what a task may change
    outside: dict[Path, tuple[bytes, int, int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, container: dict[str, Any], ours: Iterable[str] = ()) -> Layer | None:
        """From the engine's description of a container that never ran; None when it cannot be seen or has volumes.

        `ours`: mounts that tasks cannot leave anything in.
        """
        data = container.get("GraphDriver", {}).get("Data") or {}
        upper = Path(data.get("UpperDir") or "/nonexistent")
        try:
            if os.geteuid() != 0 or any(files for _, _, files in os.walk(upper)):
                return None
            folders = [upper, *(Path(folder) for folder, _, _ in os.walk(upper) if Path(folder) != upper)]
            layer = cls(upper, {folder: Face.of(folder) for folder in folders}, frozenset(ours))
        except OSError:
            return None
        return None if layer.has_volumes(container) else layer

    def has_volumes(self, container: dict[str, Any]) -> bool:
        """Whether a task could leave something in a mount."""
        return any(mount["Destination"] not in self.ours for mount in container["Mounts"])

    def note_outside(self, container: dict[str, Any]) -> None:
        """Remember /etc/hosts and its like, outside of the layer; the container runs, but no command has yet."""
        paths = (container.get(name) for name in ("HostsPath", "HostnamePath", "ResolvConfPath"))
        self.outside = {Path(path): _content(Path(path)) for path in paths if path}

    def empty(self) -> int:
        """Bring the layer back to its beginning; the container must be stopped. Returns how many entries it held."""
        count = sum(len(folders) + len(files) for _, folders, files in os.walk(self.upper))
        for entry in os.scandir(self.upper):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        for folder in self.faces:
            folder.mkdir(exist_ok=True)
        for folder, face in reversed(self.faces.items()):  # a parent's time changes with its children
            face.restore(folder)
        return count

    def residue(self) -> list[str]:
        """What differs from the beginning: nothing, if `empty` did its work."""
        now = {Path(folder): Face.of(Path(folder)) for folder, _, _ in os.walk(self.upper)}
        files = [Path(folder) / name for folder, _, names in os.walk(self.upper) for name in names]
        changed = [folder for folder in now.keys() | self.faces.keys() if now.get(folder) != self.faces.get(folder)]
        return [f"/{path.relative_to(self.upper)}" for path in (*files, *changed)]

    def changed_outside(self) -> list[str]:
        """Which of the engine's own files differ from how they were; the engine writes them anew at each start."""
        return [path.name for path, known in self.outside.items() if _content(path) != known]


def _content(path: Path) -> tuple[bytes, int, int, int]:
    found = path.stat()
    return path.read_bytes(), found.st_mode, found.st_uid, found.st_gid
