"""Connects to the helper in an engine's container: over a mounted socket, or over an exec.

Best first. Trying finds out, once per engine and process, which one works; the address of an engine does not tell.
"""

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
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import structlog
from docker.errors import APIError, DockerException
from docker.types import Mount
from requests import RequestException

from app.environments.prebuilt import HelperUnavailable, binary
from app.environments.session.client import SessionClient
from app.environments.session.connection import Connect, connect_to
from app.errors import EnvironmentFailed
from app.host import archives
from app.host.engine import Engine

log = structlog.get_logger()

ORPHAN_EXIT_S = 60
"""Seconds until a container whose worker has vanished (no connection left) ends itself."""
_READY_S = 20.0
_UNPROVEN_S = 8.0
_STALE_S = 3600.0
_PEER_CREDENTIALS = struct.Struct("iII")  # process, user, group
_MOUNTED_HELPER = "/dev/.megaflow-helper"  # /dev is the engine's own: no trace in the container's layer
_SOCKET_FOLDER = "/dev/.megaflow"
_COPIED_HELPER = "/.megaflow-helper"
_BRIDGED_SOCKET = "/dev/.megaflow-socket"
_FRAME = struct.Struct(">BxxxI")
_STDERR = 2


@dataclass(frozen=True, slots=True)
class ContainerTarget:
    """Container to connect to, and the defaults of every command in it."""

    container_id: str
    cwd: str
    user: str | None  # user of commands, as the image names it; None: root


class TransportUnusable(EnvironmentFailed):
    """This transport does not lead into this engine's containers."""


