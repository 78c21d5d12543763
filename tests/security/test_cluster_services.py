"""The services of docker-compose.yml ask who is there, and let each login do no more than it needs."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import redis.asyncio
import yaml
from kombu import Connection, Exchange, Queue

import app
from app.artifacts import open_store
from app.errors import ArtifactStoreUnavailable
from app.model_service.limiter import ModelLimiter, in_use
from app.stack import redis as embedded
from tests.services import free_port
from tests.waiting import eventually

ROOT = Path(app.__file__).parent.parent
SERVICES: Mapping[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
PASSWORD = "not-a-secret"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Redis as the compose file starts it, at a port of this host: its URL without a login."""
    port = free_port()
    shell, option, script = SERVICES["redis"]["command"]
    here = script.replace("$$", "$").replace("bind 0.0.0.0", f"bind 127.0.0.1\nport {port}")
    here = here.replace("dir /data", f"dir {tmp_path_factory.mktemp('redis')}")
    here = here.replace("redis-server", str(embedded._program()), 1)
    server = subprocess.Popen([shell, option, here], env=os.environ | {"REDIS_PASSWORD": PASSWORD}, stdout=-3)
    try:
        with redis.Redis(port=port) as client:
            eventually(lambda: answers(client))
        yield f"127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_without_a_login_redis_answers_nothing_but_a_ping(broker: str) -> None:
    with redis.Redis.from_url(f"redis://{broker}") as client:
        for command in (("GET", "x"), ("INFO",), ("LPUSH", "persistent.standard", "x"), ("PUBLISH", "x", "y")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)


@pytest.mark.parametrize(
    "command",
    [
        "FLUSHALL", "FLUSHDB", "SWAPDB 0 1", "KEYS *", "CONFIG GET *", "CONFIG SET dir /", "DEBUG SLEEP 0", "SAVE",
        "SHUTDOWN NOSAVE", "ACL LIST", "MONITOR", "CLIENT KILL 127.0.0.1:1", "REPLICAOF NO ONE", "SCRIPT FLUSH",
        "MODULE LIST", "MIGRATE 127.0.0.1 1 x 0 1",
    ],
)  # fmt: skip
def test_our_login_may_not_administer_redis(broker: str, command: str) -> None:
    login = redis.Redis.from_url(f"redis://megaflow:{PASSWORD}@{broker}")
    with login as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command.split())


def test_our_login_carries_messages_and_limits_model_calls(broker: str) -> None:
    url = f"redis://megaflow:{PASSWORD}@{broker}"
    got: list[object] = []
    exchange, told = Exchange("megaflow.test"), Exchange("megaflow.all", type="fanout")
    queues = [Queue("megaflow.test", exchange, "x"), Queue("megaflow.one", told, exclusive=True)]

    def take(body: object, message: Any) -> None:
        got.append(body)
        message.ack()

    with Connection(url) as connection, connection.Consumer(queues, callbacks=[take]):
        producer = connection.Producer()
        producer.publish("task", exchange=exchange, routing_key="x", declare=queues)
        connection.drain_events(timeout=20)
        producer.publish("broadcast", exchange=told)  # who listened by then hears it
        connection.drain_events(timeout=20)
    assert sorted(map(str, got)) == ["broadcast", "task"]

    async def call() -> None:
        async def capacities() -> Mapping[str, int]:
            return {"model_concurrency:user:alice": 1, "model_requests:user:alice": 5}

        limiter = ModelLimiter(redis.asyncio.Redis.from_url(url), capacities, prefix="megaflow:test")
        async with limiter.call(run_id="r", user="alice", model="m", tokens=1):
            pass
        await limiter.close()

    asyncio.run(call())
    with redis.Redis.from_url(url) as client:
        assert "model_requests:user:alice" in in_use(client, "megaflow:test")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program, port = SERVICES["s3"]["command"][0], free_port()
    environment = os.environ | {"AWS_ACCESS_KEY_ID": "the-key", "AWS_SECRET_ACCESS_KEY": "the-secret"}
    command = [sys.executable, str(ROOT / "worker_images" / "worker" / "bin" / program), "127.0.0.1", str(port)]
    with (tmp_path_factory.mktemp("s3") / "server.log").open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        eventually(lambda: listens(port), within_s=60)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_the_store_takes_its_own_credentials_and_no_others(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    ours = open_store("s3://evidence/some%20where", endpoint_url=store, create_bucket=True)
    ours.check()
    large = os.urandom(9 << 20)
    ours.put("runs/a b/ü+x.bin", large)
    assert ours.get("runs/a b/ü+x.bin") == large
    for key, secret in (("the-key", "another"), ("another", "the-secret")):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        with pytest.raises(ArtifactStoreUnavailable):
            open_store("s3://evidence/some%20where", endpoint_url=store).get("runs/a b/ü+x.bin")


def test_the_store_answers_nothing_without_a_signature(store: str) -> None:
    for method, path in (
        ("GET", "/"),
        ("GET", "/evidence?list-type=2"),
        ("PUT", "/other"),
        ("POST", "/moto-api/reset"),
    ):
        assert httpx.request(method, f"{store}{path}").status_code == 403
    unsigned = "AWS4-HMAC-SHA256 Credential=the-key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature="
    assert httpx.get(store, headers={"Authorization": unsigned + "0" * 64}).status_code == 403


def test_only_what_makes_containers_or_keeps_its_own_user_starts_as_root() -> None:
    """postgres begins as root to own its volume, and `model` reads recordings that control has written."""
    rooted = {name for name, service in SERVICES.items() if "user" not in service}
    assert rooted == {"postgres", "control", "pool", "grading", "model"}
    assert {SERVICES[name]["user"] for name in SERVICES if name not in rooted} == {"redis", "megaflow"}
    sockets = {name for name, service in SERVICES.items() if "docker.sock" in str(service.get("volumes"))}
    assert sockets == {"control", "pool", "grading"}
