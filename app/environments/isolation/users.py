"""Assigns each environment a range of user ids that own nothing on the host.

Files keep their owners on the disk: mounts for an environment translate ids in the same way, so that layers and
snapshots are the same for all, whichever ids an environment has. Each environment has its own ids, unless one process
has more than `_MOST` environments at a time.
"""

from __future__ import annotations

import errno
import os
import random
import select
import subprocess
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

SIZE = 1 << 16
_FIRST, _LAST = 0x7000_0000, 0x7FFD_0000
"""User ids that no distribution uses: below the sign bit, above those of containers."""
_MOST = 64
"""Maximum ranges of a process. Each is a namespace that is kept open; making one takes a millisecond."""
_READY_S = 5.0


@dataclass(frozen=True)
class Users:
    """The ids `first` to `first + SIZE` of this host, and the user namespace that translates for mounts.

    On a mount they stand for the disk's owners 0 to SIZE. SIZE stands for this host's root, which prepares the mount.
    Higher ids stand for themselves: no user inside can be one of these, and copies of such files keep their owner.
    """

    first: int
    namespace: int  # a file descriptor

    @classmethod
    def fresh(cls, helper: Path) -> Users:
        """Chooses ids at random. helper: the session's. Raises: OSError: no such namespace here, or no more of them."""
        first = random.randrange(_FIRST, _LAST, SIZE)
        above = SIZE + 1
        return cls(first, _namespace(helper, f"0 {first} {SIZE}\n{SIZE} 0 1\n{above} {above} {_FIRST - above}\n"))


def _namespace(helper: Path, translation: str) -> int:
    """Makes a user namespace without processes, by a program: a process with threads may not."""
    with subprocess.Popen(  # noqa: S603 (ours)
        [str(helper), "--apart"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    ) as child:
        try:
            assert child.stdout is not None
            ready = select.poll()
            ready.register(child.stdout, select.POLLIN)
            if not ready.poll(_READY_S * 1000):
                raise OSError(errno.ETIMEDOUT, "a user namespace was not made in time")
            if not child.stdout.read(1):
                raise OSError(errno.EPERM, "a user namespace could not be made here")
            place = f"/proc/{child.pid}"
            for name in ("uid_map", "gid_map"):
                Path(place, name).write_text(translation)
            return os.open(f"{place}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            child.kill()


class UserPool:
    """Id ranges that this process gives to environments: returned ones first, then fresh ones, then the oldest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: deque[Users] = deque()
        self._used: deque[Users] = deque()
        self._made = 0

    def acquire(self, helper: Path) -> Users:
        """Returns ids for an environment, see `Users.fresh`. Raises: OSError."""
        with self._lock:
            if not self._free and self._made >= _MOST and self._used:
                shared = self._used.popleft()
                self._used += (shared, shared)  # two environments use it now
                return shared
            if self._free:
                users = self._free.pop()
                self._used.append(users)
                return users
            self._made += 1
        try:
            users = Users.fresh(helper)
        except BaseException:
            with self._lock:
                self._made -= 1
            raise
        with self._lock:
            self._used.append(users)
        return users

    def release(self, users: Users) -> None:
        """Takes ids back. Call it when no process with these ids is left."""
        with self._lock:
            if users in self._used:  # else it was returned before
                self._used.remove(users)
                if users not in self._used:  # else another environment still uses them
                    self._free.append(users)


_lock = threading.Lock()
_pools: dict[int, UserPool] = {}  # by process: a fork's environments must have other numbers


def pool() -> UserPool:
    """Returns the pool of this process."""
    with _lock:
        return _pools.setdefault(os.getpid(), UserPool())
