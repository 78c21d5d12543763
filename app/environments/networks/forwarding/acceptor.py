"""The one thread of a process that waits for connections to all forwarded ports, and for the end of environments.

It lives while there is something to wait for.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable, Mapping

_REST_S = 0.2
"""How long a port is left alone that could not be served for want of descriptors."""

Ready = Callable[[int], None]


class Acceptor:
    """Calls `Ready` with the number of a descriptor that can be read, again and again until it has been."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[int, Ready] = {}
        self._resting: set[int] = set()
        self._epoll: select.epoll | None = None  # while the thread lives
        self._wake = -1

    def watch(self, found: Mapping[int, Ready]) -> None:
        with self._lock:
            epoll = self._epoll or self._start()
            self._ready.update(found)
            for number in found:
                epoll.register(number, select.EPOLLIN)

    def forget(self, numbers: Iterable[int]) -> None:
        """Before they are closed."""
        with self._lock:
            for number in numbers:
                self._ready.pop(number, None)
                self._resting.discard(number)
                self._unregister(number)
            if not self._ready and self._epoll is not None:
                os.eventfd_write(self._wake, 1)

    def pause(self, numbers: Iterable[int]) -> None:
        """Leave them alone until `resume`."""
        with self._lock:
            for number in numbers:
                self._resting.discard(number)
                self._unregister(number)

    def resume(self, numbers: Iterable[int]) -> None:
        with self._lock:
            for number in numbers:
                self._register(number)

    def rest(self, number: int) -> None:
        """Leave it alone for a moment."""
        with self._lock:
            self._unregister(number)
            self._resting.add(number)

    def _register(self, number: int) -> None:
        if self._epoll is not None and number in self._ready:
            try:
                self._epoll.register(number, select.EPOLLIN)
            except FileExistsError:
                return

    def _unregister(self, number: int) -> None:
        if self._epoll is not None:
            try:
                self._epoll.unregister(number)
            except FileNotFoundError:  # paused already
                return

    def _start(self) -> select.epoll:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        arguments = (self._epoll, self._wake)
        threading.Thread(target=self._loop, args=arguments, name="forward-accept", daemon=True).start()
        return self._epoll

    def _loop(self, epoll: select.epoll, wake: int) -> None:
        while True:
            found = epoll.poll(_REST_S if self._resting else None)
            with self._lock:
                if not self._ready:
                    self._epoll = None
                    epoll.close()
                    os.close(wake)
                    return
                resting, self._resting = self._resting, set()
                for number in resting:
                    self._register(number)
                due = [(self._ready.get(number), number) for number, _ in found]
                if any(number == wake for number, _ in found):
                    os.eventfd_read(wake)
            for ready, number in due:
                if ready is not None:  # closed meanwhile, or the wake
                    ready(number)


_lock = threading.Lock()
_acceptors: dict[int, Acceptor] = {}  # by process: a fork has the memory of a thread that it does not have


def acceptor() -> Acceptor:
    """This process's."""
    with _lock:
        return _acceptors.setdefault(os.getpid(), Acceptor())
