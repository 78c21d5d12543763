"""Quotas, limits and the semaphores of the ledger, against a real PostgreSQL."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis.asyncio
from sqlalchemy import text

from app.environments.runtimes.docker.provider import DockerProvider
from app.environments.runtimes.local.environment import LocalProvider
from app.errors import DatabaseUnavailable, EnvironmentFailed, ImageUnavailable, LimitInvalid, QuotaExceeded
from app.host.slots import Semaphore
from app.images.layer_store import ImageStore
from app.images.unpacked_images import OciImages
from app.ledger import attempts, audit, limits, quotas, semaphores, users
from app.ledger.database import Database, Listener
from app.ledger.limits import HOLDS
from app.ledger.quotas import Quota
from app.model_service.limiter import ModelLimiter, ledger_capacities, prefix_of
from app.models.outcome import Phase
from app.models.spec import Build, Bundle, EnvironmentKind, EnvironmentSpec
from app.settings import Settings
from app.workers.semaphores import LedgerSemaphore
from megaflow.contract.environments.fixture import tar_of
from tests.building import claimed, failed, new_id
from tests.integration.command import CommandLine
from tests.integration.docker_fixture import tags_of
from tests.integration.fake_registry import standing
from tests.integration.rows import a_run, a_task, ago, an_attempt, an_instance, facts, insert, kill_sessions, one, write
from tests.waiting import eventually


def _book(database: Database) -> quotas.Quotas:
    with database.begin() as connection:
        return quotas.load(connection)


def test_a_user_without_a_row_has_that_of_everybody_and_failing_that_no_quota(database: Database) -> None:
    assert _book(database).of("alice") == Quota("alice")
    quotas.set_quota(database, "*", running=5, weight=2)
    quotas.set_quota(database, "bob", running=None)
    book = _book(database)
    assert book.of("alice") == Quota("alice", weight=2.0, running=5)
    assert book.of("bob") == Quota("bob", weight=2.0)


_IMPOSSIBLE: list[tuple[str, object]] = [
    ("running", -1), ("pending", 1.5), ("spend_usd", float("nan")), ("spend_usd", -0.01),
    ("weight", 0), ("weight", float("inf")), ("tasks", 3),
]  # fmt: skip


def test_an_impossible_quota_is_refused_and_changes_nothing(database: Database) -> None:
    quotas.set_quota(database, "alice", running=7, instances=2)
    for (what, value), user in itertools.product(_IMPOSSIBLE, ("alice", "bob")):
        with pytest.raises(LimitInvalid):
            quotas.set_quota(database, user, **({"instances": 5} | {what: value}))
    assert _book(database).quotas == {"alice": Quota("alice", running=7, instances=2)}
    assert len(facts(database)) == 1


def test_more_waiting_tasks_than_the_quota_are_refused(database: Database) -> None:
    quotas.set_quota(database, "alice", pending=3)
    run = a_run(database)
    a_task(database, run)
    a_task(database, run, in_line=False)
    a_task(database, run, state="admitted")
    a_task(database, run, user="bob")
    with database.begin() as connection:
        quotas.check_pending(connection, "alice", 1)
        quotas.check_pending(connection, "bob", 1_000_000)
        with pytest.raises(QuotaExceeded, match="at most 3 waiting tasks, found 2 and 2 more"):
            quotas.check_pending(connection, "alice", 2)


def _checked(database: Database, user: str) -> None:
    with database.begin() as connection:
        quotas.check_pending(connection, user, 1)


def test_two_enqueues_of_one_user_cannot_take_the_same_room(database: Database) -> None:
    quotas.set_quota(database, "*", pending=1)  # everybody's row: it is not its lock that keeps them apart
    task = a_task(database, a_run(database), user="carol")
    with ThreadPoolExecutor(1) as threads:
        with database.begin() as connection:
            quotas.check_pending(connection, "alice", 1)
            _checked(database, "bob")  # does not wait for alice
            second = threads.submit(_checked, database, "alice")
            time.sleep(0.2)
            assert not second.done(), "the second has to wait for the first's commit"
            connection.execute(text("UPDATE tasks SET user_name = 'alice' WHERE id = :id"), {"id": task})
        with pytest.raises(QuotaExceeded):
            second.result(5)


def test_what_attempts_cost_adds_up(database: Database) -> None:
    first, second = claimed(database), claimed(database)
    for claim, cost in ((first, 0.25), (first, 0.5), (second, 0.125), (second, 0.0)):  # of the attempt, so far
        attempts.record_phase(database, claim, Phase.AGENT_STARTED, cost_usd=cost)
    user = one(database, "SELECT DISTINCT user_name FROM tasks").user_name
    assert _book(database).spent(user) == 0.625
    assert _book(database).spent("bob") == 0.0


LIMIT = "image_builds:here"


def _semaphore(
    database: Database, *, lease_s: float = 30.0, stopped: Callable[[], bool] = lambda: False
) -> LedgerSemaphore:
    return LedgerSemaphore(database, attempt_id=new_id(), instance_id=new_id(), lease_s=lease_s, stopped=stopped)


class Named:
    """A semaphore that remembers what it was asked for."""

    def __init__(self, semaphore: LedgerSemaphore) -> None:
        self.semaphore = semaphore
        self.names: set[str] = set()

    def hold(self, limit: str, capacity: int | None, *, timeout_s: float) -> AbstractContextManager[None]:
        self.names.add(limit)
        return self.semaphore.hold(limit, capacity, timeout_s=timeout_s)


def _rows(database: Database) -> int:
    return int(one(database, "SELECT count(*) FROM semaphore_holders").count)


def test_never_more_are_in_than_allowed_whoever_comes_and_goes_at_once(database_url: str) -> None:
    inside, most, lock = 0, 0, threading.Lock()
    database = Database(database_url, pool_size=12)

    def one_after_the_other(_: int) -> None:
        nonlocal inside, most
        semaphore = _semaphore(database)
        for _ in range(6):
            with semaphore.hold(LIMIT, 3, timeout_s=30):
                with lock:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.02)
                with lock:
                    inside -= 1

    try:
        with ThreadPoolExecutor(10) as threads:
            list(threads.map(one_after_the_other, range(10)))
        assert 0 < most <= 3
        assert _rows(database) == 0
    finally:
        database.close()


@pytest.mark.parametrize("how", ["release", "limit of all"])
def test_a_waiting_holder_is_woken_by_a_release_and_by_a_higher_capacity(database: Database, how: str) -> None:
    first, entered, semaphore = new_id(), threading.Event(), _semaphore(database)
    semaphores.ask(database, LIMIT, first, capacity_default=1, lease_s=30)

    def enter() -> None:
        with semaphore.hold(LIMIT, 1, timeout_s=20):
            entered.set()

    waiting = threading.Thread(target=enter)
    waiting.start()
    waiting_row = "SELECT count(*) FROM semaphore_holders WHERE granted_at IS NULL"
    eventually(lambda: one(database, waiting_row).count == 1)  # waiting is visible
    assert not entered.wait(0.3)
    match how:
        case "release":
            semaphores.release(database, LIMIT, first)
        case _:
            limits.set_limit(database, "image_builds:*", 2)
    assert entered.wait(20)
    waiting.join(20)
    assert semaphore.waited[LIMIT] >= 0.3


def test_an_attempt_that_must_stop_does_not_go_on_waiting(database: Database) -> None:
    semaphores.ask(database, LIMIT, new_id(), capacity_default=1, lease_s=30)
    told = threading.Event()
    threading.Timer(0.3, told.set).start()
    begun = time.monotonic()
    semaphore = _semaphore(database, stopped=told.is_set)
    with pytest.raises(TimeoutError, match="told to stop"), semaphore.hold(LIMIT, 1, timeout_s=60):
        pytest.fail("there was no room")
    assert time.monotonic() - begun < 20
    assert _rows(database) == 1


def test_the_sweep_takes_what_lapsed_and_what_outlived_its_attempt_or_instance(database: Database) -> None:
    run = a_run(database)
    live = an_attempt(database, a_task(database, run, state="running"), state="running")
    ended = an_attempt(database, a_task(database, run, state="running"), state="lost")
    gone = an_instance(database, state="terminated")
    for about in ({"attempt_id": live}, {"attempt_id": ended}, {"instance_id": gone}, {}):
        semaphores.ask(database, LIMIT, new_id(), capacity_default=9, lease_s=30, **about)
    neither = "attempt_id IS NULL AND instance_id IS NULL"
    write(database, f"UPDATE semaphore_holders SET expires_at = :past WHERE {neither}", past=ago(1))
    assert semaphores.sweep(database) == 3
    assert one(database, "SELECT attempt_id FROM semaphore_holders").attempt_id == live


def test_what_an_attempt_holds_is_renewed_and_ended_with_it(database: Database) -> None:
    claim, other = claimed(database), claimed(database)
    for owner in (claim, claim, other):
        semaphores.ask(database, LIMIT, new_id(), capacity_default=9, lease_s=1, attempt_id=owner.attempt_id)
    attempts.renew(database, [claim.attempt_id], lease_s=600)
    far = "SELECT count(*) FROM semaphore_holders WHERE expires_at > clock_timestamp() + interval '500 s'"
    assert one(database, far).count == 2
    failed(database, claim)
    assert one(database, "SELECT attempt_id FROM semaphore_holders").attempt_id == other.attempt_id


_HOLD_AND_SLEEP = """
import sys, time, uuid
from app.ledger.database import Database
from app.workers.semaphores import LedgerSemaphore
database, attempt_id = Database(sys.argv[1]), uuid.UUID(sys.argv[2])
semaphore = LedgerSemaphore(database, attempt_id=attempt_id, instance_id=uuid.uuid4(), lease_s=1.5)
with semaphore.hold("image_builds:here", 1, timeout_s=5):
    print("in", flush=True)
    time.sleep(60)
