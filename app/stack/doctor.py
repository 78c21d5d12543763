"""Checks whether a machine has what MegaFlow needs, and suggests fixes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import psutil
import psycopg
import redis
import requests
import structlog
from docker.errors import DockerException

from app.errors import MegaFlowError
from app.settings import Settings
from app.stack import base_image, engine, ports, supervisor

log = structlog.get_logger(__name__)

_POSTGRES = 14
_REDIS = (6, 2)
_FREE_DISK_BYTES = 5 << 30
_ANSWER_S = 5
_UP = "start the stack with `megaflow up`"


class Level(StrEnum):
    """Severity of a check's result."""

    OK = "ok"
    WARN = "warn"
    """Something will be slower or missing."""
    FAIL = "fail"
    """Tasks cannot run."""


@dataclass(frozen=True)
class DoctorCheck:
    """Result of one check."""

    name: str
    level: Level
    found: str
    fix: str = ""
    """Suggested fix; empty when the check passed."""


def checks(settings: Settings) -> list[DoctorCheck]:
    """Runs all checks; changes nothing. A check that raises an error becomes a failed check."""
    return [_looked_at(name, look, settings) for name, look in _LOOKS.items()]


def _looked_at(name: str, look: Callable[[Settings], tuple[Level, str, str]], settings: Settings) -> DoctorCheck:
    try:
        return DoctorCheck(name, *look(settings))
    except (
        MegaFlowError,
        ImportError,
        OSError,
        psycopg.Error,
        redis.RedisError,
        DockerException,
        requests.RequestException,
    ) as error:
        return DoctorCheck(name, Level.FAIL, str(error).strip(), _MENDS.get(name, ""))


def _ok(found: str) -> tuple[Level, str, str]:
    return Level.OK, found, ""


def _python(settings: Settings) -> tuple[Level, str, str]:
    return _ok(f"{sys.version.split()[0]} ({sys.executable})")


def _disk(settings: Settings) -> tuple[Level, str, str]:
    folder = next(path for path in (settings.home, *settings.home.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    summary = f"{free / 2**30:.1f} GiB free at {folder}"
    if free >= _FREE_DISK_BYTES:
        return _ok(summary)
    return (
        Level.WARN,
        summary,
        "free some: images and artifacts want at least 5 GiB (`docker system df` shows the images)",
    )


def _memory(settings: Settings) -> tuple[Level, str, str]:
    memory = psutil.virtual_memory()
    required_bytes = settings.instance_memory_bytes * settings.persistent_instances * settings.persistent_slots
    summary = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"
    if memory.available >= required_bytes:
        return _ok(f"{summary}; {settings.capacity()} ephemeral instances at once")
    fix = "set MEGAFLOW_PERSISTENT_SLOTS or MEGAFLOW_EPHEMERAL_CAPACITY lower"
    return Level.WARN, f"{summary}; the slots want {required_bytes / 2**30:.1f}", fix


def _uv(settings: Settings) -> tuple[Level, str, str]:
    if importlib.util.find_spec("uv") is not None or shutil.which("uv"):
        return _ok("uv is here")
    return Level.WARN, "no uv: agent frameworks cannot be installed", "`pip install '.[worker]'` in MegaFlow's checkout"


def _postgres(settings: Settings) -> tuple[Level, str, str]:
    with psycopg.connect(settings.database(), connect_timeout=_ANSWER_S) as connection:
        number = connection.info.server_version
    summary = f"{number // 10000}.{number % 10000}, {'embedded' if settings.embeds_postgres else 'yours'}"
    if number // 10000 >= _POSTGRES:
        return _ok(summary)
    return Level.FAIL, summary, f"use PostgreSQL {_POSTGRES} or newer"


def _redis(settings: Settings) -> tuple[Level, str, str]:
    with redis.Redis.from_url(settings.redis(), socket_connect_timeout=_ANSWER_S, socket_timeout=_ANSWER_S) as client:
        about = client.info()
    policy = about.get("maxmemory_policy")  # INFO, not CONFIG: a broker's user may not be allowed to use CONFIG
    number = str(about["redis_version"])
    summary = f"{number}, {'embedded' if settings.embeds_redis else 'yours'}, maxmemory-policy {policy}"
    if tuple(int(part) for part in number.split(".")[:2]) < _REDIS:
        return Level.FAIL, summary, "use Redis 6.2 or newer"
    if policy != "noeviction":
        return Level.WARN, summary, "set maxmemory-policy noeviction: a queue may not forget"
    return _ok(summary)


def _migrations(settings: Settings) -> tuple[Level, str, str]:
    from app.ledger import schema  # imported here: without Alembic, only this check fails

    if schema.at_head(settings.database()):
        return _ok("at head")
    return Level.FAIL, "behind the code", "run `megaflow up`, which migrates"


def _stack(settings: Settings) -> tuple[Level, str, str]:
    states = supervisor.states(settings)
    idle = [f"{state.name} {state.state}" for state in states if not state.runs]
    if not idle:
        return _ok(f"{len(states)} programs run")
    return Level.FAIL, ", ".join(idle), f"read {settings.home / 'logs'}; {_UP} again"


def _ports(settings: Settings) -> tuple[Level, str, str]:
    if supervisor.is_running(settings):
        return _ok("ours")
    if conflicts := ports.in_use(settings):
        return (
            Level.FAIL,
            f"taken: {', '.join(conflicts.values())}",
            f"set {', '.join(conflicts)} to free ports",
        )
    return _ok("free")


def _gateway(settings: Settings) -> tuple[Level, str, str]:
    for base in settings.gateway_bases():
        answer = requests.get(f"{base}/health", timeout=_ANSWER_S)
        if not answer.ok:
            return Level.FAIL, f"{base}/health says {answer.status_code}", f"read {settings.home / 'logs'}"
    return _ok(f"answers at {', '.join(settings.gateway_bases())}")


def _artifacts(settings: Settings) -> tuple[Level, str, str]:
    from app import artifacts  # imported here: boto3 is slow to import

    artifacts.open_store(settings.artifacts(), endpoint_url=settings.s3_endpoint_url).check()
    return _ok(f"{settings.artifacts()} can be written")


def _engine(settings: Settings) -> tuple[Level, str, str]:
    if (number := engine.version(settings)) is not None:
        return _ok(f"{number} at {engine.engine_url(settings)}{', started by us' if engine.is_ours(settings) else ''}")
    fix = _UP if os.geteuid() == 0 else "start Docker, or add this user to the group docker"
    return Level.FAIL, f"no engine answers at {engine.engine_url(settings)}", fix


def _image(settings: Settings) -> tuple[Level, str, str]:
    if base_image.is_present(settings):
        return _ok(settings.base_image)
    return Level.WARN, f"no image {settings.base_image}", "`megaflow up` builds it"


_LOOKS: dict[str, Callable[[Settings], tuple[Level, str, str]]] = {
    "python": _python,
    "disk": _disk,
    "memory": _memory,
    "uv": _uv,
    "ports": _ports,
    "stack": _stack,
    "postgresql": _postgres,
    "gateway": _gateway,
    "migrations": _migrations,
    "redis": _redis,
    "artifacts": _artifacts,
    "engine": _engine,
    "base image": _image,
}

_MENDS = {
    "stack": _UP,
    "postgresql": f"{_UP}, or set MEGAFLOW_DATABASE_URL to a server that answers",
    "migrations": f"{_UP}, which migrates",
    "redis": f"{_UP}, or set MEGAFLOW_BROKER_URL to a server that answers",
    "artifacts": "make the folder writable, or set MEGAFLOW_ARTIFACTS_URL",
    "base image": "an engine must answer first",
}
