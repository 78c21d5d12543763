"""Lends one environment's shell to an agent framework that runs as a process of its own.

The framework connects to a Unix socket in a private folder, asks for one thing, gets its answer and hangs up. So it
needs neither Docker nor our packages, and any kind of environment serves any framework.

On the wire, both ways: four bytes of length, big-endian, then that many bytes of JSON. What may be asked is in
`bridge_requests`; docs/howto/agents.md tells adapters' authors.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import structlog

from app.agents.bridge_requests import LONGEST_FRAME_BYTES, answer
from app.errors import EnvironmentFailed
from app.models.shell import Shell

log = structlog.get_logger(__name__)

_LENGTH = struct.Struct(">I")
_REQUEST_TIMEOUT_S = 30.0  # for the request to arrive and the answer to be taken; the command has its own limit
_DRAIN_S = 2.0  # for commands that still run when the framework is gone
_LONGEST_ADDRESS_BYTES = 100  # the kernel takes 107
_PREFIX, _NAME = "megaflow-bridge-", "shell"


class Bridge:
    """A served shell. `fault` is the first error that was not an answer: the environment is then gone."""

    def __init__(self, shell: Shell, listener: socket.socket, address: Path, default_timeout_s: float) -> None:
        self.address = address
        self.fault: Exception | None = None
        self._shell = shell
        self._listener = listener
        self._default_timeout_s = default_timeout_s
        self._answering: set[threading.Thread] = set()
        self._acceptor = threading.Thread(target=self._accept, name="bridge", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Take no more commands, and wait shortly for the running ones."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor; a mere close would not
        self._acceptor.join()
        self._listener.close()
        patience_ends = time.monotonic() + _DRAIN_S
        for thread in list(self._answering):
            thread.join(max(0.0, patience_ends - time.monotonic()))
        if still_running := sum(thread.is_alive() for thread in list(self._answering)):
            # A shell cannot call a command back: it ends with its own time limit or with the environment.
            log.warning("bridge.commands_left", count=still_running)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            thread = threading.Thread(target=self._serve, args=(connection,), name="bridge-command", daemon=True)
            self._answering.add(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_REQUEST_TIMEOUT_S)
                _send(connection, self._answer(_receive(connection)))
        except (OSError, ValueError) as error:
            # The framework was killed while its command ran, or does not speak our language: its loss, not ours.
            log.info("bridge.connection_lost", error=str(error))
        finally:
            self._answering.discard(threading.current_thread())

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return answer(self._shell, request, default_timeout_s=self._default_timeout_s)
        except Exception as error:  # noqa: BLE001  a thread's edge: kept for the caller, who raises it
            self.fault = self.fault or error
            return {"fault": f"{type(error).__name__}: {error}"}


@contextmanager
def serve(shell: Shell, *, default_timeout_s: float = 60.0) -> Iterator[Bridge]:
    """Serve `shell` for the length of the block; only this user can reach it.

    A command that runs when the block ends is not stopped: the environment's owner ends it.

    Raises: EnvironmentFailed: no socket can be made here.
    """
    with ExitStack() as held:
        try:
            folder = _private_folder()
            held.callback(shutil.rmtree, folder, ignore_errors=True)
            address = folder / _NAME
            listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(address))
            listener.listen(64)
        except OSError as error:
            raise EnvironmentFailed(
                f"expected to make a socket for a framework; found {error}; make room, or set TMPDIR to another folder"
            ) from error
        bridge = Bridge(shell, listener, address, default_timeout_s)
        held.callback(bridge.close)
        yield bridge


def _private_folder() -> Path:
    prefix = f"{_PREFIX}{os.getpid()}-"
    folder = Path(tempfile.mkdtemp(prefix=prefix))  # mode 0700
    if len(bytes(folder)) > _LONGEST_ADDRESS_BYTES:
        folder.rmdir()
        try:
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
        except OSError as error:
            raise EnvironmentFailed(
                f"expected a short path for a socket; found {folder} too long and {error}; set TMPDIR to a short path"
            ) from error
    _remove_abandoned(folder.parent)
    return folder


def _remove_abandoned(place: Path) -> None:
    """Folders of bridges whose process was killed and cannot remove them: their names tell the process."""
    for folder in place.glob(f"{_PREFIX}*-*"):
        process = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and not Path("/proc", process).exists():
                shutil.rmtree(folder)


def _send(connection: socket.socket, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive(connection: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > LONGEST_FRAME_BYTES:
        raise ValueError(f"expected a request of at most {LONGEST_FRAME_BYTES} bytes; found {length}")
    try:
        body = json.loads(_exactly(connection, length))
    except RecursionError as error:
        raise ValueError("expected a JSON object; found one nested too deeply to be read") from error
    if not isinstance(body, dict):
        raise ValueError(f"expected a JSON object; found {type(body).__name__}")
    return body


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        if not (part := connection.recv(min(size - len(parts), 1 << 20))):
            raise ValueError(f"expected {size} bytes; the connection ended after {len(parts)}")
        parts += part
    return bytes(parts)
