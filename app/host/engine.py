"""Connects to the container engine: one client per process, with timeouts, and errors in our classes."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from docker import APIClient
from docker.errors import APIError, DockerException, NotFound
from docker.transport import UnixHTTPAdapter
from docker.transport.unixconn import UnixHTTPConnection, UnixHTTPConnectionPool
from docker.utils import kwargs_from_env

from app.errors import DiskFull, EngineUnavailable, EnvironmentFailed, StationError
from app.host.disk import no_space
from app.settings import Settings

_CALL_S = 120
"""Timeout of one call: a busy engine may need long for a start."""
_REMOVAL_S = 10.0
_CONNECTIONS = 256
"""Connections kept open when unused; more are opened when needed."""
_STREAMS = ("/exec/", "/attach")
_BLANK = b"\r\n\r\n"
_TRY = "start the engine (`megaflow up` does where it may), or point MEGAFLOW_DOCKER_URL at one"


ROLE = "megaflow.role"
"""Label that distinguishes environments and their networks from other MegaFlow objects (instances, services)."""


class _Connection(UnixHTTPConnection):
    """Connection that closes its socket when connecting fails; the client library leaves it to garbage collection."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(self.unix_socket)
        except BaseException:
            self.close()
            raise


class _Connections(UnixHTTPConnectionPool):
    def _new_conn(self) -> Any:
        return _Connection(self.base_url, self.socket_path, _CALL_S)


class _OnePool(UnixHTTPAdapter):
    """Adapter that reuses connections for all calls, unlike the client library's; each stream has its own."""

    def get_connection(self, url: str | bytes, proxies: Any = None) -> Any:
        key = str(url) if any(word in str(url) for word in _STREAMS) else "calls"
        with self.pools.lock:
            if (pool := self.pools.get(key)) is None:
                pool = self.pools[key] = _Connections(key, self.socket_path, _CALL_S, self.max_pool_size)
        return pool


