"""Where mounts of ours live: a namespace of one thread, gone with it.

An environment's file system is mounted only in the namespace of the thread that starts it; the environment's processes
take a copy along. So no mount of ours is ever seen on the host, a killed worker leaves none behind, and the last
process of an environment ends its mount.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from app.environments.oci import kernel

Result = TypeVar("Result")

_CROWD = frozenset({"overlay", "nsfs", "fuse.lxcfs", "autofs"})
"""Other people's mounts: not needed, and each would be copied for every environment."""

_HYBRID = "/sys/fs/cgroup/unified"
"""Where hosts with both versions of cgroups have the second one; crun refuses to run when it has controllers."""

_lock = threading.Lock()
_plain: dict[int, int] = {}  # by process, since a fork must not share it: the namespace that others are copied from


def apart(work: Callable[[], Result], *, needs: Path) -> Result:
    """Do `work` in a thread with mounts of its own; `needs` names a folder that it must see.

    The thread may mount, change its working folder and join cgroups: nobody else is concerned.
    """

    def body() -> Result:
        kernel.unshare(kernel.CLONE_FS)
        kernel.join_mounts(_plain_namespace(needs))
        kernel.unshare(kernel.CLONE_NEWNS)
        return work()

    return _in_thread(body)


def _in_thread(work: Callable[[], Result]) -> Result:
    """In a thread that ends with it; not by an executor, which refuses once the interpreter is on its way out."""
    outcome: Future[Result] = Future()

    def body() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again by whoever waits
            outcome.set_exception(error)

    thread = threading.Thread(target=body, name="environment-start")
    thread.start()
    thread.join()
    return outcome.result()


def _plain_namespace(needs: Path) -> int:
    with _lock:
        process = os.getpid()
        if process not in _plain:
            _plain.clear()
            _plain[process] = _in_thread(lambda: _made(needs.resolve()))
        return _plain[process]


def _made(needs: Path) -> int:
    kernel.unshare(kernel.CLONE_NEWNS)
    # Slave: what the host unmounts goes here, too, instead of being held by us; nothing of ours goes there.
    kernel.mount(None, "/", None, kernel.MS_SLAVE | kernel.MS_REC)
    for mounted in _superfluous(needs):
        with suppress(OSError):
            kernel.unmount(mounted)
    return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)


def _superfluous(needs: Path) -> Iterator[str]:
    for line in reversed(Path("/proc/thread-self/mountinfo").read_text().splitlines()):
        fields, _, rest = line.partition(" - ")
        where = fields.split()[4].encode().decode("unicode_escape")
        kind = rest.split()[0]
        if where == _HYBRID or (kind in _CROWD and where != "/" and not needs.is_relative_to(where)):
            yield where
