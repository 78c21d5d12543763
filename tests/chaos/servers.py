"""A PostgreSQL and a Redis of the suite's own, to be killed, restarted and emptied at will. One pair for all cases."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import redis as redis_client

from app.ledger import schema
from app.settings import Settings
from app.stack import postgres, redis
from app.stack.home import prepare
from app.stack.private import PrivateStack
from app.stack.processes import wait_for_end
from app.stack.programs import Program, StartStage
from tests.chaos.programs import wait_for

_TEMPLATE = "migrated"


class Servers:
    """Both servers, in one short temporary folder; `settings` says where they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = Settings(home=folder / "s", database_url=None, broker_url=None)
        self._stack = PrivateStack(self.settings)

    def start(self) -> None:
        prepare(self.settings)
        postgres.prepare(self.settings)
        redis.prepare(self.settings)
        self.start_redis()
        self.start_postgres()
        self._execute(f"CREATE DATABASE {_TEMPLATE}")
        schema.migrate(self.url(_TEMPLATE))

    def stop(self) -> None:
        self._stack.close()
        postgres.purge(self.settings)

    def heal(self) -> None:
        """As new for the next case: both run with their usual options, Redis is empty."""
        self.start_redis()
        self.start_postgres()
        with redis_client.Redis.from_url(self.settings.redis()) as client:
            client.flushall()

    def _kill(self, name: str) -> None:
        self._stack.kill(name)
        wait_for(lambda: name not in self._stack.pids, 10)

    def url(self, database: str, folder: Path | None = None) -> str:
        return f"postgresql://postgres@/{database}?host={folder or self.settings.postgres_socket_dir}"

    def start_postgres(self, *options: str) -> None:
        """Start it unless it runs; returns when it answers. `options`: more `name=value` of the server's."""
        if "postgres" not in self._stack.pids:
            more = [part for option in ("full_page_writes=off", *options) for part in ("-c", option)]
            command = (*postgres.command(self.settings), *more)
            self._stack.spawn(Program("postgres", StartStage.SERVERS, command, postgres.owner(), "INT", stop_wait_s=30))
        postgres.wait_until_ready(self.settings, timeout_s=60)

    def stop_postgres(self) -> None:
        """A fast shutdown: every session is ended, nothing is lost."""
        self._stack.stop("postgres")

    def kill_postgres(self) -> None:
        """SIGKILL to the postmaster; its backends follow as soon as they notice. What was committed must be there."""
        backends = psutil.Process(self._stack.pids["postgres"]).children(recursive=True)
        self._kill("postgres")
        for backend in wait_for_end(backends, 10):  # one that sleeps in a lock keeps the new postmaster from starting
            backend.kill()

    @contextmanager
    def database(self) -> Iterator[str]:
        """The name of a migrated, empty database of one case's own."""
        name = f"c_{uuid.uuid4().hex[:12]}"
        self._execute(f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE}")
        try:
            yield name
        finally:
            self.start_postgres()
            self._execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement.encode())

    def end_sessions(self, database: str, fraction: float) -> int:
        """Terminate some of the sessions of a database, chosen at random; how many."""
        statement = (
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = %s"
            " AND application_name LIKE 'megaflow%%' AND random() < %s"
        )
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            row = connection.execute(statement, (database, fraction)).fetchone()
        return int(row[0]) if row else 0

    def start_redis(self) -> None:
        if "redis" not in self._stack.pids:
            self._stack.spawn(Program("redis", StartStage.SERVERS, redis.command(self.settings), stop_wait_s=30))
        redis.wait_until_ready(self.settings)

    def kill_redis(self, *, keep_data: bool) -> None:
        self._kill("redis")
        if not keep_data:
            shutil.rmtree(redis.data_folder(self.settings))
            redis.prepare(self.settings)

    def pause_redis(self, seconds: float) -> None:
        """It keeps its connections and says nothing for a while."""
        self._stack.kill("redis", signal.SIGSTOP)
        time.sleep(seconds)
        self._stack.kill("redis", signal.SIGCONT)

    def redis(self) -> redis_client.Redis:
        return redis_client.Redis.from_url(self.settings.redis())


@contextmanager
def serving() -> Iterator[Servers]:
    """The servers for the length of the block; nothing of them is left after it."""
    folder = Path(tempfile.mkdtemp(prefix="mf-chaos-", dir="/tmp"))
    folder.chmod(0o711)
    servers = Servers(folder)
    begun = time.monotonic()
    try:
        servers.start()
        print(f"servers ready after {time.monotonic() - begun:.1f} s in {folder}", flush=True)
        yield servers
    finally:
        servers.stop()
        if os.environ.get("CHAOS_KEEP"):
            print(f"kept: {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
