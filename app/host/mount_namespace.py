"""Mounts in the namespace of one thread, gone with it.

An environment's file system is mounted only in the namespace of the thread that starts it; the environment's processes
take a copy along. So no mount of a worker is ever seen on the host, a killed worker leaves none behind, and the last
process of an environment ends its mount.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from app.host import kernel

Result = TypeVar("Result")

_UNNEEDED_KINDS = frozenset({"overlay", "nsfs", "fuse.lxcfs", "autofs"})
"""Mounts of other programs: not needed, and each would be copied for every environment."""

_HYBRID = "/sys/fs/cgroup/unified"
"""Where hosts with both versions of cgroups have the second one; crun refuses to run when it has controllers."""

_STAGES = ("/mnt", "/srv", "/media", "/opt")
"""Folders that every system has and that anybody may enter: one of them is covered where our mounts live."""

_lock = threading.Lock()
_plain: dict[tuple[int, MountStage | None], int] = {}
"""What those of environments are copied from, by process, since a fork must not share it."""


@dataclass(frozen=True)
class MountStage:
    """Empty folders in memory to mount things at, seen by the thread alone; other users may pass through them."""

    place: Path

    @property
    def layers(self) -> Path:
        return self.place / "layers"

    @property
    def own(self) -> Path:
        return self.place / "own"

    @property
    def root(self) -> Path:
        return self.place / "root"

    @property
    def tool(self) -> Path:
        """For a moment, what is on its way into an environment."""
        return self.place / "tool"

    @property
    def state(self) -> Path:
        """What a runtime keeps for itself, for the time of a start."""
        return self.place / "state"

    @property
    def nothing(self) -> Path:
        """As /dev/null: a runtime makes what an environment's first process reads and writes its root's own."""
        return self.place / "null"

    @classmethod
    def beside(cls, needs: Path) -> MountStage:
        """One that does not cover `needs`. Raises: OSError: this host has no such folder."""
        for name in _STAGES:
            if os.path.isdir(name) and not os.path.islink(name) and not needs.is_relative_to(name):
                return cls(Path(name))
        raise OSError(errno.ENOENT, f"expected one of {', '.join(_STAGES)} to mount at, found none", str(needs))

    def build(self) -> None:
        """In the calling thread's own mounts."""
        kernel.mount("tmpfs", str(self.place), "tmpfs", 0, "mode=711,size=64m")
        os.mknod(self.nothing, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        for folder in (self.layers, self.own, self.root, self.tool):
            folder.mkdir()
            folder.chmod(0o711)
        self.state.mkdir(mode=0o700)


def apart(work: Callable[[], Result], *, needs: Path, stage: MountStage | None = None) -> Result:
    """Do `work` in a thread with mounts of its own; `needs` names a folder that it must see.

    The thread may mount, change its working folder and join cgroups: no other thread is concerned. `stage` is there to
    mount at, and hides what this host has there.
    """

    def body() -> Result:
        kernel.unshare(kernel.CLONE_FS)
        kernel.join_mounts(plain(needs, stage))
        kernel.unshare(kernel.CLONE_NEWNS)
        return work()

    return kernel.in_thread(body, name="environment-start")


def plain(needs: Path, stage: MountStage | None) -> int:
    """The namespace (a file descriptor, not to be closed) that those of environments are copied from."""
    key = os.getpid(), stage
    with _lock:
        if key not in _plain:
            for other in [one for one in _plain if one[0] != key[0]]:
                os.close(_plain.pop(other))  # a fork has a copy of the parent's open file
            _plain[key] = kernel.in_thread(lambda: _made(needs.resolve(), stage), name="environment-start")
        return _plain[key]


def _made(needs: Path, stage: MountStage | None) -> int:
    kernel.unshare(kernel.CLONE_NEWNS)
    # Slave: what the host unmounts goes here, too, instead of being held by us; nothing of ours goes there.
    kernel.mount(None, "/", None, kernel.MS_SLAVE | kernel.MS_REC)
    for mounted in _unneeded(needs):
        with suppress(OSError):
            kernel.unmount(mounted)
    if stage is not None:
        stage.build()
    return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)


def _unneeded(needs: Path) -> Iterator[str]:
    for line in reversed(Path("/proc/thread-self/mountinfo").read_text().splitlines()):
        fields, _, rest = line.partition(" - ")
        where = fields.split()[4].encode().decode("unicode_escape")
        kind = rest.split()[0]
        if where == _HYBRID or (kind in _UNNEEDED_KINDS and where != "/" and not needs.is_relative_to(where)):
            yield where
