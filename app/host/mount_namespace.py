"""Mounts file systems in the mount namespace of one thread; the mounts end with it.

An environment's file system is mounted only in the namespace of the thread that starts it; the environment's processes
inherit a copy. So the host never sees a worker's mounts, a killed worker leaves none behind, and the mount ends with
the environment's last process.
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
"""Mounts of other programs: not needed, and otherwise copied for every environment."""

_HYBRID = "/sys/fs/cgroup/unified"
"""Mount point of cgroups version 2 on hosts with both versions; crun refuses to run when it has controllers."""

_STAGES = ("/mnt", "/srv", "/media", "/opt")
"""Folders that exist on every system and are open to all users: our mounts cover one of them."""

_lock = threading.Lock()
_plain: dict[tuple[int, MountStage | None], int] = {}
"""Namespaces that environments' namespaces are copied from; per process, since a fork must not share one."""


@dataclass(frozen=True)
class MountStage:
    """Empty in-memory folders as mount points, visible only to the thread; other users may traverse them."""

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
    def state(self) -> Path:
        """State folder of a runtime during a start."""
        return self.place / "state"

    @property
    def nothing(self) -> Path:
        """Our own /dev/null: a runtime gives the first process's input and output to the environment's root user."""
        return self.place / "null"

    @classmethod
    def beside(cls, needs: Path) -> MountStage:
        """Chooses a folder that does not cover `needs`. Raises: OSError: this host has no such folder."""
        for name in _STAGES:
            if os.path.isdir(name) and not os.path.islink(name) and not needs.is_relative_to(name):
                return cls(Path(name))
        raise OSError(errno.ENOENT, f"expected one of {', '.join(_STAGES)} to mount at, found none", str(needs))

    def build(self) -> None:
        """Mounts and creates the folders in the calling thread's namespace."""
        kernel.mount("tmpfs", str(self.place), "tmpfs", 0, "mode=711,size=64m")
        os.mknod(self.nothing, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        for folder in (self.layers, self.own, self.root):
            folder.mkdir()
            folder.chmod(0o711)
        self.state.mkdir(mode=0o700)


def apart(work: Callable[[], Result], *, needs: Path, stage: MountStage | None = None) -> Result:
    """Runs `work` in a thread with its own mounts; `needs` is a folder that it must see.

    The thread may mount, change its working folder and join cgroups without effect on other threads. `stage` gives
    mount points and hides the host's files at its place.
    """

    def body() -> Result:
        kernel.unshare(kernel.CLONE_FS)
        kernel.join_mounts(plain(needs, stage))
        kernel.unshare(kernel.CLONE_NEWNS)
        return work()

    return kernel.in_thread(body, name="environment-start")


def plain(needs: Path, stage: MountStage | None) -> int:
    """Returns the namespace (a file descriptor, not to be closed) that environments' namespaces are copied from."""
    key = os.getpid(), stage
    with _lock:
        if key not in _plain:
            for other in [one for one in _plain if one[0] != key[0]]:
                os.close(_plain.pop(other))  # a fork inherits the parent's open file
            _plain[key] = kernel.in_thread(lambda: _made(needs.resolve(), stage), name="environment-start")
        return _plain[key]


def _made(needs: Path, stage: MountStage | None) -> int:
    kernel.unshare(kernel.CLONE_NEWNS)
    # Slave: the host's unmounts also apply here, so we do not keep them busy; our mounts do not reach the host.
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
