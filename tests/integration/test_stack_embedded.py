"""The embedded PostgreSQL and Redis, really started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest
import redis as redis_client

from app.errors import SettingsInvalid
from app.settings import Settings
from app.stack import postgres, redis
from app.stack.home import prepare
from app.stack.processes import has_ended
from tests.services import serving, short_folder

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes users")


@contextmanager
def _postgres_in(home: Path) -> Iterator[Settings]:
    settings = Settings(home=home, database_url=None)
    prepare(settings)
    postgres.prepare(settings)
    log = home / "logs" / "postgres.log"
    with serving(postgres.command(settings), logfile=log, user=postgres.owner(), stop=signal.SIGINT):
        postgres.wait_until_ready(settings)
        yield settings


def _setting(settings: Settings, name: str) -> str:
    with psycopg.connect(settings.database()) as connection:
        row = connection.execute("SELECT current_setting(%s)", (name,)).fetchone()
    assert row is not None
    return str(row[0])


def _server_processes(settings: Settings) -> list[psutil.Process]:
    data = str(postgres.data_folder(settings))
    found = psutil.process_iter(["name", "cwd", "username"])
    return [process for process in found if (process.info["name"], process.info["cwd"]) == ("postgres", data)]


def test_the_embedded_postgresql_is_durable_on_no_tcp_port_and_as_a_user_of_its_own(home_folder: Path) -> None:
    with _postgres_in(home_folder) as settings, psycopg.connect(settings.database()) as connection:
        assert int(_setting(settings, "server_version_num")) >= 140_000
        assert _setting(settings, "fsync") == "on"
        assert _setting(settings, "max_connections") == "300"
        processes = _server_processes(settings)
        assert processes
        assert [one for process in processes if not has_ended(process) for one in process.net_connections("inet")] == []
        if os.geteuid() == 0:
            assert {process.info["username"] for process in processes} == {postgres.OWNER}
        connection.execute("CREATE TABLE kept (word text)")
        connection.execute("INSERT INTO kept VALUES ('still here')")
    with _postgres_in(home_folder) as settings, psycopg.connect(settings.database()) as connection:
        assert connection.execute("SELECT word FROM kept").fetchone() == ("still here",)


@as_root
def test_a_home_that_others_cannot_reach_gets_its_data_outside_and_purge_takes_it_away() -> None:
    with short_folder() as folder:
        folder.chmod(0o700)
        with _postgres_in(folder / "h") as settings:
            shelter = postgres.data_folder(settings).parent
            assert shelter.parent == postgres.SHELTERS
            assert int(_setting(settings, "server_version_num")) >= 140_000
            assert folder.stat().st_mode & 0o077 == 0, "no folder of the user's was opened"
        with _postgres_in(folder / "h") as again:
            assert postgres.data_folder(again).parent == shelter
        postgres.purge(settings)
        assert not shelter.exists()
        assert not os.path.lexists(settings.home / "postgres")


@as_root
def test_another_user_cannot_connect(home_folder: Path) -> None:
    with _postgres_in(home_folder) as settings:
        socket = settings.postgres_socket_dir.resolve() / ".s.PGSQL.5432"
        assert socket.exists()
        attempt = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
        # The system's interpreter: another user may be unable to reach ours, which would prove nothing.
        system_python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
        done = subprocess.run(
            [system_python, "-c", attempt, str(socket)],
            user="nobody",
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            cwd="/",
        )
        assert "PermissionError" in done.stderr


def test_the_embedded_redis_keeps_what_it_is_told_and_listens_on_its_socket_alone(home_folder: Path) -> None:
    settings = Settings(home=home_folder, broker_url=None)
    prepare(settings)
    redis.prepare(settings)
    log = home_folder / "logs" / "redis.log"
    with serving(redis.command(settings), logfile=log, user=None, stop=signal.SIGTERM):
        redis.wait_until_ready(settings)
        with redis_client.Redis.from_url(settings.redis(), decode_responses=True) as client:
            found = {name: client.config_get(name)[name] for name in ("port", "appendonly", "maxmemory-policy", "save")}
            assert found == {"port": "0", "appendonly": "yes", "maxmemory-policy": "noeviction", "save": ""}
            client.lpush("queue", "task")
        assert settings.redis_socket.stat().st_mode & 0o077 == 0
    with serving(redis.command(settings), logfile=log, user=None, stop=signal.SIGTERM):
        redis.wait_until_ready(settings)
        with redis_client.Redis.from_url(settings.redis()) as client:
            assert client.llen("queue") == 1


@pytest.mark.parametrize("name", ["with blank", "100%", "a;b", "a#b", "umlaut-ä"])
def test_a_home_with_signs_that_mean_something_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsInvalid, match="MEGAFLOW_HOME"):
        prepare(Settings(home=tmp_path / name))
