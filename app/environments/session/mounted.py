"""The helper and a folder for its socket are mounted: for an engine that sees our files."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from docker.errors import APIError
from docker.types import Mount

from app.environments.session.transport import (
    ORPHAN_EXIT_S,
    Entrance,
    Inside,
    Session,
    WayClosed,
    binary_for,
    opened,
    patience_s,
    running,
)
from app.host.engine import Engine

_STALE_S = 3600.0
_WHO = struct.Struct("iII")  # process, user, group
_HELPER = "/dev/.megaflow-helper"  # /dev is the engine's own: no trace in the container's layer
_SOCKETS = "/dev/.megaflow"


class MountedHelper:
    """Commands go over a unix socket that this host and the container share.

    As soon as it is connected, socket and folder are unlinked: nobody inside can reach or fill them, and nothing is
    left on this host whenever whoever dies. What remains is a descriptor that leads to the socket.
    """

    def __init__(self, engine: Engine, home: Path) -> None:
        self._engine = engine
        self._binary = binary_for(engine, home)
        self._folder = home / "run" / "sessions"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)  # what is below may be written to from inside
        for left in self._folder.iterdir():  # by a worker that was killed between a start and its connection
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _STALE_S:
                    shutil.rmtree(left)

    def entrance(self) -> Entrance:
        made = MountedEntrance(self._engine, self._binary, self._folder / secrets.token_hex(12))
        made.before_start("")  # the engine looks for the folder when the container is made
        return made

    def blamed_for(self, error: APIError) -> bool:
        said = str(error)
        return "bind source path" in said or _HELPER in said or _SOCKETS in said


class MountedEntrance:
    shares_files = True

    def __init__(self, engine: Engine, helper: Path, folder: Path) -> None:
        self._engine = engine
        self._helper = helper
        self._folder = folder
        self._held: HeldSocket | None = None
        self.first_process = [_HELPER, "--listen", f"{_SOCKETS}/s", "--orphan-exit", str(ORPHAN_EXIT_S)]
        self.mounts = [
            Mount(_HELPER, str(helper), type="bind", read_only=True),
            Mount(_SOCKETS, str(folder), type="bind"),
        ]

    def before_start(self, container_id: str) -> None:
        self._folder.mkdir(exist_ok=True)
        self._folder.chmod(0o777)  # the engine may map root to another user

    def open(self, inside: Inside, *, proven: bool) -> Session:
        deadline = time.monotonic() + patience_s(proven=proven)
        self._release()
        self._held = HeldSocket(self._await_socket(inside.container_id, deadline))
        self._clear()
        return opened(self._connect, inside, deadline)

    def init(self) -> int | None:
        return None if self._held is None else self._held.listener

    def _connect(self) -> socket.socket:
        if self._held is None:
            raise ConnectionRefusedError("this environment's socket was given up")
        return self._held.connect()

    def _await_socket(self, container_id: str, deadline: float) -> int:
        """A descriptor of the socket, itself, not of what a link may lead to."""
        next_look = time.monotonic() + 0.25
        while True:
            with suppress(FileNotFoundError):
                place = os.open(self._folder / "s", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
                about = os.fstat(place)
                if stat.S_ISSOCK(about.st_mode) and os.geteuid() in (0, about.st_uid):
                    return place
                os.close(place)
                raise WayClosed(f"the socket of environment {container_id[:12]} is not ours to connect to.")
            now = time.monotonic()
            if now > deadline or (now > next_look and not running(self._engine, container_id)):
                raise WayClosed(f"no session helper came up in environment {container_id[:12]}.")
            next_look = now + 0.25 if now > next_look else next_look
            time.sleep(0.001)

    def _clear(self) -> None:
        with suppress(OSError):
            shutil.rmtree(self._folder)

    def _release(self) -> None:
        if self._held is not None:
            self._held.close()

    def close(self) -> None:
        self._release()
        self._clear()


class HeldSocket:
    """A listening socket without a name, by a descriptor of its place. Safe for many threads.

    listener: who has listened there, by this host's numbers; known once it was connected to.
    """

    def __init__(self, place: int) -> None:
        self.listener: int | None = None
        self._place = place
        self._lock = threading.Lock()
        self._closed = False

    def connect(self) -> socket.socket:
        """Raises: OSError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with self._lock:  # the descriptor's number must not become another file's meanwhile
                if self._closed:
                    raise ConnectionRefusedError("this environment's socket was given up")
                connection.setblocking(False)  # a queue that is full is an error, too
                connection.connect(f"/proc/self/fd/{self._place}")
            if self.listener is None:
                who = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _WHO.size)
                self.listener = _WHO.unpack(who)[0] or None  # 0: of no namespace that is seen from here
        except OSError:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._place)