class Engine:
    """Connection to one engine; safe to share between threads."""

    def __init__(self, url: str | None) -> None:
        self.url = _url(url)
        self._info: dict[str, Any] | None = None
        self._users: dict[str, str | None] = {}  # by image
        if urlsplit(self.url).scheme not in ("unix", "tcp", "http", "http+unix"):
            raise EngineUnavailable(f"expected an engine at unix://… or tcp://…, found {self.url}; {_TRY}.")
        try:
            self._connect().close()  # first: the client library does not close the socket after a failure
            self.api = APIClient(base_url=self.url, version="auto", timeout=_CALL_S, num_pools=64, max_pool_size=64)
        except (DockerException, OSError) as error:
            raise EngineUnavailable(f"no container engine answers at {self.url} ({_reason(error)}); {_TRY}.") from error
        if self.is_local:
            self.api.trust_env = False  # a local socket needs no proxy: no look-up at each call
            self.api.mount("http+docker://", _OnePool(urlsplit(self.url).path, _CALL_S, max_pool_size=_CONNECTIONS))

    @property
    def is_local(self) -> bool:
        """Whether it is reached over a Unix socket of this host."""
        return urlsplit(self.url).scheme in ("unix", "http+unix")

    @property
    def cpus(self) -> int:
        """Number of the engine's CPUs; a container's limit may not exceed it."""
        return int(self.about["NCPU"])

    @property
    def architecture(self) -> str:
        """Kernel's name of the architecture, e.g. `x86_64`."""
        return str(self.about["Architecture"])

    def folder_of(self, container_id: str) -> Path:
        """Returns the engine's folder of files for a container. It may not be on this host."""
        return Path(str(self.about["DockerRootDir"])) / "containers" / container_id

    @property
    def about(self) -> dict[str, Any]:
        """Engine's description of itself, read once. Raises: EngineUnavailable, EnvironmentFailed."""
        if self._info is None:
            with self.named("ask what it is", EnvironmentFailed):
                self._info = self.api.info()
        return self._info

    def user_of(self, image_id: str) -> str | None:
        """Returns the user of an image's processes; None: root. Raises: APIError."""
        if image_id not in self._users:
            config = self.api.inspect_image(image_id).get("Config") or {}  # type: ignore[no-untyped-call]
            self._users[image_id] = config.get("User") or None
        return self._users[image_id]

    @contextmanager
    def named(self, doing: str, otherwise: type[StationError]) -> Iterator[None]:
        """Converts the client's errors to ours in the block. Raises: DiskFull, EngineUnavailable, else `otherwise`."""
        try:
            yield
        except (APIError, DockerException) as error:
            if isinstance(error, APIError) and error.is_server_error() and not self.listens():
                raise EngineUnavailable(
                    f"{doing}: the engine at {self.url} ends ({_reason(error)}); {_TRY}."
                ) from error
            raise self._as_ours(doing, _reason(error), otherwise) from error
        except requests.Timeout as error:
            raise EngineUnavailable(f"{doing}: no answer from {self.url} within {_CALL_S} s; {_TRY}.") from error
        except requests.RequestException as error:
            raise EngineUnavailable(
                f"{doing}: the engine at {self.url} went away ({_reason(error)}); {_TRY}."
            ) from error

    def _as_ours(self, doing: str, reason: str, otherwise: type[StationError]) -> StationError:
        if no_space(reason):
            return DiskFull(f"{doing}: the engine's disk is full ({reason}); free some with `docker system prune`.")
        return otherwise(f"{doing}: the engine says: {reason}")

    def listens(self) -> bool:
        """Whether it accepts new connections. An ending engine still answers on open ones but can do nothing."""
        try:
            self._connect().close()
        except OSError:
            return False
        return True

    def remove(self, container_id: str) -> None:
        """Kills and removes a container with its volumes; does nothing when it is already gone.

        Raises: EnvironmentFailed: another process is removing it, and it still exists; APIError: the engine refuses.
        """
        try:
            self.api.remove_container(container_id, v=True, force=True)
        except APIError as error:
            if error.status_code == 404:
                return
            if "already in progress" not in str(error):
                raise
            self._await_removal(container_id)

    def _await_removal(self, container_id: str) -> None:
        give_up = time.monotonic() + _REMOVAL_S
        while True:
            try:
                status = self.api.inspect_container(container_id)["State"]["Status"]
            except NotFound:
                return
            if time.monotonic() >= give_up:
                raise EnvironmentFailed(
                    f"expected container {container_id[:12]} to be gone within {_REMOVAL_S:.0f} s of its removal by"
                    f" another process, found it {status}; the sweeper goes on trying."
                )
            time.sleep(0.01)

    def attach(self, exec_id: str) -> socket.socket:
        """Starts a prepared exec and returns its stream, which begins with the first byte of its output.

        Uses its own connection, because the client library's loses output that arrives together with the headers.
        """
        connection = self._connect()
        try:
            body = json.dumps({"Detach": False, "Tty": False}).encode()
            head = (
                f"POST /v{self.api.api_version}/exec/{exec_id}/start HTTP/1.1\r\nHost: engine\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                "Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            _accepted(connection)
            return connection
        except BaseException:
            connection.close()
            raise

    def _connect(self) -> socket.socket:
        parts = urlsplit(self.url)
        if self.is_local:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(_CALL_S)
            try:
                connection.connect(parts.path)
            except BaseException:
                connection.close()
                raise
            return connection
        return socket.create_connection((parts.hostname or "localhost", parts.port or 2375), timeout=_CALL_S)


def url_of(settings: Settings) -> str:
    """Returns the URL of the engine in the settings, whether it answers or not."""
    return _url(settings.docker_url)


def _url(named: str | None) -> str:
    return named or str(kwargs_from_env().get("base_url") or "unix:///var/run/docker.sock")


def engine_of(settings: Settings) -> Engine:
    """Returns this process's engine; connects at the first call, and again in a fork. Raises: EngineUnavailable."""
    key = (os.getpid(), settings.docker_url)
    if key not in _engines:
        _engines[key] = Engine(settings.docker_url)  # two threads may each create one: the later stays, both work
    return _engines[key]


_engines: dict[tuple[int, str | None], Engine] = {}


def missing(error: BaseException | None) -> bool:
    """Whether an error's cause is that the engine does not know the object."""
    return isinstance(error, NotFound) or (error is not None and isinstance(error.__cause__, NotFound))


def _reason(error: BaseException) -> str:
    explanation = getattr(error, "explanation", None)
    return str(explanation or error).strip()


def _accepted(connection: socket.socket) -> None:
    """Reads the headers, and no byte after them. Raises: ConnectionError: the engine refuses."""
    head = b""
    while not head.endswith(_BLANK):
        seen = connection.recv(4096, socket.MSG_PEEK)
        if not seen:
            raise ConnectionError("the engine closed the connection before it answered")
        end = (head + seen).find(_BLANK)
        head += connection.recv(len(seen) if end < 0 else end + len(_BLANK) - len(head))
    status = int(head.split(None, 2)[1])
    if status not in (101, 200):
        raise ConnectionError(_refusal(status, connection.recv(4096)))


def _refusal(status: int, body: bytes) -> str:
    try:
        answer: Any = json.loads(body)
        return f"{status}: {answer['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body.decode('utf-8', 'replace').strip()}"
