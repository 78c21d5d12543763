"""A submitter wants the keys of model providers, or an address that only the gateway's host may reach."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from app.client import MegaFlow
from app.errors import LimitInvalid, SpecInvalid
from app.ledger import model_replicas
from app.ledger.database import Database
from app.ledger.model_replicas import NewReplica
from app.model_service.gateway.engines import http_client
from app.models.addresses import forbidden
from app.models.model_calls import CallEnd
from app.models.provider_keys import is_key_variable
from app.models.spec import ModelChoice
from app.settings import Settings
from app.stack import lifecycle, supervisor
from app.stack.engine import Dockerd
from app.stack.programs import programs
from tests.building import a_task
from tests.integration.gateway_fixture import Engine, an_attempt, fixture
from tests.services import MakeSettings, free_port
from tests.waiting import eventually

KEYS = {"OPENAI_API_KEY": "sk-of-the-settings", "WRITER_API_KEY": "sk-of-the-writer", "NEVER_API_KEY": "sk-of-nobody"}
SECRET = "sk-must-stay-with-the-gateway"
LINK_LOCAL = [
    "http://169.254.169.254/v1",
    "http://[fe80::1]/v1",
    "http://[::ffff:169.254.169.254]/v1",
    "http://[64:ff9b::a9fe:a9fe]/v1",
    "http://[fd00:ec2::254]/v1",
    "http://100.100.100.200/v1",
    "http://2852039166/v1",
    "http://[64:ff9b:1::a9fe:a9fe]/v1",
    "http://[::169.254.169.254]/v1",
    "http://[::ffff:0:169.254.169.254]/v1",
    "http://0xa9.0xfe.43518/v1",
]


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings()


@pytest.mark.parametrize("variable", KEYS)
async def test_a_key_is_not_sent_to_a_submitters_url(make_settings: MakeSettings, variable: str) -> None:
    async with fixture(make_settings(model_base_url="http://127.0.0.1:9/v1"), replica=False, keys=KEYS) as g:
        await g.add("http://127.0.0.1:9/v1", "writer-2", api_key_env="WRITER_API_KEY")
        theft = ModelChoice(name="m", base_url=g.engine.url, api_key_env=variable)
        await asyncio.to_thread(an_attempt, g.database, "t2", model=theft)
        status, said = await g.ask(token="t2", model="m")
        assert (status, said["error"]["code"]) == (403, "not_registered")
        assert f"megaflow models add m {g.engine.url} --api-key-env {variable}" in said["error"]["message"]
        assert not g.engine.seen
        assert g.notes.last.end is CallEnd.UNAUTHORISED


async def test_a_registered_pair_is_used_and_an_unregistered_url_gets_no_key(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(), replica=False, keys=KEYS) as g:
        await g.add(g.engine.url, "writer-2", api_key_env="WRITER_API_KEY")
        own = ModelChoice(name="m", base_url=g.engine.url, api_key_env="WRITER_API_KEY")
        await asyncio.to_thread(an_attempt, g.database, "t2", model=own)
        assert (await g.ask(token="t2", model="m"))[0] == 200
        assert g.engine.seen[-1][1]["authorization"] == "Bearer sk-of-the-writer"
        await asyncio.to_thread(an_attempt, g.database, "t3", model=ModelChoice(name="m", base_url=g.engine.url))
        assert (await g.ask(token="t3", model="m"))[0] == 200
        assert "authorization" not in g.engine.seen[-1][1]


def test_a_submission_of_an_unregistered_pair_is_refused_with_the_command_that_registers_it(
    settings: Settings, database: Database
) -> None:
    url = "http://127.0.0.1:9/v1"
    asked = ModelChoice(name="my model", base_url=url, api_key_env="OPENAI_API_KEY")
    with MegaFlow(settings) as flow:
        with pytest.raises(SpecInvalid) as refused:
            flow.enqueue(a_task(), agent="mini-swe-agent", model=asked)
        assert f"`megaflow models add 'my model' {url} --api-key-env OPENAI_API_KEY`" in str(refused.value)
        flow.enqueue(a_task(), agent="mini-swe-agent", model=asked.model_copy(update={"api_key_env": None}))
        model_replicas.add(database, NewReplica("other", url, api_key_env="OPENAI_API_KEY"))
        flow.enqueue(a_task(), agent="mini-swe-agent", model=asked)


def test_another_engine_does_not_get_a_models_key(settings: Settings, database: Database) -> None:
    new = "http://127.0.0.1:9/v1"
    model_replicas.add(database, NewReplica("m", "HTTP://Engine.test/v1", api_key_env="OPENAI_API_KEY"))
    without = model_replicas.add(database, NewReplica("m", new))
    assert without.api_key_env is None
    theft = ModelChoice(name="m", base_url=new, api_key_env="OPENAI_API_KEY")
    with MegaFlow(settings) as flow, pytest.raises(SpecInvalid, match="is not registered"):
        flow.enqueue(a_task(), agent="mini-swe-agent", model=theft)


def test_a_shared_installation_takes_registered_urls_only(make_settings: MakeSettings, database: Database) -> None:
    url = "http://127.0.0.1:9/v1"
    with MegaFlow(make_settings(shared_installation=True)) as flow:
        with pytest.raises(SpecInvalid, match=f"megaflow models add m {url}"):
            flow.enqueue(a_task(), agent="mini-swe-agent", model=ModelChoice(name="m", base_url=url))
        model_replicas.add(database, NewReplica("other", url))
        flow.enqueue(a_task(), agent="mini-swe-agent", model=ModelChoice(name="m", base_url=url))


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "PATH", "DATABASE_URL", "UV_INDEX_AUTH_TOKEN"])
def test_only_a_variable_that_other_processes_do_without_is_registered_as_a_key(database: Database, name: str) -> None:
    assert not is_key_variable(name)
    with pytest.raises(LimitInvalid, match="_KEY"):
        model_replicas.add(database, NewReplica("m", "http://127.0.0.1:9/v1", api_key_env=name))


@pytest.mark.parametrize("url", LINK_LOCAL)
def test_a_link_local_or_metadata_address_is_refused_at_submission_and_registration(
    settings: Settings, database: Database, url: str
) -> None:
    with MegaFlow(settings) as flow, pytest.raises(SpecInvalid, match="never called"):
        flow.enqueue(a_task(), agent="mini-swe-agent", model=ModelChoice(name="m", base_url=url))
    with pytest.raises(LimitInvalid, match="address"):
        model_replicas.add(database, NewReplica("m", url))


@pytest.mark.parametrize("url", LINK_LOCAL)
async def test_the_gateway_makes_no_connection_to_such_an_address(url: str) -> None:
    async with http_client(5.0) as http:
        with pytest.raises(aiohttp.ClientError) as refused:
            await http.get(url)
        if not isinstance(refused.value, aiohttp.InvalidURL):  # the client takes no odd ways to write an address
            assert isinstance(refused.value, aiohttp.ClientConnectorError)
            assert refused.value.os_error.errno == errno.EACCES


async def test_a_name_that_is_resolved_anew_to_such_an_address_is_refused(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    addresses = ["127.0.0.1"]

    def answers(host: Any, *more: Any, **options: Any) -> Any:
        return resolve(addresses[0] if host == "rebound.test" else host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answers)

    async with fixture(make_settings(), replica=False) as g:
        own = ModelChoice(name="m", base_url=f"http://rebound.test:{g.engine.port}/v1")
        await asyncio.to_thread(an_attempt, g.database, "t2", model=own)
        assert (await g.ask(token="t2", model="m"))[0] == 200, "loopback is allowed on a single user's installation"
        addresses[0] = "169.254.169.254"
        await g.app._http.close()  # its connections and what it remembers of names
        g.app._http = g.app.services.upstream._http = http_client(5.0)
        status, said = await g.ask(token="t2", model="m")
        await g.app._http.close()
        assert (status, g.notes.last.end) == (403, CallEnd.UNAUTHORISED), said
        assert len(g.engine.seen) == 1


def test_ordinary_addresses_may_be_called() -> None:
    assert [forbidden(one) for one in ("127.0.0.1", "10.1.2.3", "192.168.0.1", "192.0.2.7", "::1", "fd12::1")] == [
        None
    ] * 6


async def test_a_redirect_is_not_followed_and_takes_no_key_along(make_settings: MakeSettings) -> None:
    thief = Engine()
    await thief.start()

    async def redirects(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(f"{thief.url}/chat/completions")

    async with fixture(make_settings(), replica=False, keys=KEYS) as g:
        await g.add(g.engine.url, api_key_env="WRITER_API_KEY")
        g.engine.handler = redirects
        assert (await g.ask())[0] == 502
        assert g.engine.seen
        assert not thief.seen
    await thief.stop()


@pytest.fixture
def stack(home_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """All programs of one machine, started where keys are exported."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_AUTH_TOKEN", "SOME_ENGINE_KEY", "UNUSUAL"):
        monkeypatch.setenv(name, f"{SECRET}-{name}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-store")
    settings = Settings(
        home=home_folder,
        installation=f"keys-{os.getpid()}",
        database_url=None,
        broker_url=None,
        model_api_key_env="UNUSUAL",
        flower_port=free_port(),
        web_port=free_port(),
        replay_port=free_port(),
        gateway_port=free_port(),
    )
    nowhere = Dockerd(url="unix:///nowhere/docker.sock")  # no engine is started here
    try:
        lifecycle.up(settings, lambda line: None, may_install=False, base=False, dockerd=nowhere)
        yield settings
    finally:
        lifecycle.down(settings, lambda line: None, purge=True)


