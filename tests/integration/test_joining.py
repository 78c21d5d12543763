"""Machines join by a one-time token, with accounts that can do what a worker needs, and lose them when they leave."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import kombu.exceptions
import psycopg
import pytest
import redis
from pydantic import SecretStr
from starlette.testclient import TestClient
from structlog.testing import capture_logs

from app import celery_app
from app.cli.hosts import leave
from app.errors import (
    InstallationFailed,
    MegaFlowError,
    NotSignedIn,
    OptionInvalid,
    SettingsInvalid,
)
from app.instances import broker_users, joining
from app.instances.joining import HostCredentials
from app.ledger import host_roles, hosts, schema
from app.ledger.database import Database, sql
from app.live_shell import ShellKeys
from app.models.instance import InstanceMode, InstanceRequest
from app.settings import Settings
from app.stopping import StopListener, nudge
from app.web.server import application
from app.workers.instance import _DrainCheck, _worker
from tests.services import MakeSettings
from tests.waiting import eventually

HEAD = "10.9.8.7"


@pytest.fixture
def settings(make_settings: MakeSettings, tmp_path: Path) -> Settings:
    """As other machines see the servers: what is handed out names addresses, whatever the tests' sockets are."""
    (tmp_path / "authority.pem").write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    certificates = f"{tmp_path}/authority.pem"
    (tmp_path / "join.env").write_text(
        f"MEGAFLOW_DATABASE_URL=postgresql://me:secret@{HEAD}/megaflow?sslmode=verify-full&sslrootcert={certificates}\n"
        f"MEGAFLOW_BROKER_URL=rediss://me:secret@{HEAD}:6390/0?ssl_cert_reqs=required&ssl_ca_certs={certificates}\n"
        "AWS_ACCESS_KEY_ID=for-hosts\nAWS_SECRET_ACCESS_KEY='it is a \"secret\"'\n"
    )
    return make_settings(
        join_settings=tmp_path / "join.env",
        artifacts_url="s3://evidence/runs",
        gateway_url=(f"http://{HEAD}:8766",),
        lease_s=7.0,
        model_base_url="http://engine:8000/v1",
        experience_token="not for hosts, at all",
    )


def _join(settings: Settings, database: Database, name: str = "") -> HostCredentials:
    return joining.join(settings, database, hosts.invite(database, name=name), "machine")


def _account(database: Database, name: str) -> str:
    return hosts.by_name(database, name).account


def _as_host(settings: Settings, account: str) -> psycopg.Connection:
    return psycopg.connect(settings.database().replace("postgres@", f"{account}@", 1), autocommit=True)


def _redis_of(settings: Settings, account: str, password: str) -> redis.Redis:
    return redis.Redis.from_url(settings.redis(), username=account, password=password)


def _password(made: HostCredentials) -> str:
    found = re.search(r"://[^:]+:([^@]+)@", made.variables["MEGAFLOW_DATABASE_URL"])
    assert found is not None
    return found[1]


def test_a_host_gets_accounts_of_its_own_and_what_a_worker_needs(settings: Settings, database: Database) -> None:
    made = _join(settings, database)
    account = _account(database, "machine")
    given = made.variables
    assert re.fullmatch(
        rf"postgresql://{account}:\S+@{HEAD}/megaflow\?sslmode=verify-full&sslrootcert={{files}}/authority-1.pem",
        given["MEGAFLOW_DATABASE_URL"],
    )
    assert given["MEGAFLOW_BROKER_URL"].startswith(f"rediss://{account}:{_password(made)}@{HEAD}:6390/0?")
    assert made.files == {"authority-1.pem": "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"}
    assert (given["AWS_SECRET_ACCESS_KEY"], given["MEGAFLOW_LEASE_S"]) == ('it is a "secret"', "7.0")
    assert given["MEGAFLOW_HOST_NAME"] == made.name == "machine"
    assert not any("secret@" in value or "not for hosts" in value or "engine:8000" in value for value in given.values())


