"""Into the network of an environment and out again: one thread goes, what it opened there stays open out here.

Nothing runs inside and nothing inside sees a process or a file of ours: there is only a port that answers.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from app.errors import EnvironmentFailed

Result = TypeVar("Result")

_CLONE_NEWNET = 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
_libc = ctypes.CDLL(None, use_errno=True)


class Forbidden(EnvironmentFailed):
    """This worker may not enter networks."""


class Process:
    """A process that is certainly the one that was meant, and its network. Whoever has it closes it."""

    def __init__(self, handle: int, network: int) -> None:
        self.handle = handle  # a pidfd: readable once it has ended
        self.network = network

    def detach(self) -> int:
        """The handle, which is the caller's from now on; the rest is closed."""
        os.close(self.network)
        return self.handle

    def close(self) -> None:
        os.close(self.detach())


def process(pid: int, lives: Callable[[], bool]) -> Process:
    """The process `pid`, if it is alive and `lives` says so while its number cannot become another's.

    Raises: EnvironmentFailed: it is gone, not to be seen from here, or has the network of this worker.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        raise _gone(pid) from error
    try:
        if not lives():
            raise _gone(pid)
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _ended(handle):  # then it may be another's network that was opened
                raise _gone(pid)
            if _is_ours(network):
                raise EnvironmentFailed(
                    f"expected process {pid} to have a network of its own, found this worker's: a port there would be"
                    " open to this whole host; is the number that of another process namespace?"
                )
        except BaseException:
            os.close(network)
            raise
    except BaseException as error:
        os.close(handle)
        if isinstance(error, PermissionError):
            raise _forbidden(error) from error
        if isinstance(error, OSError):
            raise _gone(pid) from error
        raise
    return Process(handle, network)


def inside(process: Process, work: Callable[[], Result]) -> Result:
    """Do `work` in a thread that has the network of `process`; its loopback is up by then.

    Raises: EnvironmentFailed: this worker may not enter it. And what `work` raises.
    """

    def body() -> Result:
        if _libc.setns(process.network, _CLONE_NEWNET) < 0:
            number = ctypes.get_errno()
            raise _forbidden(OSError(number, os.strerror(number)))
        _bring_loopback_up()
        return work()

    outcome: Future[Result] = Future()

    def settle() -> None:
        try:
            outcome.set_result(body())
        except BaseException as error:  # noqa: BLE001  raised again by whoever waits
            outcome.set_exception(error)

    thread = threading.Thread(target=settle, name="forward-enter")  # gone afterwards: no other work gets this network
    thread.start()
    thread.join()
    return outcome.result()


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        found = fcntl.ioctl(asking, _GET_FLAGS, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack("16xH14x", found)
        if not flags & _UP:
            fcntl.ioctl(asking, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def _is_ours(network: int) -> bool:
    found, ours = os.fstat(network), os.stat("/proc/self/ns/net")
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)


def _ended(handle: int) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(0))


def _gone(pid: int) -> EnvironmentFailed:
    return EnvironmentFailed(
        f"expected process {pid} to be the environment's first one, found that it has ended, or is another's or not to"
        " be seen from here; a worker must see the processes of its engine's host (its process namespace)."
    )


def _forbidden(error: OSError) -> Forbidden:
    return Forbidden(
        f"expected to be allowed into the environment's network, found: {error.strerror}; that takes root on"
        " the host of the environments."
    )
