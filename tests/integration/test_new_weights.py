"""A version of a policy from its publication to its first call, at a real gateway, and what keeps it from that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.errors import LimitInvalid, SampleRefused, UnknownName
from app.ledger import experience, model_replicas
from app.ledger.database import Database
from app.model_service.publishing import publish
from app.models.engines import EngineKind
from app.models.publication import OnNewWeights, ProbeSequence
from tests.integration.command import CommandLine
from tests.integration.gateway_fixture import MODEL, Fixture, fixture
from tests.integration.rows import every
from tests.integration.token_engine import TokenEngine
from tests.services import MakeSettings

IDS = list(range(10, 50))


def a_probe(weights: float) -> ProbeSequence:
    return ProbeSequence(token_ids=IDS, logprobs=TokenEngine().scores(IDS, weights))


@asynccontextmanager
async def serving(
    make_settings: MakeSettings, kind: EngineKind = EngineKind.SGLANG, *, old: str | None = "old"
) -> AsyncIterator[tuple[Fixture, TokenEngine]]:
    """A gateway whose engine serves version v1. old: the path of its weights on record."""
    engine = TokenEngine()
    async with fixture(make_settings(), engine=engine, replica=False) as g:
        await g.add(engine.url, engine=kind, policy_version="v1")
        await asyncio.to_thread(experience.publish, g.database, MODEL, "v1", old)
        await asyncio.to_thread(experience.settle, g.database, MODEL, "v1")
        yield g, engine


async def published(g: Fixture, version: str = "v2", weights: str | None = "new", **values: Any) -> None:
    settings = g.settings.model_copy(update={"gateway_url": (g.url,)})
    values = {"probe": a_probe(1.0), **values}
    await asyncio.to_thread(publish, settings, g.database, MODEL, version, weights, **values)


def _states(g: Fixture) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Of versions, and of engines with their version."""
    versions = {row.version: row.state for row in every(g.database, "SELECT version, state FROM policy_versions")}
    with g.database.begin() as connection:
        return versions, [(one.policy_version, one.state) for one in model_replicas.listed(connection, MODEL)]


async def _version_of_next_call(g: Fixture) -> str:
    status, _ = await g.ask()
    assert status == 200
    return g.notes.last.policy_version


async def test_a_version_that_passes_its_probe_goes_live(make_settings: MakeSettings) -> None:
    async with serving(make_settings) as (g, engine):
        assert await _version_of_next_call(g) == "v1"
        await published(g)
        assert engine.updates == [("new", "v2")]
        assert _states(g) == ({"v1": "live", "v2": "live"}, [("v2", "active")])
        assert await _version_of_next_call(g) == "v2"


async def test_a_version_that_fails_its_probe_is_refused_and_the_old_one_is_back(make_settings: MakeSettings) -> None:
    async with serving(make_settings) as (g, engine):
        with pytest.raises(SampleRefused, match=r"difference of 0\.5 at token \d+: .*the version before it stays"):
            await published(g, weights="broken")
        assert engine.updates == [("broken", "v2"), ("old", "v1")]
        assert _states(g) == ({"v1": "live", "v2": "refused"}, [("v1", "active")])
        assert await _version_of_next_call(g) == "v1"
        with pytest.raises(SampleRefused, match="was refused before"):
            await published(g)
        assert engine.weights == 0.0
        await published(g, "v3")
        assert await _version_of_next_call(g) == "v3"


async def test_the_one_publisher_of_a_policy_takes_over_what_its_killed_publication_held(
    make_settings: MakeSettings,
) -> None:
    async with serving(make_settings) as (g, engine):
        await asyncio.to_thread(model_replicas.hold, g.database, MODEL)
        with pytest.raises(LimitInvalid, match="found some that a publication holds"):
            await published(g)
        await published(g, takes_over=True)
        assert engine.updates == [("new", "v2")]
        assert _states(g) == ({"v1": "live", "v2": "live"}, [("v2", "active")])


@pytest.mark.parametrize(
    ("weights", "said"),
    [("wide", "size mismatch for layer 0"), ("nan", "expected 39 finite log-probabilities .* may be NaN")],
)
async def test_weights_that_cannot_be_are_refused_by_name(make_settings: MakeSettings, weights: str, said: str) -> None:
    async with serving(make_settings) as (g, engine):
        with pytest.raises(SampleRefused, match=f"version 'v2' of {MODEL} is refused: .*{said}"):
            await published(g, weights=weights)
        assert engine.weights == 0.0
        assert _states(g)[1] == [("v1", "active")]