def test_a_token_works_once_also_for_two_at_once(settings: Settings, database: Database) -> None:
    token = hosts.invite(database)

    def attempt(_: int) -> bool:
        try:
            joining.join(settings, database, token, "machine")
        except NotSignedIn:
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(attempt, range(4))) == [False, False, False, True]
    assert len(hosts.joined(database)) == 1
    with pytest.raises(NotSignedIn, match=r"used at .* makes another"):
        joining.join(settings, database, token, "machine")


def test_wrong_and_expired_tokens_are_refused_by_name(settings: Settings, database: Database) -> None:
    expired = hosts.invite(database, expires_s=60)
    with database.begin() as connection:
        sql(connection, "UPDATE join_tokens SET expires_at = expires_at - interval '2 minutes'")
    for token, why in ((expired, "expired at"), ("mfj_guess", "unknown"), ("", "unknown")):
        with pytest.raises(NotSignedIn, match=why):
            joining.join(settings, database, token, "machine")
    assert hosts.joined(database) == []
    for wrong in ({"expires_s": 0.0}, {"expires_s": float("inf")}, {"name": "a/b"}):
        with pytest.raises(OptionInvalid):
            hosts.invite(database, **wrong)  # type: ignore[arg-type]


def test_a_join_that_fails_leaves_nothing_and_the_token_is_good(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = hosts.invite(database)
    before = _roles(database)
    with monkeypatch.context() as broken:
        broken.setattr(broker_users, "_RULES", ("on", "no-such-rule"))
        with pytest.raises(InstallationFailed, match="ACL SETUSER"):
            joining.join(settings, database, token, "machine")
    assert (hosts.joined(database), _roles(database)) == ([], before)
    assert joining.join(settings, database, token, "machine").name == "machine"


def _roles(database: Database) -> set[str]:
    with database.begin() as connection:
        return set(sql(connection, "SELECT rolname FROM pg_roles").scalars())


def test_the_role_reads_and_writes_what_a_worker_needs_alone(settings: Settings, database: Database) -> None:
    _join(settings, database)
    with _as_host(settings, _account(database, "machine")) as connection:
        connection.execute("UPDATE attempts SET state = state")
        connection.execute("DELETE FROM leases")
        own = (
            "INSERT INTO instances (id, mode, resource_class, slots, handle) VALUES (gen_random_uuid(), %s, %s, 1, %s)"
        )
        connection.execute(own, ("persistent", "standard", "machine:7"))
        assert connection.execute("SELECT provider FROM instances").fetchall() == [("static",)]
        for refused in (
            "SELECT 1 FROM user_tokens", "SELECT 1 FROM join_tokens", "SELECT 1 FROM joined_hosts",
            "DELETE FROM attempts", "SELECT 1 FROM webhooks", "DELETE FROM events",
            "UPDATE limits SET capacity = 9", "CREATE TABLE t (i int)",
            "DELETE FROM artifacts", "UPDATE runs SET name = ''", "CREATE ROLE other",
            "INSERT INTO user_tokens DEFAULT VALUES", "UPDATE instances SET provider = 'docker'",
            "UPDATE instances SET handle = 'megaflow-postgres-1'",
            "INSERT INTO instances (id, provider, mode, resource_class, slots)"
            " VALUES (gen_random_uuid(), 'ec2', 'persistent', 'standard', 1)",
        ):  # fmt: skip
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(refused.encode())


def test_the_user_in_redis_reaches_its_queues_alone(settings: Settings, database: Database) -> None:
    password = _password(made := _join(settings, database))
    with _redis_of(settings, _account(database, made.name), password) as client:
        client.lpush("persistent.standard", "x")
        client.publish(f"megaflow:{settings.installation}:stop", "y")
        client.publish("/0.celeryev/worker.heartbeat", "{}")
        keys = ShellKeys(settings.installation)
        client.lpop(keys.requests(uuid4()))
        client.rpush(keys.shown("s"), "x")
        client.lpop(keys.typed("s"), 64)
        for refused in (
            ("LPUSH", "control", "x"), ("FLUSHALL",), ("KEYS", "*"), ("ACL", "LIST"), ("GET", "limit:a"),
            ("LPOP", ShellKeys("other").typed("s")), ("GET", f"megaflow:{settings.installation}:other"),
            ("PUBLISH", "/0.celery.pidbox", "x"), ("PSUBSCRIBE", "/0.celery.pidbox"),
            ("SUBSCRIBE", "megaflow:other:stop"),
            ("EVAL", "return redis.call('PUBLISH', '/0.celery.pidbox', 'x')", "0"),
        ):  # fmt: skip
            with pytest.raises((redis.exceptions.NoPermissionError, redis.exceptions.ResponseError), match=_DENIED):
                client.execute_command(*refused)
    listener = StopListener(settings.model_copy(update={"broker_url": SecretStr(_broker_url(settings, made))}))
    named = uuid4()

    def told() -> bool:
        nudge(settings, [named])
        return named in listener.listen(0.2)

    try:
        eventually(told)
    finally:
        listener.close()


_DENIED = "(?i)no permissions|can't (run|publish)"


def test_a_worker_with_a_hosts_user_takes_tasks_and_gives_no_commands(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = _broker_url(settings, _join(settings, database))
    theirs = settings.model_copy(update={"broker_url": SecretStr(url), "joined": True})
    request = InstanceRequest(instance_id=uuid4(), mode=InstanceMode.PERSISTENT)
    monkeypatch.setattr(_DrainCheck, "_check", lambda *_: None)
    with redis.Redis.from_url(settings.redis()) as administrator:
        administrator.execute_command("ACL", "LOG", "RESET")
    app = celery_app.build(theirs)
    taken = threading.Event()
    app.task(name="probe")(taken.set)
    with warnings.catch_warnings(action="ignore"):  # of running as root
        worker = _worker(app, request, theirs)
    running = threading.Thread(target=worker.start, daemon=True)
    running.start()
    try:
        celery_app.build(settings).send_task("probe", queue="persistent.standard")
        assert taken.wait(20)
        with redis.Redis.from_url(settings.redis()) as administrator:
            refused = [one for one in administrator.execute_command("ACL", "LOG") if one[b"object"] != b"client"]
        assert refused == []
        with pytest.raises(kombu.exceptions.OperationalError, match="no permissions"):
            app.control.shutdown()
    finally:
        worker.stop()
        running.join(20)


def _broker_url(settings: Settings, made: HostCredentials) -> str:
    """As the host has it, at the tests' server."""
    user = re.search(r"://([^@]+)@", made.variables["MEGAFLOW_BROKER_URL"])
    assert user is not None
    return settings.broker().replace("://", f"://{user[1]}@", 1)


def test_leaving_takes_the_accounts_and_the_sessions(settings: Settings, database: Database) -> None:
    password = _password(_join(settings, database))
    host = hosts.by_name(database, "machine")
    with _as_host(settings, host.account) as connection, _redis_of(settings, host.account, password) as client:
        client.ping()
        joining.revoke(settings, database, host, "its host left")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1 FROM attempts")
        with pytest.raises(redis.RedisError):
            client.ping()
    with pytest.raises(psycopg.OperationalError):
        _as_host(settings, host.account)
    assert hosts.joined(database) == []
    joining.revoke(settings, database, host, "again")


def test_a_host_that_owns_something_is_out_at_once_and_its_role_dropped(settings: Settings, database: Database) -> None:
    _join(settings, database)
    host = hosts.by_name(database, "machine")
    elsewhere = (
        settings.database().replace("postgres@", f"{host.account}@", 1).replace(f"/{_name(database)}?", "/postgres?")
    )
    with psycopg.connect(elsewhere, autocommit=True) as other, _as_host(settings, host.account) as connection:
        connection.execute("SELECT lo_create(0)")
        number = other.execute("SELECT lo_create(0)").fetchone()
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("CREATE TEMP TABLE t (i int)")
        joining.revoke(settings, database, host, "its host left")
        for ended in (connection, other):
            with pytest.raises(psycopg.OperationalError):
                ended.execute("SELECT 1")
    assert hosts.joined(database) == []
    # What it owns in another database keeps the role, and nothing else.
    assert host.account in _roles(database)
    with pytest.raises(psycopg.OperationalError, match="not permitted to log in"):
        _as_host(settings, host.account)
    assert not hosts.drop_roles(database)
    assert number is not None
    with psycopg.connect(elsewhere.replace(f"{host.account}@", "postgres@"), autocommit=True) as administrator:
        administrator.execute("SELECT lo_unlink(%s)", number)
    stop = threading.Event()
    keeper = threading.Thread(target=joining.keep, args=(settings, database, stop))
    keeper.start()
    try:
        eventually(lambda: host.account not in _roles(database))
    finally:
        stop.set()
        keeper.join()


def test_without_a_wait_a_host_is_out_whatever_it_locks_and_the_keys_of_all_are_named(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings.model_copy(update={"registry_auth": SecretStr("USER:PASSWORD")})
    _join(settings, database)
    monkeypatch.setattr("app.client.load", lambda: settings)
    with _as_host(settings, _account(database, "machine")) as connection:
        connection.execute("BEGIN")
        connection.execute("LOCK TABLE hosts, tasks")
        leave("machine", wait=0)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert hosts.joined(database) == []
    said = " ".join(capsys.readouterr().err.split())
    assert "not revoked" in said
    assert "AWS_ACCESS_KEY_ID, MEGAFLOW_REGISTRY_AUTH;" in said


def _name(database: Database) -> str:
    return str(database.engine.url.database)


@pytest.fixture
def owner(settings: Settings, database: Database) -> Iterator[tuple[Settings, Database]]:
    """An installation as the guide sets it up: its user owns its database, makes roles, and is no superuser."""
    name = f"owner_{uuid4().hex[:12]}"
    with psycopg.connect(settings.database(), autocommit=True) as administrator:
        administrator.execute(f"CREATE ROLE {name} LOGIN CREATEROLE".encode())
        administrator.execute(f"CREATE DATABASE {name} OWNER {name}".encode())
        url = settings.database().replace("postgres@", f"{name}@", 1).replace(f"/{_name(database)}?", f"/{name}?")
        schema.migrate(url)
        theirs = Database(url)
        yield settings.model_copy(update={"database_url": SecretStr(url)}), theirs
        theirs.close()
        administrator.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
        administrator.execute(f"DROP ROLE {name}".encode())


def test_an_owner_that_is_no_superuser_ends_sessions_and_drops_what_they_own(owner: tuple[Settings, Database]) -> None:
    settings, database = owner
    _join(settings, database)
    host = hosts.by_name(database, "machine")
    url = database.url.replace(f"{_name(database)}@", f"{host.account}@", 1)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SELECT lo_create(0), pg_advisory_lock(1)")
        joining.revoke(settings, database, host, "its host left")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with database.begin() as ours:
        assert sql(ours, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 1").scalar_one() == 0
        assert sql(ours, "SELECT count(*) FROM pg_largeobject_metadata").scalar_one() == 0
    assert host.account not in _roles(database)


def test_redis_gets_its_users_back_and_loses_those_of_left_hosts(settings: Settings, database: Database) -> None:
    password = _password(_join(settings, database))
    account = _account(database, "machine")
    stray = f"mf_{settings.installation}_0123456789ab"
    broker_users.remove(settings, account)
    broker_users.add(settings, stray, hosts.digest("x"))
    assert broker_users.restore(settings, hosts.broker_users(database)) == sorted([account, stray])
    with _redis_of(settings, account, password) as client:
        assert client.ping()
    assert broker_users.restore(settings, hosts.broker_users(database)) == []


@pytest.mark.parametrize("query", ["user=owner&password=SECRET", "host=/tmp", "passfile=/root/.pgpass"])
def test_what_counts_for_more_than_a_hosts_own_account_is_refused(query: str) -> None:
    with pytest.raises(SettingsInvalid, match="behind the") as refused:
        joining._signed("MEGAFLOW_DATABASE_URL", f"postgresql://db.test/megaflow?{query}", "mf_a", "own", {})
    assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"join_settings": None}, "DATABASE_URL"),
        ({"gateway_url": ()}, "GATEWAY_URL"),
        ({"gateway_url": ("http://127.0.0.1:8766",)}, "GATEWAY_URL"),
        ({"artifacts_url": None}, "ARTIFACTS_URL"),
    ],
)
def test_what_no_other_machine_could_reach_is_refused(
    settings: Settings, database: Database, changes: dict[str, object], named: str
) -> None:
    wrong = settings.model_copy(update=changes)
    with pytest.raises(SettingsInvalid, match=named):
        joining.check(wrong)
    token = hosts.invite(database)
    with pytest.raises(SettingsInvalid, match=named):
        joining.join(wrong, database, token, "machine")
    assert joining.join(settings, database, token, "machine").name == "machine"