class MountedHelper:
    """Carries one container's commands, over all its starts, over a unix socket that this host and it share.

    Once connected, socket and folder are unlinked: nothing inside can reach or fill them, and nothing is left on this
    host when a process dies. Only a descriptor that leads to the socket remains, until `close`.
    """

    shares_files = True  # the engine sees files of this host, so tools can be mounted, too

    def __init__(self, engine: Engine, home: Path) -> None:
        """Raises: TransportUnusable."""
        self._engine = engine
        helper, sessions = binary_for(engine, home), home / "run" / "sessions"
        sessions.mkdir(mode=0o700, parents=True, exist_ok=True)
        sessions.chmod(0o700)  # folders below may be written to from inside
        for left in sessions.iterdir():  # of a worker that was killed between a start and its connection
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _STALE_S:
                    shutil.rmtree(left)
        self._folder = sessions / secrets.token_hex(12)
        self._listener: int | None = None
        self._place: int | None = None  # a descriptor of the socket's path
        self._lock = threading.Lock()
        self.first_process = [_MOUNTED_HELPER, "--listen", f"{_SOCKET_FOLDER}/s", "--orphan-exit", str(ORPHAN_EXIT_S)]
        self.mounts = [
            Mount(_MOUNTED_HELPER, str(helper), type="bind", read_only=True),
            Mount(_SOCKET_FOLDER, str(self._folder), type="bind"),
        ]
        self.before_start("")  # the engine needs the folder when it creates the container

    @staticmethod
    def blamed_for(error: APIError) -> bool:
        """Whether the engine refused a container because of what this transport needs of it."""
        return any(part in str(error) for part in ("bind source path", _MOUNTED_HELPER, _SOCKET_FOLDER))

    def before_start(self, container_id: str) -> None:
        """Makes the socket's folder. Call it once before each start."""
        self._folder.mkdir(exist_ok=True)
        self._folder.chmod(0o777)  # the engine may map root to another user

    def open(self, target: ContainerTarget, *, proven: bool) -> SessionClient:
        """Opens the session. Call it once after each start. Raises: TransportUnusable."""
        deadline = time.monotonic() + _ready_s(proven=proven)
        self._forget_socket()
        self._place = self._await_socket(target.container_id, deadline)
        shutil.rmtree(self._folder, ignore_errors=True)
        return _opened(self._connect, target, deadline)

    def init(self) -> int | None:
        """Returns the container's first process by this host's numbers, of the last start; None: not visible."""
        return self._listener

    def _connect(self) -> socket.socket:
        with self._lock:  # the descriptor's number must not be reused meanwhile
            if self._place is None:
                raise ConnectionRefusedError("this environment's socket was given up")
            place = os.dup(self._place)
        try:
            connection = connect_to(place)
        finally:
            os.close(place)
        if self._listener is None:
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
            self._listener = _PEER_CREDENTIALS.unpack(peer)[0] or None  # 0: in a namespace that is not visible here
        return connection

    def _await_socket(self, container_id: str, deadline: float) -> int:
        """Waits for the socket; returns a descriptor of the socket itself, not of a link's target."""
        next_look = time.monotonic() + 0.25
        while True:
            with suppress(FileNotFoundError):
                place = os.open(self._folder / "s", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
                about = os.fstat(place)
                if stat.S_ISSOCK(about.st_mode) and os.geteuid() in (0, about.st_uid):
                    return place
                os.close(place)
                raise TransportUnusable(f"the socket of environment {container_id[:12]} is not ours to connect to.")
            now = time.monotonic()
            if now > deadline or (now > next_look and not _running(self._engine, container_id)):
                raise TransportUnusable(f"no session helper came up in environment {container_id[:12]}.")
            next_look = now + 0.25 if now > next_look else next_look
            time.sleep(0.001)

    def _forget_socket(self) -> None:
        with self._lock:
            place, self._place, self._listener = self._place, None, None
        if place is not None:
            os.close(place)

    def close(self) -> None:
        self._forget_socket()
        shutil.rmtree(self._folder, ignore_errors=True)


class CopiedHelper:
    """Copies the helper in; each connection is an exec. The sweeper ends a container whose worker was killed."""

    shares_files = False

    def __init__(self, engine: Engine, home: Path) -> None:
        """Raises: TransportUnusable."""
        self._engine = engine
        self._helper = binary_for(engine, home)
        self.first_process = [_COPIED_HELPER, "--listen", _BRIDGED_SOCKET, "--orphan-exit", str(ORPHAN_EXIT_S)]
        self.mounts: list[Mount] = []

    @staticmethod
    def blamed_for(error: APIError) -> bool:
        return _COPIED_HELPER in str(error) or "exec format error" in str(error)

    def before_start(self, container_id: str) -> None:
        try:
            archive = archives.of_file(_COPIED_HELPER, self._helper.read_bytes(), mode=0o755)
            self._engine.api.put_archive(container_id, "/", archive)
        except APIError as error:
            if "read-only" not in str(error):
                raise
            raise EnvironmentFailed(
                "expected `fresh` or `recycled` on an engine that does not see this host's files, found"
                " `shared-readonly`: nothing can be copied into a read-only container; use an engine on this host"
            ) from error

    def open(self, target: ContainerTarget, *, proven: bool) -> SessionClient:
        argv = [_COPIED_HELPER, "--bridge", _BRIDGED_SOCKET]
        deadline = time.monotonic() + _ready_s(proven=proven)
        return _opened(lambda: exec_stream(self._engine, target.container_id, argv), target, deadline, bridged=True)

    def init(self) -> int | None:
        """Returns None, as nothing is visible: the engine may be elsewhere."""
        return None

    def close(self) -> None: ...


class ExecStream:
    """A running exec as a stream: stdout of the engine's frames, nothing read ahead, so `fileno` can be polled."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._head = b""
        self._source = 0
        self._left = 0  # of the frame under way
        self.setblocking, self.send = connection.setblocking, connection.send
        self.shutdown, self.fileno = connection.shutdown, connection.fileno

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receives like a socket: 0 at the end. Raises: OSError."""
        while True:
            if self._left and self._source != _STDERR:
                size = self._connection.recv_into(buffer[: self._left])
                self._left -= size
                return size
            piece = self._connection.recv(min(self._left, len(buffer)) or _FRAME.size - len(self._head))
            if not piece:
                return 0
            if self._left:
                self._left -= len(piece)
                continue
            self._head += piece
            if len(self._head) == _FRAME.size:
                self._source, self._left = _FRAME.unpack(self._head)
                self._head = b""

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def exec_stream(engine: Engine, container_id: str, argv: list[str], *, user: str = "0") -> ExecStream:
    """Starts `argv` inside and returns its stream. user: empty: the container's own. Raises: OSError."""
    try:
        exec_id = engine.api.exec_create(container_id, argv, stdin=True, user=user, workdir="/")["Id"]
        return ExecStream(engine.attach(exec_id))
    except (DockerException, RequestException) as error:
        raise ConnectionError(str(error)) from error


def binary_for(engine: Engine, home: Path) -> Path:
    """Raises: TransportUnusable."""
    try:
        return binary(home, engine.architecture)
    except HelperUnavailable as error:
        raise TransportUnusable(str(error)) from error


def _opened(connect: Connect, target: ContainerTarget, deadline: float, *, bridged: bool = False) -> SessionClient:
    label = target.container_id[:12]
    client = SessionClient(connect, label=label, cwd=target.cwd, user=target.user, bridged=bridged)
    try:
        client.wait_ready(max(0.1, deadline - time.monotonic()))
    except BaseException as error:
        client.close()
        if isinstance(error, EnvironmentFailed):
            raise TransportUnusable(str(error)) from error
        raise
    return client


def _running(engine: Engine, container_id: str) -> bool:
    try:
        return bool(engine.api.inspect_container(container_id)["State"]["Running"])
    except (DockerException, RequestException):
        return False


def _ready_s(*, proven: bool) -> float:
    """Returns how long a helper may take to answer: less while another transport may be the right one."""
    return _READY_S if proven else _UNPROVEN_S


Transport = MountedHelper | CopiedHelper
TransportKinds = tuple[type[Transport], ...]
TRANSPORTS: TransportKinds = (MountedHelper, CopiedHelper)

_proven: WeakKeyDictionary[Engine, type[Transport]] = WeakKeyDictionary()


def candidates(engine: Engine, kinds: TransportKinds) -> TransportKinds:
    """Returns the transport that is proven for the engine's containers alone, else all of `kinds`."""
    known = _proven.get(engine)
    return (known,) if known in kinds else kinds


def prove(engine: Engine, transport: type[Transport]) -> None:
    """Notes the transport that worked first. At worst, several threads find out the same."""
    if engine not in _proven:
        log.info("environment.transport_chosen", transport=transport.__name__, engine=engine.url)
        _proven[engine] = transport
