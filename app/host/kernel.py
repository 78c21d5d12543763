"""Wraps system calls that Python 3.11 lacks: namespaces, mounts, path look-ups that stay inside a folder.

All raise OSError with the kernel's errno. They release the interpreter's lock while they run.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import posixpath
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")

CLONE_FS = 0x200
CLONE_NEWNS = 0x20000
CLONE_NEWNET = 0x4000_0000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_REC = 16384
MS_SLAVE = 1 << 19
_MNT_DETACH = 2

_OPENAT2 = 437  # the same on every architecture: new calls have common numbers since 2019
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10
_TRIES = 256

_TO_EMPTY_PATH = 0x40
_READ_ONLY = 0x1 | 0x2 | 0x4  # and without set-uid programs and devices
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_CLONE_TREE = 1
_EMPTY_PATH, _FROM_EMPTY_PATH = 0x1000, 4
_ATTRIBUTE_IDMAP = 0x0010_0000
_HERE = -100

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "users")]


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def machine() -> str:
    """Returns this machine's architecture as in image manifests: `amd64`, `arm64`."""
    name = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(name, name)


def unshare(flags: int) -> None:
    """Separates only the calling thread from what it shares with the process's other threads."""
    _check(_libc.unshare(flags), "unshare")


def join_mounts(namespace: int) -> None:
    """Moves the calling thread to a mount namespace (a file descriptor). Call `unshare(CLONE_FS)` first."""
    _check(_libc.setns(namespace, CLONE_NEWNS), "setns")


def join_network(namespace: int) -> None:
    """Moves the calling thread to a network namespace (a file descriptor)."""
    _check(_libc.setns(namespace, CLONE_NEWNET), "setns")


def in_thread(work: Callable[[], Result], *, name: str) -> Result:
    """Runs `work` in a new thread; its namespaces end with it. No executor is used: executors refuse work at exit."""
    outcome: Future[Result] = Future()

    def body() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again by the caller
            outcome.set_exception(error)

    thread = threading.Thread(target=body, name=name)
    thread.start()
    thread.join()
    return outcome.result()


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Calls mount(2). The kernel limits `options` to one page."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    _check(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), target)


def mount_for(users: int, folder: str, target: str) -> None:
    """Mounts `folder` at `target`, its owners mapped by a user namespace (a file descriptor). Needs Linux 5.12."""
    tree = _call(_OPEN_TREE, _HERE, os.fsencode(folder), _CLONE_TREE | os.O_CLOEXEC, about=folder)
    try:
        _restrict(tree, _MountAttributes(_ATTRIBUTE_IDMAP, 0, 0, users), folder)
        _call(_MOVE_MOUNT, tree, b"", _HERE, os.fsencode(target), _FROM_EMPTY_PATH, about=target)
    finally:
        os.close(tree)


def show(folder: str, place: int, users: int) -> None:
    """Mounts `folder` read-only at `place` (a file descriptor), without set-uid programs and devices.

    users: user namespace (a file descriptor) that maps the owners if the file system supports it; else processes inside
    see this host's numbers.
    """
    tree = _call(_OPEN_TREE, _HERE, os.fsencode(folder), _CLONE_TREE | os.O_CLOEXEC, about=folder)
    try:
        _restrict(tree, _MountAttributes(_READ_ONLY, 0, 0, 0), folder)
        with suppress(OSError):
            _restrict(tree, _MountAttributes(_ATTRIBUTE_IDMAP, 0, 0, users), folder)
        _call(_MOVE_MOUNT, tree, b"", place, b"", _FROM_EMPTY_PATH | _TO_EMPTY_PATH, about=folder)
    finally:
        os.close(tree)


def _restrict(tree: int, how: _MountAttributes, about: str) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(how))
    _call(_MOUNT_SETATTR, tree, b"", _EMPTY_PATH, ctypes.byref(how), size, about=about)


def _call(number: int, *arguments: Any, about: str) -> int:
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), about)


def unmount(target: str) -> None:
    """Hides a mount at once; the kernel ends it after its last use."""
    _check(_libc.umount2(os.fsencode(target), _MNT_DETACH), target)


def open_inside(root: int, path: str, flags: int) -> int:
    """Opens `path` as if the folder `root` (a file descriptor) were /: neither links nor `..` lead out of it."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    size = ctypes.c_size_t(ctypes.sizeof(how))
    for _ in range(_TRIES):  # with `..`, a concurrent move or mount makes the kernel return EAGAIN
        with suppress(BlockingIOError):
            return _call(_OPENAT2, root, os.fsencode(path or "."), ctypes.byref(how), size, about=path)
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)


def make_folders_inside(root: int, path: str, *, owner: int = 0, mode: int = 0o755, links: int = 40) -> None:
    """Creates the folder `path` and its parents below `root`, for `owner`; existing folders stay unchanged.

    Links are followed inside `root`, also to missing targets; at most `links` of these.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    for depth in range(1, len(parts) + 1):
        name = "/".join(parts[:depth])
        try:
            os.close(open_inside(root, name, os.O_PATH | os.O_DIRECTORY))
        except FileNotFoundError:
            target = _make_folder_inside(root, "/".join(parts[: depth - 1]), parts[depth - 1], owner, mode)
            if target is not None:
                if not links:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None
                make_folders_inside(root, target, owner=owner, mode=mode, links=links - 1)


def _make_folder_inside(root: int, folder: str, name: str, owner: int, mode: int) -> str | None:
    """Creates one folder; if a dangling link is in its place, returns the link's target."""
    parent = open_inside(root, folder, os.O_PATH | os.O_DIRECTORY)
    try:
        os.mkdir(name, mode, dir_fd=parent)
        os.chown(name, owner, owner, dir_fd=parent, follow_symlinks=False)
        return None
    except FileExistsError:
        return posixpath.join("/", folder, os.readlink(name, dir_fd=parent))
    finally:
        os.close(parent)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return int(result)
