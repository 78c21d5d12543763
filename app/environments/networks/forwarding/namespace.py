"""Opens sockets inside an environment's network namespace from a thread of this process.

Nothing runs inside, and nothing inside sees a process or a file of the worker: there is only an open port.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from app.errors import EnvironmentFailed
from app.host import kernel

Result = TypeVar("Result")

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP


class NetworkForbidden(EnvironmentFailed):
    """This worker may not enter networks."""


@dataclass(frozen=True)
class PinnedProcess:
    """A process whose number cannot be reused, and its network: descriptors that the holder closes."""

    handle: int  # a pidfd: readable once it has ended
    network: int

    def detach(self) -> int:
        """Returns the handle, which the caller owns from now on; closes the rest."""
        os.close(self.network)
        return self.handle

    def close(self) -> None:
        os.close(self.detach())


def pin(pid: int, lives: Callable[[], bool]) -> PinnedProcess:
    """Pins the process `pid`, if it is alive and `lives` confirms it while its number cannot be reused.

    Raises: EnvironmentFailed: it has ended, is not visible from here, or has the network of this worker.
    """
    with ExitStack() as stack:
        try:
            handle = os.pidfd_open(pid)
            stack.callback(os.close, handle)
            if not lives():
                raise _gone(pid)
            network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, network)
        except PermissionError as error:
            raise _forbidden(error) from error
        except OSError as error:
            raise _gone(pid) from error
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        if poll.poll(0):  # it has ended: the network that was opened may be another process's
            raise _gone(pid)
        if os.path.samestat(os.fstat(network), os.stat("/proc/self/ns/net")):
            raise EnvironmentFailed(
                f"expected process {pid} to have a network of its own, found this worker's: a port there would be"
                " open to this whole host; is the number that of another process namespace?"
            )
        stack.pop_all()
    return PinnedProcess(handle, network)


def inside(process: PinnedProcess, work: Callable[[], Result]) -> Result:
    """Runs `work` in a thread with the network of `process`, loopback up. Raises: EnvironmentFailed; as `work`."""

    def body() -> Result:
        try:
            kernel.join_network(process.network)
        except OSError as error:
            raise _forbidden(error) from error
        _bring_loopback_up()
        return work()

    return kernel.in_thread(body, name="forward-enter")


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        answer = fcntl.ioctl(connection, _GET_FLAGS, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack("16xH14x", answer)
        if not flags & _UP:
            fcntl.ioctl(connection, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def _gone(pid: int) -> EnvironmentFailed:
    return EnvironmentFailed(
        f"expected process {pid} to be the environment's first one, found that it has ended, or is another's or not to"
        " be seen from here; a worker must see the processes of its engine's host (its process namespace)."
    )


def _forbidden(error: OSError) -> NetworkForbidden:
    return NetworkForbidden(
        f"expected to be allowed into the environment's network, found: {error.strerror}; that takes root on"
        " the host of the environments."
    )