@pytest.mark.parametrize(
    ("mode", "kind", "first", "asked"),
    [
        (OnNewWeights.DRAIN, EngineKind.SGLANG, "v1", 2),
        (OnNewWeights.FINISH, EngineKind.SGLANG, "v1", 2),
        (OnNewWeights.FINISH, EngineKind.UNKNOWN, "v1", 2),
        (OnNewWeights.INTERRUPT, EngineKind.SGLANG, "v2", 3),
    ],
)
async def test_calls_under_way_end_as_was_asked_and_new_ones_wait(
    make_settings: MakeSettings, mode: OnNewWeights, kind: EngineKind, first: str, asked: int
) -> None:
    async with serving(make_settings, kind) as (g, engine):
        engine.go_on.clear()
        under_way = asyncio.create_task(g.ask())
        await g.knows(lambda: engine.inside == 1)
        publishing = asyncio.create_task(published(g, on_new_weights=mode))
        await g.knows(lambda: not g.app.routes.engine(engine.url).loaded.is_set() or publishing.done())
        new = asyncio.create_task(g.ask())
        waits = mode is OnNewWeights.DRAIN or kind is EngineKind.UNKNOWN
        if waits:
            await asyncio.sleep(0.3)
            assert not publishing.done()
            assert not engine.updates
        else:
            await publishing
        engine.go_on.set()
        await publishing
        assert [(await one)[0] for one in (under_way, new)] == [200, 200]
        await g.notes.until(2)
        versions = [one.policy_version for one in sorted(g.notes.exchanges, key=lambda one: one.started_at)]
        assert versions == [first, "v2"]
        assert len([path for path, _, _ in engine.seen if path == "chat/completions"]) == asked
        assert sum(one.retries for one in g.notes.exchanges) == asked - 2


def test_a_version_without_a_probe_is_refused_unless_it_says_so(
    megaflow: CommandLine, tmp_path: Path, database: Database
) -> None:
    file = tmp_path / "probe.json"
    file.write_text(json.dumps({"token_ids": IDS, "logprobs": TokenEngine().scores(IDS, 0.0)}))
    wanted = ("models", "publish", "m", "--version", "v2")
    for given, found in (((), "neither"), (("--probe", str(file), "--unverified"), "both")):
        with pytest.raises(LimitInvalid, match=f"or `--unverified`, found {found}"):
            megaflow(*wanted, *given)
    assert not every(database, "SELECT 1 FROM policy_versions")
    with pytest.raises(UnknownName):
        megaflow(*wanted, "--unverified")


def test_the_command_line_reads_probes(megaflow: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    for content, said in (
        (None, "expected a file"),
        ("{", "expected JSON, which the text is not: EOF"),
        (json.dumps({"token_ids": IDS[:31], "logprobs": [None] * 31}), "at least 32 entries"),
        (json.dumps({"token_ids": IDS, "logprobs": [None, *[-1.0] * 38]}), "found 39 entries"),
        (json.dumps({"token_ids": IDS, "logprobs": [None, *[-1.0] * 38, float("nan")]}), "finite number"),
        (json.dumps({"token_ids": IDS, "logprobs": [None, *[-1.0] * 38, 0.5]}), "at most 0"),
    ):
        if content is not None:
            file.write_text(content)
        with pytest.raises(LimitInvalid, match=said):
            megaflow("models", "publish", "m", "--version", "v2", "--probe", str(file))
    file.write_text(json.dumps({"token_ids": IDS, "logprobs": TokenEngine().scores(IDS, 0.0)}))
    with pytest.raises(UnknownName):
        megaflow("models", "publish", "m", "--version", "v2", "--probe", str(file))


async def test_what_cannot_be_published_changes_nothing(make_settings: MakeSettings) -> None:
    async with serving(make_settings, EngineKind.VLLM) as (g, engine):
        with pytest.raises(LimitInvalid, match=r"expected an engine that loads weights from disk.*found vllm"):
            await published(g)
        await asyncio.to_thread(experience.publish, g.database, MODEL, "v2")
        await published(g, "v3", None, probe=a_probe(0.0))
        for number, version in ((1, "v2"), (2, "v3")):
            with pytest.raises(SampleRefused, match=f"found '{version}', number {number}: versions do not go back"):
                await published(g, version, None)
        with pytest.raises(SampleRefused, match="does not serve these weights; the version before it stays"):
            await published(g, "v4", None)
        with pytest.raises(UnknownName):
            await asyncio.to_thread(publish, g.settings, g.database, "other", "v1", unverified=True)
        assert not engine.updates
        versions = {"v1": "live", "v2": "published", "v3": "live", "v4": "refused"}
        assert _states(g) == (versions, [("v3", "active")])


@pytest.mark.parametrize("token_id", [-1, 1 << 31, 10**30, True, "5"])
def test_a_probe_has_token_ids_that_a_vocabulary_can_have(token_id: object) -> None:
    with pytest.raises(ValidationError, match="token_ids"):
        ProbeSequence.model_validate({"token_ids": [*IDS[:-1], token_id], "logprobs": a_probe(1.0).logprobs})
