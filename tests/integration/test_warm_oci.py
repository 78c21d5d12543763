"""Ready environments between real processes: kept by one, taken by another, and what is left when one is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.environments.base import Tags
from app.environments.oci import OciProvider, Records, records
from app.environments.oci.records import Record
from app.environments.pool import EnvironmentPool
from app.environments.sweeper import Sweeper
from app.environments.warm import Keeper, Key, Warm, Wish, wire
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.integration.oci_ground import alive, left_over, tags
from tests.integration.oci_ground import oci as oci
from tests.integration.oci_ground import oci_cache as oci_cache
from tests.integration.oci_ground import oci_programs as oci_programs
from tests.integration.oci_ground import oci_settings as oci_settings
from tests.integration.oci_ground import tiny as tiny
from tests.patience import eventually

ROOT = Path(__file__).parents[2]

KEEPER = """
import sys, threading
from pathlib import Path
from app.environments.oci import OciProvider
from app.environments.warm import Keeper, Wish, ahead
from app.models.spec import EnvironmentSpec
from app.settings import Settings

home, installation, spec, count, life_s = sys.argv[1:]
ahead.LIFE_S = float(life_s)
settings = Settings(home=Path(home), installation=installation, docker_url="unix:///nowhere")
provider = OciProvider(settings, fetch_bundle=lambda bundle: b"")
wishes = [Wish(EnvironmentSpec.model_validate_json(spec), 300.0)] * int(count)
Keeper(settings.home, installation, queue=lambda: wishes, provide=lambda kind: provider, most=int(count)).run(
    threading.Event()
)
"""

TAKER = """
import json, sys, time, uuid
from pathlib import Path
from uuid import UUID
from app.environments.base import Tags
from app.environments.oci import OciProvider
from app.environments.warm import Key, Warm
from app.models.spec import EnvironmentSpec
from app.settings import Settings