def _environ(pid: int) -> bytes:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_of_all_processes_of_a_stack_the_gateway_alone_has_keys(stack: Settings) -> None:
    family = supervisor.family(stack)
    assert len(family) > len(programs(stack)), "supervisord, its programs and their children"
    gateway = next(one.pid for one in supervisor.states(stack) if one.name == "gateway")
    with_keys = {pid for pid in family if SECRET.encode() in _environ(pid)}
    assert with_keys == {gateway}
    for name in (b"OPENAI_API_KEY", b"ANTHROPIC_AUTH_TOKEN", b"SOME_ENGINE_KEY", b"UNUSUAL"):
        assert name + b"=" in _environ(gateway)
    launcher = next(one.pid for one in supervisor.states(stack) if one.name == "launcher")
    assert b"AWS_SECRET_ACCESS_KEY=of-the-store" in _environ(launcher), "artifacts are stored from there"
    for folder, _, names in os.walk(stack.home / "run"):
        for file in (Path(folder, name) for name in names):
            with suppress(FileNotFoundError):  # a trial environment may end meanwhile
                assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file

    os.kill(gateway, signal.SIGKILL)

    def again() -> int:
        found = next(one for one in supervisor.states(stack) if one.name == "gateway")
        return found.pid if found.runs and found.pid != gateway else 0

    assert SECRET.encode() in _environ(eventually(again, "the gateway to be started again"))


def test_a_worker_that_is_started_by_hand_drops_the_keys(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MEGAFLOW_")}
    environ |= {"MEGAFLOW_HOME": str(tmp_path), "OPENAI_API_KEY": SECRET, "AWS_SECRET_ACCESS_KEY": "of-the-store"}
    command = [sys.executable, "-c", "from app.cli import main; main()", "worker", "launcher"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as worker:
        try:
            eventually(lambda: (tmp_path / "run" / "launcher.sock").exists() or worker.poll() is not None)
            assert worker.poll() is None
            found = _environ(worker.pid)
        finally:
            worker.terminate()
    assert SECRET.encode() not in found
    assert b"of-the-store" in found
