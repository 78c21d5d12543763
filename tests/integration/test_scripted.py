"""What a replay engine answered is never a model's: refused under another name, marked everywhere, counted apart."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import UUID

import pytest
from aiohttp import web

from app.client import MegaFlow
from app.errors import SpecInvalid
from app.ledger import ends, model_replicas, results, tasks
from app.ledger.database import Database
from app.ledger.model_replicas import NewReplica
from app.models.endings import EndReason
from app.models.model_calls import REPLAY_HEADER
from app.models.outcome import ArtifactKind, Verdict
from app.models.spec import ModelChoice
from app.settings import Settings
from tests.building import a_task, claimed
from tests.integration.command import CommandLine
from tests.integration.gateway_fixture import MODEL, Engine, an_attempt, fixture
from tests.integration.rows import a_call, one
from tests.integration.test_spine_model import Talker
from tests.integration.test_spine_model import fixture as spine
from tests.services import MakeSettings

AGENT = "mini-swe-agent"


def _ways(settings: Settings, monkeypatch: pytest.MonkeyPatch, model: str, *more: str) -> list[Any]:
    """Every way to submit a task for this model."""
    megaflow = CommandLine(settings, monkeypatch)
    asked = ("--agent", AGENT, "--environment", "local", "--limit", "1", "--model", model, *more)

    def enqueue() -> None:
        base_url = dict(zip(more[::2], more[1::2], strict=True)).get("--base-url")
        with MegaFlow(settings) as flow:
            flow.enqueue(a_task(), agent=AGENT, model=ModelChoice(name=model, base_url=base_url))

    return [
        lambda: megaflow("submit", "demo", "--no-check", *asked),
        lambda: megaflow("schedule", "add", f"s-{model}", "0 3 * * *", "demo", "--no-check", *asked),
        enqueue,
    ]


def test_a_model_that_no_engine_answers_for_is_refused_by_every_way_to_submit(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for way in _ways(settings, monkeypatch, "gpt-5"):
        with pytest.raises(SpecInvalid, match=r"'gpt-5'.*--base-url.*MEGAFLOW_MODEL_BASE_URL.*models add.*replay"):
            way()
    assert one(database, "SELECT count(*) AS n FROM tasks").n == 0
    assert one(database, "SELECT count(*) AS n FROM schedules").n == 0


@pytest.mark.parametrize(
    ("model", "route", "base_url", "more"),
    [
        ("gpt-5", "gpt-5", None, ()),
        ("gpt-5", "*", None, ()),
        ("gpt-5", None, "http://engine.test/v1", ()),
        ("gpt-5", None, None, ("--base-url", "http://127.0.0.1:9/v1")),
        ("replay", None, None, ()),
        ("replay:night", None, None, ()),
    ],
)
def test_a_model_with_an_endpoint_a_route_or_the_name_of_the_replay_engine_is_taken(
    make_settings: MakeSettings,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    route: str | None,
    base_url: str | None,
    more: tuple[str, ...],
) -> None:
    if route is not None:
        model_replicas.add(database, NewReplica(route, "http://engine.test/v1"))
    for way in _ways(make_settings(model_base_url=base_url), monkeypatch, model, *more):
        way()
    assert one(database, "SELECT array_agg(DISTINCT model) AS found FROM tasks").found == [model]


def _as_replay(engine: Engine) -> Any:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = await engine.well(request)
        answer.headers[REPLAY_HEADER] = "script"
        return answer

    return handler


async def test_the_gateway_knows_a_replay_engine_by_its_address_and_by_what_it_says(
    make_settings: MakeSettings,
) -> None:
    async with fixture(make_settings()) as g:
        assert (await g.ask())[0] == 200
        assert g.notes.last.scripted is False
        g.engine.handler = _as_replay(g.engine)  # at the address of a user's own, behind a route
        assert (await g.ask())[0] == 200
        assert (g.notes.last.scripted, g.notes.last.built_in) == (True, False)
        g.anew()
        own = ModelChoice(name="m", base_url=f"http://localhost:{g.engine.port}/v1")
        await asyncio.to_thread(an_attempt, g.database, "t2", model=own)
        g.app.routes._settings = make_settings(replay_port=g.engine.port)  # it says nothing of itself
        assert (await g.ask(token="t2", model="m"))[0] == 200
        assert (g.notes.last.scripted, g.notes.last.built_in) == (True, True)


def _graded(database: Database, *calls: bool, late: bool = False) -> UUID:
    """The run of a task whose attempt was graded 1, with calls that were scripted or not; when its calls are `late`,
    they are written after its end."""
    claim = claimed(database)
    whose = {"run_id": claim.run_id, "task_id": claim.task_id, "attempt_id": claim.attempt_id}

    def write() -> None:
        for scripted in calls:
            a_call(database, cost_usd=0.5, scripted=scripted, **whose)

    if not late:
        write()
    verdict = Verdict(reward=1.0, counts=True)
    ends.finish(database, claim, end_reason=EndReason.SUBMITTED, verdict=verdict, artifacts=[])
    if late:
        write()
    return claim.run_id


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("calls", "scripted"), [((), False), ((False, False), False), ((True,), True), ((False, True, False), True)]
)
def test_one_scripted_answer_takes_a_task_out_of_the_pass_rate(
    database: Database, calls: tuple[bool, ...], scripted: bool, late: bool
) -> None:
    run_id = _graded(database, *calls, late=late)
    status = results.run_status(database, run_id)
    assert (status.scored, status.resolved, status.mean_reward) == ((0, 0, None) if scripted else (1, 1, 1.0))
    assert (status.scripted, status.scripted_resolved) == ((1, 1) if scripted else (0, 0))
    (result,) = results.results(database, results.task_ids(database, run_id))
    assert (result.scripted, result.attempts[0].scripted) == (scripted, scripted)
    assert tasks.retry(database, [result.task_id]) == [], "a graded task is a result"


@pytest.mark.parametrize("scripted", [True, False])
async def test_a_route_to_a_replay_engine_marks_attempt_trajectory_and_verdict(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, scripted: bool
) -> None:
    if scripted:
        well = Engine.well

        async def marked(self: Engine, request: web.Request) -> web.StreamResponse:
            answer = await well(self, request)
            answer.headers[REPLAY_HEADER] = "script"
            return answer

        monkeypatch.setattr(Engine, "well", marked)

    async with spine(make_settings) as here:
        assert await here.play(Talker(), monkeypatch) is EndReason.SUBMITTED
        assert here.attempt.scripted is scripted
        task = here.row("SELECT model, scripted FROM tasks")
        assert (task.model, task.scripted) == (MODEL, scripted)
        kept = here.kept()
        made = json.loads(kept[ArtifactKind.TRAJECTORY])
        assert made["extra"]["scripted"] is scripted
        assert json.loads(kept[ArtifactKind.VERDICT])["scripted"] is scripted
