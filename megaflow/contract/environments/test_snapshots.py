"""The contract's snapshots: files of an environment that are kept, and what is made from them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from app.environments.contract import Environment, EnvironmentProvider, Snapshot
from app.errors import EnvironmentFailed
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from megaflow.contract.environments.fixtures import Create
from megaflow.contract.environments.ground import Ground, tags_of

_kept = pytest.mark.needs("keeps")

Take = Callable[[Environment], Snapshot]
CreateFrom = Callable[..., Environment]


@pytest.fixture
def take(provider: EnvironmentProvider, settings: Settings) -> Iterator[Take]:
    taken = []

    def take(environment: Environment) -> Snapshot:
        taken.append(environment.snapshot(tags_of(settings.installation)))
        return taken[-1]

    yield take
    for one in taken:
        provider.remove_snapshot(one)


@pytest.fixture
def create_from(provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings) -> Iterator[CreateFrom]:
    """More than the snapshot: what the spec is to say otherwise."""
    made = []

    def create(snapshot: Snapshot, **more: Any) -> Environment:
        wanted = spec.model_copy(update=more)
        made.append(provider.create_from(snapshot, wanted, tags_of(settings.installation), timeout_s=60))
        return made[-1]

    yield create
    for environment in made:
        environment.destroy()


def said(environment: Environment, command: str) -> str:
    result = environment.run(command, timeout_s=20)
    assert result.ok, result.text()
    return result.stdout.decode()


@pytest.fixture
def others(provider: EnvironmentProvider) -> Iterator[list[str]]:
    """Names of two more installations. Ask for it before `create_from`: what stands on a snapshot goes first."""
    names = [f"test-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    yield names
    for name in names:
        provider.sweep(installation=name)


@_kept
def test_what_is_made_from_a_snapshot_has_its_files(own: Environment, take: Take, create_from: CreateFrom) -> None:
    said(own, "mkdir deep; echo one > deep/one; echo two > two; ln -s deep/one link; chmod 750 two; echo kept > kept")
    first = create_from(take(own))
    assert said(first, "cat link two kept; stat -c %a two") == "one\ntwo\nkept\n750\n"
    said(first, "rm -r deep two; echo other > kept; mkdir two; echo below > two/below")
    second = create_from(take(first))
    assert said(second, "cat kept two/below") == "other\nbelow\n"
    assert not second.run("test -e deep", timeout_s=20).ok, "what was removed is no part of it"


@_kept
def test_an_environment_goes_on_after_its_snapshot(own: Environment, take: Take, create_from: CreateFrom) -> None:
    shell = own.shell()
    shell.run("export mine=remembered; sleep 30 > /dev/null 2>&1 & echo before > file", timeout_s=20)
    processes = own.stats().processes
    snapshot = take(own)
    assert shell.run("echo $mine", timeout_s=20).stdout == b"remembered\n"
    assert own.stats().processes == processes
    shell.close()
    said(own, "echo after > file; echo new > new")
    made = create_from(snapshot)
    assert said(made, "cat file") == "before\n"
    assert not made.run("test -e new", timeout_s=20).ok
    proof = own.reset()
    assert not proof.clean or not own.run("test -e file", timeout_s=20).ok, "a reset leads where it did before"


@_kept
def test_a_reset_leads_back_to_the_snapshot(own: Environment, take: Take, create_from: CreateFrom) -> None:
    own.put("/testbed/file", b"kept")
    made = create_from(take(own))
    made.run("echo changed > file; echo new > new", timeout_s=20)
    if made.reset().clean:
        assert made.get("/testbed/file") == b"kept"
        with pytest.raises(FileNotFoundError):
            made.get("/testbed/new")
        assert made.describe()["origin"] == "recycled"


@_kept
def test_those_made_from_one_snapshot_share_nothing(own: Environment, take: Take, create_from: CreateFrom) -> None:
    own.put("/testbed/file", b"kept")
    snapshot = take(own)
    first, second = create_from(snapshot), create_from(snapshot)
    first.run("echo first >> file", timeout_s=20)
    assert second.get("/testbed/file") == b"kept"
    assert create_from(snapshot).get("/testbed/file") == b"kept"
    assert own.get("/testbed/file") == b"kept"


@_kept
def test_processes_are_no_part_of_a_snapshot(
    own: Environment, take: Take, create_from: CreateFrom, ground: Ground
) -> None:
    own.run("sleep 30 > /dev/null 2>&1 &", timeout_s=20)
    if ground.isolates:  # else it would be this host's
        said(own, "echo x > /dev/shm/in-memory")
    made = create_from(take(own))
    assert made.stats().processes == own.stats().processes - 1
    if ground.isolates:
        assert not made.run("test -e /dev/shm/in-memory", timeout_s=20).ok


@_kept
def test_variables_and_set_up_are_those_that_are_asked_for_now(
    provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings, take: Take, create_from: CreateFrom
) -> None:
    wanted = spec.model_copy(update={"env": {"GIVEN": "then", "OLD": "x", "LANG": "C"}, "setup": ("echo made > made",)})
    environment = provider.create(wanted, tags_of(settings.installation), timeout_s=60)
    plain = provider.create(spec, tags_of(settings.installation), timeout_s=60)
    tell = 'echo "${OLD-unset} ${LANG-unset}"'
    try:
        made = create_from(take(environment), env={"GIVEN": "now"}, setup=("exit 3",))
        assert said(made, "echo $GIVEN; cat made") == "now\nmade\n"
        assert said(made, tell) == said(plain, tell)
        again = create_from(take(made))
        assert (said(again, tell), said(again, "echo $GIVEN")) == (said(plain, tell), "by the task\n")
    finally:
        environment.destroy()
        plain.destroy()


@_kept
def test_a_snapshot_outlives_its_environment_and_is_told_in_plain_words(
    create: Create, take: Take, ground: Ground, spec: EnvironmentSpec, settings: Settings
) -> None:
    environment = create()
    environment.put("/testbed/file", b"kept")
    snapshot = take(environment)
    environment.destroy()
    told = Snapshot(**json.loads(json.dumps(asdict(snapshot))))
    assert told == snapshot
    assert told.kind == ground.kind
    made = ground.provider(settings).create_from(told, spec, tags_of(settings.installation), timeout_s=60)
    about = made.describe()
    assert made.get("/testbed/file") == b"kept"
    assert (about["path"], about["origin"], about.get("image_id", "")) == ("snapshot", "fresh", snapshot.image_id)
    assert {"image", "create", "set_up"} <= about["phases"].keys()
    made.destroy()


@_kept
def test_nobody_gets_a_removed_snapshot_and_who_has_it_keeps_it(
    provider: EnvironmentProvider, own: Environment, take: Take, create_from: CreateFrom
) -> None:
    own.put("/testbed/file", b"kept")
    snapshot = take(own)
    made = create_from(snapshot)
    for _ in range(2):
        provider.remove_snapshot(snapshot)
    with pytest.raises(EnvironmentFailed, match="gone"):
        create_from(snapshot)
    assert made.get("/testbed/file") == b"kept"
    assert not made.reset().clean or made.get("/testbed/file") == b"kept"
    again = take(made)
    made.destroy()
    assert create_from(again).get("/testbed/file") == b"kept"


@_kept
def test_a_snapshot_of_another_kind_is_refused(own: Environment, take: Take, create_from: CreateFrom) -> None:
    snapshot = take(own)
    with pytest.raises(EnvironmentFailed):
        create_from(replace(snapshot, kind="another"))
    with pytest.raises(EnvironmentFailed, match="gone"):
        create_from(replace(snapshot, id=uuid.uuid4().hex))


@_kept
def test_a_sweep_takes_our_snapshots_but_what_is_kept(
    provider: EnvironmentProvider, own: Environment, others: list[str], create_from: CreateFrom
) -> None:
    mine, other = others
    own.put("/testbed/file", b"kept")
    left, kept, foreign = (own.snapshot(tags_of(installation)) for installation in (mine, mine, other))
    assert provider.sweep(installation=mine, keep={kept.id: True, left.id: False}) == [left.id]
    with pytest.raises(EnvironmentFailed, match="gone"):
        create_from(left)
    assert [create_from(one).get("/testbed/file") for one in (kept, foreign)] == [b"kept", b"kept"]
    assert provider.sweep(installation=mine) == [kept.id]
    assert provider.sweep(installation=other) == [foreign.id]
    assert provider.sweep(installation=mine) == []


@_kept
def test_an_environment_that_is_gone_leaves_no_snapshot(provider: EnvironmentProvider, create: Create) -> None:
    installation = f"test-{uuid.uuid4().hex[:8]}"
    environment = create()
    environment.destroy()
    with pytest.raises(EnvironmentFailed):
        environment.snapshot(tags_of(installation))
    assert provider.sweep(installation=installation) == []


def test_what_keeps_no_files_says_so_and_stays(own: Environment, ground: Ground, settings: Settings) -> None:
    if ground.keeps:
        pytest.skip(f"the ground {ground.name} says: keeps")
    with pytest.raises(EnvironmentFailed):
        own.snapshot(tags_of(settings.installation))
    assert own.run("echo here", timeout_s=20).stdout == b"here\n"
