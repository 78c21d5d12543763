"""Real services for tests: PostgreSQL, Redis and a container engine. A pytest plugin.

The servers are the embedded ones, in short temporary folders (a Unix socket's path is limited), started once for a
session and ended with it even when pytest is killed. What is missing skips a test on a laptop and fails it in CI.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis as redis_client

from app.errors import MegaFlowError
from app.ledger import schema
from app.ledger.database import Database
from app.settings import PREFIX, Settings
from app.stack import base_image, engine, postgres, redis
from app.stack.home import prepare

_TEMPLATE = "migrated"
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_STOP_S = 20

MakeSettings = Callable[..., Settings]


def missing(what: str) -> None:
    """Skip this test, or fail it where CI promises that everything is there."""
    if os.environ.get("CI", "").lower() in {"1", "true", "yes"}:
        pytest.fail(f"CI must have what this test needs: {what}")
    pytest.skip(what)


@contextmanager
def short_folder() -> Iterator[Path]:
    """A temporary folder with a short path that every user may pass through."""
    folder = Path(tempfile.mkdtemp(prefix="mf-", dir="/tmp"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own at `folder`, where this user may mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True).returncode:
        pytest.skip("may not mount a small file system here")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def free_port() -> int:
    """A port of the loopback that nobody uses now."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


@contextmanager
def serving(command: tuple[str, ...], *, logfile: Path, user: str | None, stop: signal.Signals) -> Iterator[None]:
    """Run a server for the length of a block; it dies with this process, too."""

    def die_with_parent() -> None:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, int(stop))

    with (
        logfile.open("ab") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            start_new_session=True,
            preexec_fn=die_with_parent,
        ) as server,
    ):
        try:
            yield
        finally:
            server.send_signal(stop)
            try:
                server.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


@pytest.fixture(scope="session")
def _services_home() -> Iterator[Settings]:
    with short_folder() as folder:
        settings = Settings(home=folder / "h", database_url=None, broker_url=None)
        prepare(settings)
        yield settings


@pytest.fixture(scope="session")
def _postgres(_services_home: Settings) -> Iterator[Settings]:
    """The server, with the database `migrated`, to which nobody may stay connected: the others are copies of it."""
    settings = _services_home
    try:
        postgres.prepare(settings)
    except MegaFlowError as error:
        missing(str(error))
    # A test's data need not survive a power cut.
    command = (*postgres.command(settings), "-c", "fsync=off", "-c", "full_page_writes=off")
    log = settings.home / "logs" / "postgres.log"
    with serving(command, logfile=log, user=postgres.owner(), stop=signal.SIGINT):
        postgres.wait_until_ready(settings)
        _execute(settings, f"CREATE DATABASE {_TEMPLATE}")
        schema.migrate(_url(settings, _TEMPLATE))
        yield settings
    postgres.purge(settings)


@pytest.fixture(scope="session")
def postgres_url(_postgres: Settings) -> Iterator[str]:
    """A migrated database that lives as long as the session; shared by the tests that take it."""
    with _copy_of_template(_postgres) as url:
        yield url


@pytest.fixture
def database_url(_postgres: Settings) -> Iterator[str]:
    """A migrated, empty database of this test's own."""
    with _copy_of_template(_postgres) as url:
        yield url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """The ledger in that database."""
    found = Database(database_url)
    yield found
    found.close()


@pytest.fixture(scope="session")
def _redis(_services_home: Settings) -> Iterator[Settings]:
    settings = _services_home
    try:
        redis.prepare(settings)
        command = redis.command(settings)
    except MegaFlowError as error:
        missing(str(error))
    log = settings.home / "logs" / "redis.log"
    with serving(command, logfile=log, user=None, stop=signal.SIGTERM):
        redis.wait_until_ready(settings)
        yield settings


@pytest.fixture
def redis_url(_redis: Settings) -> str:
    """redis-py's URL of a real Redis, emptied before this test; shared by all."""
    with redis_client.Redis.from_url(_redis.redis()) as client:
        client.flushall()
    return _redis.redis()


@pytest.fixture
def home_folder() -> Iterator[Path]:
    """A home with a short path, deleted after the test."""
    with short_folder() as folder:
        yield folder / "h"


def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of this process's environment holds."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


def settings_in(folder: Path, **wanted: Any) -> Settings:
    """Of an installation with its home in the folder and ports that are free."""
    ports = {f"{name}_port": free_port() for name in ("flower", "web", "replay", "gateway")}
    return Settings(**({"home": folder / "h", "installation": f"test-{uuid.uuid4().hex[:8]}"} | ports | wanted))


@pytest.fixture
def make_settings(
    database_url: str, redis_url: str, home_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> MakeSettings:
    """Build settings on a home, a database and an emptied Redis of this test's own; `overrides` win."""
    unset(monkeypatch)
    installation = f"test-{uuid.uuid4().hex[:8]}"

    def make(**overrides: object) -> Settings:
        values: dict[str, object] = {
            "home": home_folder,
            "installation": installation,
            "database_url": database_url,
            "broker_url": redis_url.replace("unix://", "redis+socket://", 1),
            "host_cpu_most": 0.0,  # tests keep the processors busy
            "image_disk_high": 1.0,  # however full this machine's disk is
            "image_disk_low": 1.0,
        }
        settings = Settings(**(values | overrides))
        prepare(settings)
        return settings

    return make


@pytest.fixture(scope="session")
def docker_engine() -> str:
    """The version of the container engine that answers."""
    found = engine.version(Settings())
    if found is None:
        missing("a container engine that answers")
    assert found is not None
    return found


@pytest.fixture(scope="session")
def base_image_tag(docker_engine: str) -> str:
    """The base image, built when the engine has none."""
    with short_folder() as folder:
        settings = Settings(home=folder / "h")
        try:
            base_image.ensure_base_image(settings)
        except MegaFlowError as error:
            missing(str(error))
        return settings.base_image


def _url(settings: Settings, database: str) -> str:
    return f"postgresql://postgres@/{database}?host={settings.postgres_socket_dir}"


def _execute(settings: Settings, statement: str) -> None:
    with psycopg.connect(_url(settings, "postgres"), autocommit=True) as connection:
        connection.execute(statement.encode())


@contextmanager
def _copy_of_template(settings: Settings) -> Iterator[str]:
    name = f"t_{uuid.uuid4().hex[:12]}"
    _execute(settings, f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE}")
    try:
        yield _url(settings, name)
    finally:
        _execute(settings, f"DROP DATABASE {name} WITH (FORCE)")
