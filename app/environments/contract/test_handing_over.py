"""The contract's change of hands: one process gives an environment away, another takes it as it is."""

from __future__ import annotations

import time
import uuid

import pytest

from app.environments.base import Environment, EnvironmentProvider, Tags, Taking, Transferable
from app.environments.contract.ground import Ground, tags_of
from app.errors import EnvironmentFailed
from app.models.spec import EnvironmentSpec
from app.settings import Settings


def ahead(provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings) -> Environment:
    """One that is made before anybody needs it."""
    tags = Tags.ahead(settings.installation, uuid.uuid4(), time.time() + 600)
    return provider.create(spec, tags, timeout_s=60)


@pytest.mark.needs("hands_over")
def test_who_takes_over_finds_what_was_there(
    provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings, ground: Ground
) -> None:
    given = ahead(provider, spec, settings)
    assert isinstance(given, Transferable)
    given.put("/data/kept", b"from before")
    given.keep_until(time.time() + 900)
    identity, begun = given.id, time.monotonic()
    ticket = given.hand_over()
    assert ticket.kind == ground.kind
    for call in (lambda: given.run("true", timeout_s=5), lambda: given.hand_over()):
        with pytest.raises(EnvironmentFailed):
            call()
    assert isinstance(provider, Taking)
    taken = provider.take_over(spec, ticket, tags_of(settings.installation))
    told, took_s = taken.describe(), time.monotonic() - begun
    assert told["path"] == "warm"
    assert told["phases"].keys() <= {"hand_out", "session"}, "its making was nothing that its taker waited for"
    assert sum(told["phases"].values()) <= took_s + 0.001
    assert (taken.id, taken.get("/data/kept")) == (identity, b"from before")
    assert taken.run("echo $GIVEN", timeout_s=20).stdout == b"by the task\n"
    taken.destroy()
    with pytest.raises(EnvironmentFailed):
        taken.run("true", timeout_s=5)


@pytest.mark.needs("hands_over")
def test_what_is_gone_is_neither_given_nor_taken(
    provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings
) -> None:
    given = ahead(provider, spec, settings)
    assert isinstance(given, Transferable)
    ticket = given.hand_over()
    provider.sweep(installation=settings.installation, keep={})
    assert isinstance(provider, Taking)
    with pytest.raises(EnvironmentFailed):
        provider.take_over(spec, ticket, tags_of(settings.installation))
    ended = ahead(provider, spec, settings)
    ended.destroy()
    assert isinstance(ended, Transferable)
    with pytest.raises(EnvironmentFailed):
        ended.hand_over()


def test_what_cannot_be_given_away_says_so_and_stays(own: Environment, ground: Ground) -> None:
    if ground.hands_over:
        pytest.skip(f"the ground {ground.name} says: hands_over")
    if isinstance(own, Transferable):
        with pytest.raises(EnvironmentFailed):
            own.hand_over()
    assert own.run("echo here", timeout_s=20).stdout == b"here\n"