"""


def test_the_place_of_a_killed_process_is_free_after_its_lease(database: Database, database_url: str) -> None:
    command = [sys.executable, "-c", _HOLD_AND_SLEEP, database_url, str(new_id())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        os.kill(process.pid, signal.SIGKILL)
    semaphore = _semaphore(database)
    with semaphore.hold(LIMIT, 1, timeout_s=10):
        assert _rows(database) == 1
    assert 0.5 < semaphore.waited[LIMIT] < 8


def _a_local_task(folder: Path) -> tuple[Settings, EnvironmentSpec, Callable[[Bundle], bytes]]:
    content = tar_of({"setup.sh": b"true\n"})
    spec = EnvironmentSpec(kind=EnvironmentKind.LOCAL, build=Build(context=_bundle(content)))
    return Settings(home=folder, environment_starts=1), spec, lambda _: content


def test_an_environment_waits_at_the_ledgers_gate_and_its_wait_is_known(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.workers.semaphores._NOTED_S", 0.3)  # a full host takes longer to answer
    settings, spec, fetch = _a_local_task(tmp_path)
    semaphore = _semaphore(database)
    named = Named(semaphore)
    provider = LocalProvider(settings, fetch_bundle=fetch, semaphore=named)
    provider.create(spec, tags_of("test"), timeout_s=30).destroy()
    (name,) = named.names
    assert limits.kind_of(name)[0] == "environment_starts"
    assert semaphore.waited == {}, "a place had at once is no wait"
    assert _rows(database) == 0
    semaphores.ask(database, name, new_id(), capacity_default=1, lease_s=30)
    with pytest.raises(EnvironmentFailed, match=name):
        provider.create(spec, tags_of("test"), timeout_s=0.5)
    assert semaphore.waited[name] > 0.3
    limits.set_limit(database, name, 2)
    provider.create(spec, tags_of("test"), timeout_s=30).destroy()


def _bundle(content: bytes) -> Bundle:
    return Bundle(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))


@pytest.mark.docker
def test_builds_and_starts_on_an_engine_pass_the_gate_of_its_host(
    database: Database, home_folder: Path, base_image_tag: str
) -> None:
    settings = Settings(home=home_folder, base_image=base_image_tag, installation=f"test-{new_id().hex[-8:]}")
    content = tar_of({"Dockerfile": f"FROM scratch\nLABEL once={new_id()}\nCOPY Dockerfile /\n".encode()})
    semaphore = Named(_semaphore(database))
    provider = DockerProvider(settings, fetch_bundle=lambda _: content, semaphore=semaphore)
    host = provider._engine.api.info()["Name"]
    image = provider.prepare_image(EnvironmentSpec(build=Build(context=_bundle(content))), timeout_s=60)
    provider._engine.api.remove_image(image)
    provider.create(EnvironmentSpec(image=base_image_tag), tags_of("test"), timeout_s=60).destroy()
    assert semaphore.names == {f"image_builds:{host}", f"environment_starts:{host}"}
    assert _rows(database) == 0


def _without_engine(home: Path, semaphore: Semaphore, **changes: object) -> OciImages:
    settings = Settings(home=home, docker_url="unix:///nowhere", **changes)
    return OciImages(settings, ImageStore(home), fetch_bundle=lambda _: b"", semaphore=semaphore)


def test_a_pull_without_an_engine_passes_the_gates_of_its_host_and_its_registry(
    database: Database, home_folder: Path
) -> None:
    semaphore, host = Named(_semaphore(database)), f"image_builds:{socket.gethostname()}"
    with standing() as fake:
        spec, registry = EnvironmentSpec(image=f"{fake.host}/x"), f"image_pulls:{fake.host}"
        images = _without_engine(home_folder, semaphore)
        for limit in (host, registry):
            limits.set_limit(database, limit, 0)
            with pytest.raises(ImageUnavailable, match=f"no place at {limit}"):
                images.ensure(spec, timeout_s=0.5)
            assert fake.asked == []
            limits.clear_limit(database, limit)
        assert images.ensure(spec, timeout_s=30).id == fake.image_id
    assert semaphore.names == {host, registry}
    assert _rows(database) == 0
    again = Named(_semaphore(database))
    assert _without_engine(home_folder, again).ensure(spec, timeout_s=5).id == fake.image_id
    assert again.names == set(), "what is here takes no place"


def test_the_fleets_pulls_from_one_registry_have_a_bound_that_is_shown_and_audited(database: Database) -> None:
    settings = Settings(image_pulls=3)
    for _ in range(4):
        semaphores.ask(database, "image_pulls:ghcr.io", new_id(), capacity_default=settings.image_pulls, lease_s=30)
    shown = {use.name: use for use in limits.show(database, settings)}["image_pulls:ghcr.io"]
    assert (shown.used, shown.waiting, shown.capacity, shown.source) == (3, 1, 3, "default")
    limits.set_limit(database, "image_pulls:*", 2)
    assert audit.look(database, settings).findings[0].ids == ("image_pulls:ghcr.io: 3 of 2",)


def test_limits_are_shown_with_who_uses_them_and_changed_live(megaflow: CommandLine, database: Database) -> None:
    run = a_run(database)
    attempt = an_attempt(database, a_task(database, run, state="running"), state="running", dispatched_at=ago(30))
    a_task(database, run)
    a_task(database, run, mode="auto")
    for _ in range(4):
        semaphores.ask(database, LIMIT, new_id(), capacity_default=2, lease_s=30, attempt_id=attempt)
    megaflow("limits", "set", "model_tokens:user:*", "50000")
    shown = {use["name"]: use for use in megaflow.json("limits")}
    here = shown[LIMIT]
    assert (here["used"], here["waiting"], here["capacity"], here["source"]) == (2, 2, 2, "default")
    slots = shown["slots:ephemeral.standard"]
    assert (slots["used"], slots["waiting"], slots["source"]) == (1, 2, "class")
    assert (shown["model_tokens:user:*"]["capacity"], shown["model_tokens:user:*"]["used"]) == (50000, None)
    assert megaflow.json("limits", "set", LIMIT, "4") == {"name": LIMIT, "capacity": 4}
    shown = {use["name"]: use for use in megaflow.json("limits")}
    assert (shown[LIMIT]["capacity"], shown[LIMIT]["source"]) == (4, "set")
    assert LIMIT in megaflow("limits")
    megaflow("limits", "clear", LIMIT, "--reason", "was a trial")
    found = users.actions(database, subjects=[LIMIT])
    assert [(one.reason, one.data) for one in found] == [("was a trial", {"capacity": None}), ("", {"capacity": 4})]
    cleared = ("limit.cleared", {"limit": LIMIT})
    assert facts(database)[-2:] == [("limit.set", {"limit": LIMIT, "capacity": 4}), cleared]
    shown = {use["name"]: use for use in megaflow.json("limits")}
    assert shown[LIMIT]["source"] == "default"


def test_model_calls_are_among_the_limits(
    megaflow: CommandLine, database: Database, settings: Settings, redis_url: str
) -> None:
    megaflow("limits", "set", "model_concurrency:user:*", "5")

    async def calling() -> Any:
        client = redis.asyncio.Redis.from_url(redis_url)
        limiter = ModelLimiter(client, ledger_capacities(database), prefix=prefix_of(settings))
        try:
            async with limiter.call(run_id="r", user="alice", model="m", tokens=10):
                return await asyncio.to_thread(megaflow.json, "limits")
        finally:
            await limiter.close()

    shown = {use["name"]: use for use in asyncio.run(calling())}
    alice = shown["model_concurrency:user:alice"]
    assert (alice["used"], alice["waiting"], alice["capacity"], alice["source"]) == (1, 0, 5, "set")


_REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("limits", "set", "image_bilds:h", "3"), "unknown limit 'image_bilds:h'"),
    (("limits", "set", "image_builds", "3"), "unknown limit 'image_builds'"),
    (("limits", "set", "slots:ephemeral.standard", "3"), "megaflow classes set"),
    (("limits", "set", "slots:grading.standard", "3"), "`MEGAFLOW_GRADING_INSTANCES=N MEGAFLOW_GRADING_SL"),
    (("limits", "set", "quota:running:alice", "3"), "megaflow quota set"),
    (("limits", "set", LIMIT, "-3"), "0 or more, found -3"),
    (("limits", "set", LIMIT, "1.5"), "found 1.5"),
    (("limits", "set", LIMIT, "nan"), "found nan"),
    (("limits", "set", LIMIT, "inf"), "found inf"),
    (("limits", "set", LIMIT, "many"), "expected a number, found 'many'"),
    (("limits", "clear", LIMIT), "has not been set"),
    (("quota", "set", "alice", "--running", "-1"), "running: Input should be greater than or equal to 0, found -1"),
    (("quota", "set", "alice", "--weight", "0"), "weight: Input should be greater than"),
    (("quota", "set", "alice", "--spend", "much"), "expected a number, found 'much'"),
    (("quota", "set", "alice"), "expected something to set"),
    (("quota", "clear", "alice"), "no quota of their own"),
]


def test_bad_input_is_refused_with_a_reason(megaflow: CommandLine, database: Database) -> None:
    for arguments, said in _REFUSED:
        with pytest.raises(LimitInvalid, match=said):
            megaflow(*arguments)
    for capacity in (True, "3"):
        with pytest.raises(LimitInvalid):
            limits.set_limit(database, LIMIT, capacity)  # type: ignore[arg-type]
    assert one(database, "SELECT count(*) FROM limits").count == 0
    assert facts(database) == []


def test_quotas_are_shown_with_their_use_and_changed_live(megaflow: CommandLine, database: Database) -> None:
    a_task(database, a_run(database))
    megaflow("quota", "set", "*", "--running", "10")
    options = ("--pending", "9", "--instances", "4", "--spend", "2.5", "--weight", "2")
    changed = megaflow.json("quota", "set", "alice", *options)
    kept = {"running": 10, "pending": 9, "instances": 4, "spend_usd": 2.5}
    assert changed == {"user_name": "alice", "weight": 2.0} | kept
    megaflow("quota", "set", "alice", "--pending", "none")
    shown = {use["user"]: use for use in megaflow.json("quota")}
    assert shown["alice"]["quota"]["pending"] is None
    assert (shown["alice"]["pending"], shown["alice"]["own"]) == (1, True)
    insert(database, "accounts", user_name="alice", spent_usd=1.25)
    assert "$1.25 of $2.50" in megaflow("quota")
    megaflow("quota", "clear", "alice")
    trail = [(one.action, one.reason) for one in users.actions(database, subjects=["alice"])]
    assert trail == [("quota.cleared", ""), ("quota.set", ""), ("quota.set", "")]
    shown = {use["user"]: use for use in megaflow.json("quota")}
    assert (shown["alice"]["own"], shown["alice"]["quota"]["running"], shown["alice"]["spent_usd"]) == (False, 10, 1.25)


def test_renewals_sweeps_and_askers_never_wait_for_each_other_for_good(database_url: str) -> None:
    """Many rows, touched in every order at once: a deadlock would surface as an error here."""
    database = Database(database_url, pool_size=8)
    attempt, holders, until = new_id(), [new_id() for _ in range(12)], time.monotonic() + 2.0

    def asking(number: int) -> None:
        while time.monotonic() < until:
            for holder in holders[number::2]:
                semaphores.ask(database, LIMIT, holder, capacity_default=3, lease_s=0.02, attempt_id=attempt)

    def renewing(_: int) -> None:
        while time.monotonic() < until:
            semaphores.renew(database, holders[::-1], lease_s=0.02)
            with database.begin() as connection:
                semaphores.renew_of(connection, [attempt], lease_s=0.02)

    def sweeping(_: int) -> None:
        while time.monotonic() < until:
            semaphores.sweep(database)

    try:
        with ThreadPoolExecutor(5) as threads:
            done = [threads.submit(work, n) for n, work in enumerate((asking, asking, renewing, renewing, sweeping))]
            for work in done:
                work.result()
    finally:
        database.close()


def test_a_ledger_that_does_not_answer_is_an_infrastructure_fault_after_a_bounded_wait() -> None:
    away = Database("postgresql://postgres@/none?host=/nowhere", pooled=False)
    begun = time.monotonic()
    with pytest.raises(DatabaseUnavailable), _semaphore(away, lease_s=0.5).hold(LIMIT, 1, timeout_s=60):
        pytest.fail("no semaphore gave a place")
    assert time.monotonic() - begun < 10


def test_sessions_that_are_killed_while_waiting_and_holding_cost_nothing(database: Database) -> None:
    first, entered = new_id(), threading.Event()
    semaphores.ask(database, LIMIT, first, capacity_default=1, lease_s=30)

    def enter() -> None:
        with _semaphore(database).hold(LIMIT, 1, timeout_s=20):
            entered.set()

    waiting = threading.Thread(target=enter)
    waiting.start()
    time.sleep(0.3)
    for _ in range(3):
        kill_sessions(database)
        time.sleep(0.1)
    assert not entered.is_set()
    semaphores.release(database, LIMIT, first)
    assert entered.wait(10)
    waiting.join(10)
    assert _rows(database) == 0


def test_a_listener_whose_session_ends_before_it_listens_says_so_and_connects_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = database.raw

    def ended(options: str = "") -> psycopg.Connection:
        connection = connect(options)
        kill_sessions(database, "application_name = 'megaflow-listen'")
        return connection

    listener = Listener(database, HOLDS)
    monkeypatch.setattr(database, "raw", ended)
    with pytest.raises(DatabaseUnavailable):
        listener.wait(1)
    monkeypatch.undo()
    assert listener.wait(1) is None, "it is a new connection"
    listener.close()
