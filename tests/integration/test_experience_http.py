"""Samples over HTTP: a real server process and its client, through kills of both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import msgpack
import pytest

from app.artifacts.folder import FolderStore
from app.errors import SampleRefused, UnknownName
from app.experience.http import HttpExperience
from app.ledger import experience
from app.ledger.database import Database
from app.ledger.experience import ExperienceCounts
from app.settings import Settings
from tests.building import new_id
from tests.integration.rows import one
from tests.integration.test_experience import _complete, store
from tests.services import MakeSettings, free_port
from tests.waiting import eventually

__all__ = ["store"]

TOKEN = "a-token-of-the-test"


class Server:
    """`megaflow experience serve` as a process of its own."""

    def __init__(self, settings: Settings) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = {
            **os.environ,
            "MEGAFLOW_HOME": str(settings.home),
            "MEGAFLOW_DATABASE_URL": str(settings.database_url),
            "MEGAFLOW_ARTIFACTS_URL": settings.artifacts(),
            "MEGAFLOW_EXPERIENCE_TOKEN": TOKEN,
        }
        self.start()

    def start(self) -> None:
        command = ["experience", "serve", "--port", str(self.port), "--lease", "2"]
        run = "import sys; from app.cli import main; main()"
        self.process = subprocess.Popen([sys.executable, "-c", run, *command], env=self._environment)
        eventually(lambda: self.status("/leases/none/renew") == 401, within_s=60)

    def status(self, path: str, token: str = "", body: bytes = b"{}") -> int | None:
        request = urllib.request.Request(self.url + path, body, {"Authorization": f"Bearer {token}"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def settings(make_settings: MakeSettings, tmp_path: Path) -> Settings:
    return make_settings(artifacts_url=f"file://{tmp_path / 'artifacts'}")


@pytest.fixture
def server(settings: Settings, database: Database) -> Iterator[Server]:
    started = Server(settings.model_copy(update={"database_url": database.url}))
    yield started
    started.kill()


def _client(server: Server, run_id: UUID, **values: str) -> HttpExperience:
    asked = {"token": TOKEN, "policy": "policy", "consumer": "trainer-1"} | values
    return HttpExperience(server.url, asked["token"], str(run_id), policy=asked["policy"], consumer=asked["consumer"])


def test_a_trainer_elsewhere_gets_the_same_rows_and_commits_once(
    server: Server, database: Database, store: FolderStore
) -> None:
    client = _client(server, _complete(database, store, *["v1"] * 3))
    batch = client.next_batch(2)
    assert batch is not None
    assert len(batch.groups()) == 2
    assert {tuple(row["token_ids"]) for row in batch.rows} == {(1, 2, 7, 8)}
    assert client.publish("v9") == client.publish("v9")
    client.renew(batch)
    client.commit(batch, "v9")
    client.commit(batch, "v9")
    with pytest.raises(SampleRefused, match="committed with version 'v9'"):
        client.commit(batch, "v3")
    assert client.next_batch(1) is not None
    assert client.next_batch(1, wait_s=0.5) is None
    assert client.groups_left == 1, "what it holds"
    experience.settle(database, "policy", "v9")
    with pytest.raises(SampleRefused, match="found 'v1', number 0: versions do not go back"):
        client.publish("v1")


def test_a_trainer_without_a_reader_of_parquet_gets_msgpack(
    server: Server, database: Database, store: FolderStore
) -> None:
    run_id = _complete(database, store)
    asked = json.dumps({"consumer": "trainer-1", "groups": 1}).encode()
    headers = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/msgpack"}
    request = urllib.request.Request(f"{server.url}/runs/{run_id}/batches", asked, headers, method="POST")
    with urllib.request.urlopen(request, timeout=30) as reply:
        rows, lease = msgpack.unpackb(reply.read()), reply.headers["megaflow-lease"]
    assert [(row["token_ids"], row["mask"][-1]) for row in rows] == [([1, 2, 7, 8], True)] * len(rows)
    assert {"logprobs", "versions", "reward", "group_id"} < rows[0].keys()
    version = b'{"version": "v9"}'
    assert server.status("/policies/policy/versions", TOKEN, version) == 200
    assert server.status(f"/leases/{lease}/commit", TOKEN, version) == 200


def test_kills_of_the_server_lose_and_double_nothing(server: Server, database: Database, store: FolderStore) -> None:
    run_id = _complete(database, store, *["v1"] * 12)
    client = _client(server, run_id)
    done = 0
    while experience.counts(database, run_id) != ExperienceCounts(committed=12):
        batch = client.next_batch(2, wait_s=3)
        if batch is None:
            continue
        if done < 3:  # between the lease and its commit
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(10)
            server.start()
        done += 1
        client.commit(batch, "v2")
    assert one(database, "SELECT count(*) AS n FROM experience_leases WHERE state = 'committed'").n == 6


def test_what_is_wrong_is_refused_by_name(server: Server, database: Database, store: FolderStore) -> None:
    run_id = _complete(database, store)
    path = f"/runs/{run_id}/batches"
    good = json.dumps({"consumer": "t", "groups": 1}).encode()
    assert server.status(path, "another", good) == 401
    wrong = (b'{"consumer": "t", "groups": 1, "wait_s": "5"}', b'{"consumer": "\\u0000", "groups": 1}')
    for body in (b"", b"[]", b'{"consumer": "t"}', *wrong):
        assert server.status(path, TOKEN, body) == 400, body
    assert server.status(path, TOKEN, b"x" * 100_000) == 413
    assert server.status("/leases/nonsense/commit", TOKEN, b'{"version": "v"}') == 404
    assert server.status(f"/leases/{uuid4()}/renew", TOKEN) == 404
    assert server.status("/nothing", TOKEN) == 404
    with pytest.raises(UnknownName, match="no run feeds it"):
        _client(server, run_id, policy="unknown").publish("v1")
    with pytest.raises(UnknownName, match="run"):
        _client(server, new_id()).next_batch(1)
    assert _client(server, run_id).next_batch(1) is not None
    another = _client(server, run_id, consumer="trainer-2")
    with pytest.raises(SampleRefused, match="one trainer for a run"):
        another.next_batch(1)
    with pytest.raises(SampleRefused, match="expected 'trainer-1', which has the run, found 'trainer-2'"):
        another.release()
    _client(server, run_id).release()
    assert another.next_batch(1) is not None