home, installation, spec, instance = sys.argv[1:]
settings = Settings(home=Path(home), installation=installation, docker_url="unix:///nowhere")
provider = OciProvider(settings, fetch_bundle=lambda bundle: b"")
wanted = EnvironmentSpec.model_validate_json(spec)
key = Key.of(wanted, provider.prepare_image(wanted, timeout_s=10))
tags = Tags(installation, UUID(instance), uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), time.time() + 600)
taken = Warm(settings.home).take(provider, wanted, key, tags)
result = taken.run("echo $GIVEN; cat /made 2>/dev/null", timeout_s=10)
print(json.dumps([taken.id, taken.describe()["path"], result.stdout.decode()]), flush=True)
sys.stdin.read()
"""


@contextmanager
def keeping(settings: Settings, oci: OciProvider, *specs: EnvironmentSpec, most: int = 4) -> Iterator[list[Wish]]:
    """A keeper in this process, of what the queue wants; the test may change that."""
    wishes, stop = [Wish(spec, 30.0) for spec in specs], threading.Event()
    kept = Keeper(settings.home, settings.installation, queue=lambda: list(wishes), provide=lambda kind: oci, most=most)
    thread = threading.Thread(target=kept.run, args=(stop,))
    thread.start()
    try:
        yield wishes
    finally:
        stop.set()
        thread.join(20)


@contextmanager
def another_process(
    script: str, settings: Settings, spec: EnvironmentSpec, *words: str
) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-c", script, str(settings.home), settings.installation, spec.model_dump_json(), *words]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def ready(settings: Settings) -> list[Record]:
    """What exists and nobody has, its making over."""
    return [
        one
        for one in Records(settings.home.resolve()).all()
        if "megaflow.ready" in one.labels and one.deadline_unix_s < time.time() + 121
    ]


def key_of(oci: OciProvider, spec: EnvironmentSpec) -> Key:
    return Key.of(spec, oci.prepare_image(spec, timeout_s=10))


def test_another_process_takes_a_ready_one_and_another_is_made(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    instance = uuid.uuid4()
    with keeping(oci_settings, oci, tiny, most=1):
        eventually(lambda: len(ready(oci_settings)) == 1)
        (before,) = ready(oci_settings)
        with another_process(TAKER, oci_settings, tiny, str(instance)) as taker:
            assert taker.stdout is not None
            answer = next(line for line in taker.stdout if line.startswith(b"["))
            identity, path, said = json.loads(answer)
            assert (identity, path, said) == (before.id, "warm", "by the task\n")
            eventually(lambda: [one.id for one in ready(oci_settings)] not in ([], [identity]))
            labels = {one.id: one.labels for one in Records(oci_settings.home.resolve()).all()}[identity]
            assert labels["megaflow.instance"] == str(instance)
            assert "megaflow.attempt" in labels
    assert [one.id for one in Records(oci_settings.home.resolve()).all()] == [identity]
    assert Sweeper(oci_settings).sweep({uuid.uuid4()}, ended=[instance]).removed == 1
    assert (left_over(oci_settings.home), alive(oci_settings.home)) == ([], [])


def test_set_up_commands_have_run_when_it_is_handed_out_and_it_comes_back_clean(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    spec = tiny.model_copy(update={"setup": ("echo by the set-up > /made",)})
    pool = EnvironmentPool(max_idle=2, warm=Warm(oci_settings.home))
    image_id = oci.prepare_image(spec, timeout_s=10)

    def acquire() -> tuple[str, str, str]:
        found, _ = pool.acquire(oci, spec, tags(oci_settings.installation), image_id, timeout_s=30, allow_reuse=True)
        made, own = (found.run(f"cat {path}", timeout_s=10).stdout.decode() for path in ("/made", "/own"))
        assert own == ""
        found.put("/own", b"left by a task")
        found.put("/made", b"changed by a task")
        proof = pool.release(found, reuse=True)
        assert proof is not None
        assert proof.clean
        return found.id, found.describe()["path"], made

    with keeping(oci_settings, oci, spec, spec, most=2):
        eventually(lambda: len(ready(oci_settings)) == 2)
        waiting = {one.id for one in ready(oci_settings)}
        first = acquire()
        assert first[0] in waiting
        assert first[2] == "by the set-up\n"
        assert acquire() == (first[0], "recycled", "by the set-up\n")
    pool.close()


def test_what_is_cold_goes_for_what_is_needed(oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec) -> None:
    other = tiny.model_copy(update={"env": {**tiny.env, "OTHER": "1"}})
    with keeping(oci_settings, oci, tiny, tiny, most=2) as wishes:
        eventually(lambda: len(ready(oci_settings)) == 2)
        before = {one.id for one in ready(oci_settings)}
        wishes[:] = [Wish(other, 30.0), Wish(tiny, 30.0)]
        eventually(lambda: len({one.id for one in ready(oci_settings)} - before) == 1)
        assert len({one.id for one in ready(oci_settings)} & before) == 1
        found = Warm(oci_settings.home).take(oci, other, key_of(oci, other), tags(oci_settings.installation))
        assert found is not None
        assert found.run("echo $OTHER", timeout_s=10).stdout == b"1\n"
        found.destroy()


def test_a_keeper_that_is_killed_leaves_nothing_for_longer_than_its_deadline_and_another_takes_its_place(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    sweeper = Sweeper(oci_settings)
    with another_process(KEEPER, oci_settings, tiny, "2", "2") as keeper:
        eventually(lambda: len(ready(oci_settings)) == 2 and wire.address(oci_settings.home).exists())
        keeper.kill()
        keeper.wait()
    assert sweeper.sweep(set()).removed == 0, "somebody may take it yet"
    orphans = {one.id for one in ready(oci_settings)}
    with keeping(oci_settings, oci, tiny, most=1):
        eventually(lambda: {one.id for one in ready(oci_settings)} - orphans)
        found = Warm(oci_settings.home).take(oci, tiny, key_of(oci, tiny), tags(oci_settings.installation))
        assert found is not None
        assert found.id not in orphans
        found.destroy()
    eventually(lambda: time.time() > max(one.deadline_unix_s for one in ready(oci_settings)))
    assert sweeper.sweep(set()).removed == 2
    assert (left_over(oci_settings.home), alive(oci_settings.home)) == ([], [])


def test_a_keeper_killed_between_the_two_hands_costs_the_taker_nothing_and_leaves_nothing_if_that_dies_too(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper = Sweeper(oci_settings)
    with another_process(KEEPER, oci_settings, tiny, "2", "1.5") as keeper:
        eventually(lambda: wire.address(oci_settings.home).exists() and len(ready(oci_settings)) == 2)
        with asked(oci, oci_settings, tiny) as lost, asked(oci, oci_settings, tiny) as ticket:
            keeper.kill()
            keeper.wait()
            wire.close_all(lost.descriptors)
            taken = oci.take_over(tiny, ticket, owner := tags(oci_settings.installation))
    eventually(lambda: lost.body["id"] not in _ids(oci_settings) or sweeper.sweep({owner.instance_id}).removed)
    assert taken.run("true", timeout_s=10).ok
    taken.destroy()
    for one in _ids(oci_settings):  # what the keeper was making in their place: the time for it is over
        Records(oci_settings.home.resolve()).put_off(one, time.time() - 1)
    monkeypatch.setattr(records, "_YOUNG_S", 0.0)
    sweeper.sweep(set())
    assert (left_over(oci_settings.home), alive(oci_settings.home)) == ([], [])


def _ids(settings: Settings) -> list[str]:
    return [one.id for one in Records(settings.home.resolve()).all()]


@contextmanager
def asked(oci: OciProvider, settings: Settings, spec: EnvironmentSpec) -> Iterator[wire.Ticket]:
    """What a taker has in its hands before it takes over; asks until the keeper has one."""
    give_up = time.monotonic() + 60
    while True:
        with wire.new_socket() as connection:
            connection.connect(str(wire.address(settings.home)))
            connection.sendall(key_of(oci, spec).digest().encode())
            if (ticket := wire.receive_ticket(connection)) is not None:
                yield ticket
                return
        assert time.monotonic() < give_up
        time.sleep(0.05)


# --- The sweeper's rules --------------------------------------------------------------------------------------------


def ahead(settings: Settings, deadline_unix_s: float) -> Tags:
    return Tags.ahead(settings.installation, uuid.uuid4(), deadline_unix_s)


def test_what_is_ready_is_swept_by_its_deadline_alone(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    sweeper = Sweeper(oci_settings)
    kept = oci.create(tiny, ahead(oci_settings, time.time() + 60), timeout_s=30)
    late = oci.create(tiny, ahead(oci_settings, time.time() - 1), timeout_s=30)
    _long_ago(oci_settings, kept.id)
    assert sweeper.sweep(set()).removed == 1
    assert kept.run("true", timeout_s=10).ok
    kept.keep_until(time.time() - 1)
    assert sweeper.sweep(set()).removed == 1
    kept.destroy()
    late.destroy()


def test_what_was_taken_goes_with_its_taker_who_may_be_younger_than_the_list_of_the_living(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    sweeper = Sweeper(oci_settings)
    made = oci.create(tiny, ahead(oci_settings, time.time() + 60), timeout_s=30)
    _long_ago(oci_settings, made.id)
    owner = tags(oci_settings.installation)
    taken = oci.take_over(tiny, made.hand_over(), owner)
    assert sweeper.sweep(set()).removed == 0, "the taker may have come after the list was made"
    _long_ago(oci_settings, made.id)
    assert sweeper.sweep({owner.instance_id}).removed == 0
    assert taken.run("true", timeout_s=10).ok
    assert sweeper.sweep(set()).removed == 1
    taken.destroy()


def _long_ago(settings: Settings, identity: str) -> None:
    """As if it had been made, and given, an hour ago."""
    records = Records(settings.home.resolve())
    found = records.read(identity)
    assert found is not None
    records.write(Record(found.id, found.labels, found.image, found.image_id, found.layers, time.time() - 3600))
    os.utime(records.place(identity), (time.time() - 3600,) * 2)
