"""Lends one environment's shell to an agent framework that runs as its own process.

The framework connects to a Unix socket in a private folder, sends one request, gets its answer and disconnects. So it
needs neither Docker nor our packages, and any kind of environment serves any framework.

In both directions: four bytes of length, big-endian, then that many bytes of JSON (docs/howto/agents.md). A request is
an object with one of the keys `hello`, `command`, `put` and `get`; its other keys are arguments:

    {"hello": "megaflow-bridge/1"}                            -> {"hello": "megaflow-bridge/1", "longest_frame": BYTES}
    {"command": TEXT, "cwd", "env", "timeout_s", "stdin"}     -> {"exit_code", "output", "timed_out", "truncated",
                                                                  "duration_s", "out_of_memory", "logs"}; exit_code
                                                                  is null when it was killed for its time
    {"put": PATH, "content": BASE64, "mode": 420}             -> {"put": PATH}
    {"get": PATH}                                             -> {"content": BASE64}

`output` is stdout, then stderr; `stdin` is base64. In an answer, `error` means that this one request failed; `fault`
means that the environment is gone, also for every later request.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import structlog

from app.errors import DiskFull, EnvironmentFailed, SpecInvalid
from app.models.shell import CommandResult, Shell

PROTOCOL = "megaflow-bridge/1"
LONGEST_FRAME_BYTES = 64 << 20
_LONGEST_FILE_BYTES = LONGEST_FRAME_BYTES // 4 * 3 - (1 << 10)  # as base64, with room for the other keys
_LONGEST_TIMEOUT_S = 86_400.0

Answer = dict[str, Any]


class BridgeRefusal(Exception):
    """Error of one request that cannot be answered; the environment still works."""


def answer(shell: Shell, request: Mapping[str, Any], *, default_timeout_s: float) -> Answer:
    """Raises: errors of the shell when the environment is gone."""
    try:
        for key, ask in _REQUESTS.items():
            if key in request:
                return ask(shell, request, default_timeout_s)
        raise BridgeRefusal(
            f"expected one of the keys {', '.join(_REQUESTS)}; found {', '.join(map(repr, request)) or 'none'}"
        )
    except (BridgeRefusal, FileNotFoundError, ValueError, DiskFull, SpecInvalid) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _hello(shell: Shell, request: Mapping[str, Any], _: float) -> Answer:
    if request["hello"] != PROTOCOL:
        raise BridgeRefusal(f"expected the protocol {PROTOCOL}; found {request['hello']!r}")
    return {"hello": PROTOCOL, "longest_frame": LONGEST_FRAME_BYTES}


def _command(shell: Shell, request: Mapping[str, Any], default_timeout_s: float) -> Answer:
    result = shell.run(
        _text(request, "command"),
        cwd=_text(request, "cwd") if request.get("cwd") is not None else None,
        env=_variables(request),
        timeout_s=_timeout(request, default_timeout_s),
        stdin=_bytes(request, "stdin") if request.get("stdin") is not None else None,
    )
    return _wire(result)


def _put(shell: Shell, request: Mapping[str, Any], _: float) -> Answer:
    path, mode = _path(request, "put"), request.get("mode", 0o644)
    if not isinstance(mode, int) or not 0 <= mode <= 0o7777:
        raise BridgeRefusal(f"expected the key 'mode', a number from 0 to 4095 (octal 7777); found {mode!r}")
    shell.put(path, _bytes(request, "content"), mode=mode)
    return {"put": path}


def _get(shell: Shell, request: Mapping[str, Any], _: float) -> Answer:
    content = shell.get(_path(request, "get"))
    if len(content) > _LONGEST_FILE_BYTES:
        raise BridgeRefusal(f"expected a file of at most {_LONGEST_FILE_BYTES} bytes; found {len(content)}")
    return {"content": base64.b64encode(content).decode()}


_REQUESTS: dict[str, Callable[[Shell, Mapping[str, Any], float], Answer]] = {
    "hello": _hello,
    "command": _command,
    "put": _put,
    "get": _get,
}


def _wire(result: CommandResult) -> Answer:
    return {
        "exit_code": result.exit_code,
        "output": result.text(),
        "timed_out": result.timed_out,
        "truncated": result.truncated,
        "duration_s": result.duration_s,
        "out_of_memory": result.out_of_memory,
        "logs": list(result.logs),
    }


def _text(request: Mapping[str, Any], key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str) or "\0" in value:
        raise BridgeRefusal(f"expected the key {key!r}, a text without NUL; found {value!r:.80}")
    return value


def _path(request: Mapping[str, Any], key: str) -> str:
    path = _text(request, key)
    if not path.startswith("/") or path.rstrip("/") == "":
        raise BridgeRefusal(f"expected the key {key!r}, the absolute path of a file; found {path!r:.200}")
    return path


def _bytes(request: Mapping[str, Any], key: str) -> bytes:
    try:
        return base64.b64decode(_text(request, key), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BridgeRefusal(f"expected the key {key!r}, base64; found {error}") from error


def _variables(request: Mapping[str, Any]) -> dict[str, str]:
    env = request.get("env") or {}
    whole = isinstance(env, dict) and all(isinstance(part, str) and "\0" not in part for part in env.values())
    if not whole or not all(name and "=" not in name and "\0" not in name for name in env):
        raise BridgeRefusal(f"expected the key 'env', an object of texts; found {env!r:.80}")
    return dict(env)


def _timeout(request: Mapping[str, Any], default_s: float) -> float:
    value = request.get("timeout_s")
    if value is None:
        return default_s
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise BridgeRefusal(f"expected the key 'timeout_s', seconds above 0; found {value!r:.80}")
    return min(float(value), _LONGEST_TIMEOUT_S)


log = structlog.get_logger(__name__)

_LENGTH = struct.Struct(">I")
_REQUEST_TIMEOUT_S = 30.0  # for reading the request and sending the answer; the command has its own limit
_DRAIN_S = 2.0  # for commands that still run when the framework is gone
_LONGEST_ADDRESS_BYTES = 100  # the kernel allows 107
_PREFIX, _NAME = "megaflow-bridge-", "shell"


class Bridge:
    """A served shell. `fault` is the first error that could not be sent as an answer: the environment is then gone."""

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
        """Accepts no more commands, and waits shortly for the running ones."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor; `close` alone would not
        self._acceptor.join()
        self._listener.close()
        patience_ends = time.monotonic() + _DRAIN_S
        for thread in list(self._answering):
            thread.join(max(0.0, patience_ends - time.monotonic()))
        if still_running := sum(thread.is_alive() for thread in list(self._answering)):
            # A shell cannot cancel a command: it ends with its own time limit or with the environment.
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
            # The framework was killed while its command ran, or uses another protocol: its fault, not ours.
            log.info("bridge.connection_lost", error=str(error))
        finally:
            self._answering.discard(threading.current_thread())

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return answer(self._shell, request, default_timeout_s=self._default_timeout_s)
        except Exception as error:  # noqa: BLE001  end of a thread: stored for the caller, who raises it
            self.fault = self.fault or error
            return {"fault": f"{type(error).__name__}: {error}"}


@contextmanager
def serve(shell: Shell, *, default_timeout_s: float = 60.0) -> Iterator[Bridge]:
    """Serves `shell` during the block; only this user can reach it.

    A command that still runs when the block ends is not stopped: the environment's owner ends it.

    Raises: EnvironmentFailed: no socket can be created here.
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
    """Removes folders left by bridges whose process was killed: their names contain the process id."""
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
