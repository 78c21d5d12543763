"""What one attempt, run, user or model may have: limits that make calls wait, and bounds that end an attempt."""

from __future__ import annotations

import asyncio
import itertools
import json
from importlib.util import find_spec

import pytest
from aiohttp import web

from app.ledger import limits, model_replicas
from app.model_service.dialects import codec_for
from app.model_service.gateway.waiting import LEVEL_S
from app.models.engines import EngineKind
from app.models.model_calls import Account, CallEnd, Dialect
from app.models.spec import ModelChoice, Sampling
from tests.integration.gateway_fixture import (
    MODEL,
    Engine,
    Fixture,
    an_attempt,
    events,
    fixture,
    request,
    says,
    streamed,
)
from tests.services import MakeSettings, missing


async def _in_force(g: Fixture, name: str, capacity: int) -> None:
    await asyncio.to_thread(limits.set_limit, g.database, name, capacity)
    while (await g.app.services.limiter._capacities()).get(name) != capacity:
        await asyncio.sleep(0.02)


async def test_a_limit_makes_calls_wait_and_is_named(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        name = f"model_concurrency:model:{MODEL}"
        await _in_force(g, name, 2)

        async def slow(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(0.05)
            return await g.engine.well(request)

        g.engine.handler = slow
        answers = await asyncio.gather(*(g.ask() for _ in range(8)))
        assert {status for status, _ in answers} == {200}
        assert g.engine.most == 2
        await g.notes.until(8)
        assert sum(one.waited_s.get(name, 0) > 0 for one in g.notes.exchanges) == 6
        assert all(set(one.waited_s) <= {name} for one in g.notes.exchanges)


async def test_a_limit_that_leaves_no_room_is_told(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(gateway_patience_s=0.3)) as g:
        for dialect in Dialect:
            g.anew()
            await _in_force(g, "model_requests:user:default", 0)
            status, said = await g.ask(dialect)
            assert status == 429
            assert "model_requests:user:default" in said["error"]["message"]
            await g.notes.until(1)
            assert g.notes.last.end is CallEnd.THROTTLED
            assert g.notes.last.waited_s["model_requests:user:default"] > 0.2
            assert g.engine.seen == []


async def test_tokens_are_put_right_by_what_the_engine_counted(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(gateway_patience_s=0.3)) as g:
        await _in_force(g, "model_tokens:user:default", 250)
        assert (await g.ask())[0] == 200  # estimated as 20, really 110
        assert (await g.ask())[0] == 200  # 220 now
        assert (await g.ask())[0] == 429


async def test_the_call_after_the_last_turn_is_refused(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        for dialect in Dialect:
            g.anew()
            token = f"t-{dialect.name}"
            await asyncio.to_thread(an_attempt, g.database, token, max_steps=2)
            assert [(await g.ask(dialect, token=token))[0] for _ in range(2)] == [200, 200]
            status, said = await g.ask(dialect, token=token)
            assert status == 400
            assert said["error"]["code"] == "step_limit_exceeded"
            await g.notes.until(3)
            assert g.notes.last.end is CallEnd.STEP_LIMIT
            assert len(g.engine.seen) == 2


async def test_turns_at_the_same_time_are_no_way_around_the_limit(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        await asyncio.to_thread(an_attempt, g.database, "t2", max_steps=3)
        fails = [True]

        async def first_fails(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(0.02)
            if fails:
                fails.pop()
                return web.json_response({"error": {"message": "no"}}, status=400)
            return await g.engine.well(request)

        g.engine.handler = first_fails
        answers = await asyncio.gather(*(g.ask(token="t2") for _ in range(8)))
        codes = [status for status, _ in answers]
        assert codes.count(200) == 3, "what failed was no turn, and nobody lost one by it"
        assert len(g.engine.seen) == 4


async def test_money_that_is_spent_ends_an_attempt(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        for dialect, whose in itertools.product(Dialect, ["attempt", "run"]):
            g.anew()
            token = f"t-{dialect.name}-{whose}"
            g.notes.run_spent, g.notes.run_bound = 0.0, None
            claim = await asyncio.to_thread(an_attempt, g.database, token, budget_usd=0.5)
            if whose == "attempt":
                g.notes.accounts[claim.attempt_id] = Account(calls=1, cost_usd=0.5)
            else:
                g.notes.run_spent, g.notes.run_bound = 2.0, 1.0
            status, said = await g.ask(dialect, token=token)
            assert status == 400
            assert said["error"]["code"] == "budget_exhausted"
            assert f"the {whose}" in said["error"]["message"].replace("this", "the")
            await g.notes.until(1)
            assert g.notes.last.end is (CallEnd.BUDGET_EXHAUSTED if whose == "attempt" else CallEnd.RUN_BUDGET)
            assert g.engine.seen == []


async def test_wishes_for_tokens_are_cut_and_smaller_ones_are_left(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        for dialect, field in zip(Dialect, ["max_tokens", "max_output_tokens", "max_tokens"], strict=True):
            g.anew()
            token = f"t-{dialect.name}"
            await asyncio.to_thread(an_attempt, g.database, token, max_turn_tokens=64)
            for wish, sent in ((1000, 64), (16, 16)):
                assert (await g.ask(dialect, token=token, **{field: wish}))[0] == 200
                assert g.engine.last[field] == sent
            raw = json.dumps(request(dialect, **{field: 16}), indent=7).encode()
            await g.post(f"/v1/{dialect.value}", data=raw, token=token)
            assert g.engine.seen[-1][2] == raw, "nothing to change, nothing changed"


async def test_a_swap_is_one_moment_and_calls_under_way_keep_their_version(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(), replica=False) as g:
        await g.add(g.engine.url, upstream_model="weights-1", policy_version="v1")
        inside, go_on = asyncio.Event(), asyncio.Event()

        async def waits(request: web.Request) -> web.StreamResponse:
            if not inside.is_set():
                inside.set()
                await go_on.wait()
            return await g.engine.well(request)

        g.engine.handler = waits
        first = asyncio.create_task(g.ask())
        await inside.wait()
        await asyncio.to_thread(model_replicas.swap, g.database, MODEL, policy_version="v2", upstream_model="weights-2")
        await g.knows(lambda: g.app.routes._table[MODEL][0].policy_version == "v2")
        assert (await g.ask())[0] == 200
        assert g.engine.last["model"] == "weights-2"
        go_on.set()
        status, said = await first
        assert (status, said["model"]) == (200, "weights-1")
        await g.notes.until(2)
        versions = {(one.policy_version, one.upstream_model) for one in g.notes.exchanges}
        assert versions == {("v1", "weights-1"), ("v2", "weights-2")}


async def test_a_drained_engine_keeps_its_attempts_and_gets_no_new_ones(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(gateway_patience_s=0.5)) as g:
        assert (await g.ask())[0] == 200
        await asyncio.to_thread(model_replicas.drain, g.database, MODEL)
        await g.knows(lambda: g.app.routes._table[MODEL][0].draining)
        assert (await g.ask())[0] == 200, "it was there before"
        await asyncio.to_thread(an_attempt, g.database, "t2")
        status, said = await g.ask(token="t2")
        assert status == 503
        assert "megaflow models resume" in said["error"]["message"]
        await g.notes.until(3)
        assert g.notes.last.waited_s[f"drained:{MODEL}"] > 0.3
        other = Engine()
        await other.start()
        await g.add(other.url)
        assert (await g.ask(token="t2"))[0] == 200
        assert len(other.seen) == 1
        assert (await g.ask())[0] == 200
        assert len(other.seen) == 1
        await asyncio.to_thread(model_replicas.remove, g.database, MODEL, g.engine.url)
        await g.knows(lambda: len(g.app.routes._table[MODEL]) == 1)
        assert (await g.ask())[0] == 200
        assert len(other.seen) == 2, "gone is gone"
        await other.stop()


@pytest.mark.timeout(150)
async def test_an_engine_that_speaks_only_chat_is_translated_for(make_settings: MakeSettings) -> None:
    if find_spec("litellm") is None:
        missing("litellm")

    async with fixture(make_settings()) as g:

        async def only_chat(request: web.Request) -> web.StreamResponse:
            if request.match_info["path"] != Dialect.CHAT.value:
                return web.json_response({"detail": "Not Found"}, status=404)
            return await g.engine.well(request)

        g.engine.handler = only_chat
        for dialect in (Dialect.MESSAGES, Dialect.RESPONSES):
            for stream in (False, True):
                status, _ = await g.post(f"/v1/{dialect.value}", request(dialect, stream=stream))
                assert status == 200
        await g.notes.until(4)
        paths = [path for path, _, _ in g.engine.seen]
        assert paths.count("messages") == paths.count("responses") == 1, "found out once"
        for kept in g.notes.exchanges:
            assert kept.end is CallEnd.ANSWERED
            reply = codec_for(kept.dialect).reply(kept.response, streamed=kept.streamed)
            assert reply.complete
            assert reply.message["content"] == "Good day."
            assert (reply.usage.prompt, reply.usage.completion) == (100, 10)
        assert json.loads(g.engine.seen[1][2])["messages"] == [{"role": "user", "content": "Hello"}]

        async def cut(request: web.Request) -> web.StreamResponse:
            return await streamed(request, events(Dialect.CHAT, json.loads(await request.read()))[:2])

        g.engine.handler = cut
        for dialect in (Dialect.MESSAGES, Dialect.RESPONSES):
            _, said = await g.post(f"/v1/{dialect.value}", request(dialect, stream=True))
            assert b"error" in said.rstrip().split(b"\n\n")[-1]
            assert b"message_stop" not in said
            assert b"response.completed" not in said
        g.engine.handler = says(400, "maximum context length is 5")(g.engine)
        status, said = await g.post("/v1/messages", request(Dialect.MESSAGES))
        assert status == 400
        assert b"prompt is too long" in said
        await g.notes.until(7)
        ends = [one.end for one in g.notes.exchanges[4:]]
        assert ends == [CallEnd.CUT, CallEnd.CUT, CallEnd.CONTEXT_EXHAUSTED]


async def test_a_dialect_that_nobody_translates_is_refused(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(), replica=False) as g:
        await g.add(g.engine.url, dialects=(Dialect.MESSAGES,))
        status, said = await g.ask(Dialect.CHAT)
        assert status == 501
        assert "megaflow models add" in said["error"]["message"]
        assert (await g.ask(Dialect.MESSAGES))[0] == 200


ALL = Sampling(temperature=0.25, top_p=0.5, max_tokens=64, seed=7)
OWN = {"temperature": 1.0, "top_p": 0.9}
BOUND = {Dialect.CHAT: "max_tokens", Dialect.RESPONSES: "max_output_tokens", Dialect.MESSAGES: "max_tokens"}


@pytest.mark.parametrize("dialect", list(Dialect))
async def test_options_replace_the_agents_own_in_each_dialect(make_settings: MakeSettings, dialect: Dialect) -> None:
    async with fixture(make_settings(), attempt=False) as g:
        model = ModelChoice(name=MODEL, sampling=ALL)
        await asyncio.to_thread(an_attempt, g.database, "t1", model=model)
        assert (await g.ask(dialect, **OWN, **{BOUND[dialect]: 1000}))[0] == 200
        asked = g.engine.last
        assert (asked["temperature"], asked["top_p"], asked[BOUND[dialect]]) == (0.25, 0.5, 64)
        seed = {"seed": 7} if dialect is Dialect.CHAT else {}
        assert {key: asked[key] for key in ("seed",) if key in asked} == seed
        assert g.notes.last.sampled.describe() == {
            "applied": {"temperature": 0.25, "top_p": 0.5, "max_tokens": 64} | seed,
            "dropped": [] if seed else ["seed"],
        }


async def test_an_attempts_own_bound_holds_and_nothing_changes_without_options(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        assert (await g.ask(**OWN))[0] == 200
        assert (g.engine.last["temperature"], "seed" in g.engine.last) == (1.0, False)
        assert not g.notes.last.sampled
        model = ModelChoice(name=MODEL, sampling=Sampling(max_tokens=500))
        await asyncio.to_thread(an_attempt, g.database, "t2", model=model, max_turn_tokens=100)
        assert (await g.ask(token="t2"))[0] == 200
        assert g.engine.last["max_tokens"] == 100


async def _had(g: Fixture, token: str, model_s: float) -> None:
    """A running attempt whose calls were at engines for that long."""
    claim = await asyncio.to_thread(an_attempt, g.database, token)
    g.notes.accounts[claim.attempt_id] = Account(calls=9, turns=9, model_s=model_s, offered_tools=True)


async def test_an_attempt_that_had_little_passes_those_that_had_much(make_settings: MakeSettings) -> None:
    async with fixture(make_settings()) as g:
        engine = g.app.routes.engine(g.engine.url)
        engine.window.size = 0
        calls = []
        for number, (token, model_s) in enumerate((("long", 900.0), ("middle", 90.0), ("short", 0.0))):
            await _had(g, token, model_s)
            calls.append(asyncio.create_task(g.ask(token=token, user=token)))
            await g.knows(lambda number=number: engine.window.waiting == number + 1)
        engine.window.size = 1
        engine.window._admit()
        assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200, 200]
        assert [json.loads(body)["user"] for _, _, body in g.engine.seen] == ["short", "middle", "long"]
        assert not any("priority" in json.loads(body) for _, _, body in g.engine.seen), "of an unknown kind"
        assert engine.window.inside == 0
        [share] = g.app.services.upstream.shares._known.values()
        assert (share.calls, share.tokens) == (0, 330)


@pytest.mark.parametrize(("kind", "sign"), [(EngineKind.VLLM, 1), (EngineKind.SGLANG, -1)])
async def test_engines_with_a_priority_are_told_of_it(make_settings: MakeSettings, kind: EngineKind, sign: int) -> None:
    async with fixture(make_settings()) as g:
        await _had(g, "long", 4 * LEVEL_S)
        assert (await g.ask(token="long"))[0] == 200
        assert "priority" not in g.engine.last
        await g.add(g.engine.url, "other", engine=kind)
        own = g.app.routes._table["other"]
        g.app.routes._table = dict.fromkeys(g.app.routes._table, own)
        assert (await g.ask(token="long", priority=-77))[0] == 200
        assert g.engine.last["priority"] == sign * 3, "the agent's own wish is no way past the others"