@pytest.mark.parametrize("line", ["OPENAI_API_KEY=sk-1", "MEGAFLOW_NONSENSE=1", "PATH=/x"])
def test_keys_of_providers_are_not_for_hosts(settings: Settings, tmp_path: Path, line: str) -> None:
    (tmp_path / "wrong.env").write_text(f"{line}\n")
    with pytest.raises(SettingsInvalid, match="JOIN_SETTINGS"):
        joining.check(settings.model_copy(update={"join_settings": tmp_path / "wrong.env"}))


def test_a_private_key_is_not_for_hosts(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "authority.pem").write_text("-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(SettingsInvalid, match="private key"):
        joining.check(settings)


def test_over_http_a_machine_joins_and_leaves(settings: Settings, database: Database) -> None:
    token = hosts.invite(database, instance_id=uuid4())
    with TestClient(application(settings, database), base_url="http://127.0.0.1") as client:

        def post(path: str, secret: str, **fields: object) -> tuple[int, dict[str, object]]:
            reply = client.post(f"/api/v1{path}", headers={"authorization": f"Bearer {secret}"}, json=fields or None)
            return reply.status_code, reply.json()

        assert post("/hosts/join", "mfj_wrong", called="machine")[0] == 401
        status, made = post("/hosts/join", token, called="machine")
        assert (status, made["name"]) == (200, "machine")
        assert post("/hosts/join", token, called="machine")[0] == 401
        assert post("/hosts/leave", token)[0] == 401
        assert post("/hosts/leave", str(made["secret"])) == (200, {"subject": "machine"})
        assert post("/hosts/leave", str(made["secret"]))[0] == 401
    assert hosts.joined(database) == []


def test_nothing_is_half_left_when_redis_is_away(settings: Settings, database: Database, tmp_path: Path) -> None:
    _join(settings, database)
    host = hosts.by_name(database, "machine")
    away = settings.model_copy(update={"broker_url": None, "home": tmp_path})
    with pytest.raises(MegaFlowError):
        joining.revoke(away, database, host, "its host left")
    assert hosts.joined(database) == []
    assert broker_users.restore(settings, hosts.broker_users(database)) == [host.account]


def test_sessions_that_may_not_be_ended_are_named_and_the_rights_are_gone(
    owner: tuple[Settings, Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, database = owner
    _join(settings, database)
    host = hosts.by_name(database, "machine")
    url = database.url.replace(f"{_name(database)}@", f"{host.account}@", 1)
    with psycopg.connect(url, autocommit=True) as connection, capture_logs() as logs:
        with monkeypatch.context() as without:
            without.setattr(host_roles, "lock_out", lambda *_: None)
            joining.revoke(settings, database, host, "its host left")
        assert [(one["log_level"], one["event"]) for one in logs][:1] == [("error", "hosts.sessions_stay")]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("SELECT 1 FROM attempts")
    assert hosts.joined(database) == []
    joining.revoke(settings, database, host, "again")
    assert host.account not in _roles(database)
