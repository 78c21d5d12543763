"""Token ids for training: asked for, hidden from the agent, kept, and sent back in, at a real gateway."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from app.client import MegaFlow
from app.errors import SpecInvalid
from app.experience.samples import samples_of
from app.ledger import model_calls, results
from app.ledger.model_calls import StoredCall
from app.model_service.checking import check_engine
from app.model_service.dialects import codec_for
from app.model_service.dialects.base import TOKENS, Reply
from app.model_service.gateway.state import Attempts
from app.model_service.recording.process import LedgerStore
from app.model_service.recording.rows import CountedExchange, row_of
from app.models.engines import EngineKind
from app.models.model_calls import CallEnd, Dialect, TokenUse, VersionSpan
from app.models.spec import ModelChoice, Sampling
from tests.building import a_task
from tests.integration.gateway_fixture import MODEL, Fixture, an_attempt, answers, fixture, request
from tests.integration.rows import every
from tests.integration.token_engine import END, LINE, START, TokenEngine, tool_call
from tests.services import MakeSettings, missing

TRAINING = ModelChoice(name=MODEL, sampling=Sampling(token_ids=True))
CALL = {"content": None, "tool_calls": [tool_call("cat", '{"path": "a.txt b.txt"}')]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "two files"}
_CONVERSATIONS: dict[Dialect, list[dict[str, Any]]] = {
    Dialect.MESSAGES: [
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "call_1", "name": "cat", "input": {"path": "a.txt b.txt"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "two files"}]},
    ],
    Dialect.RESPONSES: [
        {"type": "function_call", "call_id": "call_1", "name": "cat", "arguments": '{"path": "a.txt b.txt"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "two files"},
    ],
}
"""`CALL` and `RESULT`, as an agent of that dialect says them."""
OURS = ("token_ids", "prompt_token_ids", "logprobs", "meta_info")


@asynccontextmanager
async def training(
    make_settings: MakeSettings, kind: EngineKind = EngineKind.VLLM, **values: Any
) -> AsyncIterator[Fixture]:
    """A gateway with a `TokenEngine`, and an attempt for training whose token is t1."""
    async with fixture(make_settings(), engine=TokenEngine(), replica=False, attempt=False) as g:
        await asyncio.to_thread(an_attempt, g.database, "t1", model=TRAINING)
        await g.add(g.engine.url, engine=kind, **values)
        yield g


def engine_of(g: Fixture) -> TokenEngine:
    assert isinstance(g.engine, TokenEngine)
    return g.engine


def recorded(g: Fixture, at: int = -1) -> Reply:
    exchange = g.notes.exchanges[at]
    return codec_for(exchange.dialect).reply(exchange.response, streamed=exchange.streamed)


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_are_asked_for_and_recorded_and_the_agent_does_not_see_them(
    make_settings: MakeSettings, stream: bool
) -> None:
    async with training(make_settings) as g:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": stream}
        status, content = await g.post(body=body)
        assert status == 200
        assert b"Good day." in content
        assert not [key for key in OURS if f'"{key}"'.encode() in content], content
        await g.notes.until(1)
        assert g.engine.last["return_token_ids"] is g.engine.last["logprobs"] is True
        reply, engine = recorded(g), engine_of(g)
        assert list(reply.prompt_token_ids or ()) == engine.prompts[0]
        assert list(reply.token_ids or ()) == engine.answers[0]
        assert reply.logprobs == tuple(-token / 100 for token in engine.answers[0])


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("dialect", "stream"), [(Dialect.MESSAGES, True), (Dialect.RESPONSES, False)])
async def test_ids_of_an_agent_of_another_dialect_are_recorded_and_its_sample_is_one(
    make_settings: MakeSettings, dialect: Dialect, stream: bool
) -> None:
    if find_spec("litellm") is None:
        missing("litellm")
    spans = [{"version": 7, "start": 0, "end": 1}, {"version": 8, "start": 1, "end": 2}]
    async with training(make_settings) as g:
        engine = engine_of(g)
        engine.says, engine.spans = [CALL, {"content": "Done."}], spans
        for turn in (0, 1):
            said = [] if not turn else _CONVERSATIONS[dialect]
            body = request(dialect, stream=stream)
            key = "input" if dialect is Dialect.RESPONSES else "messages"
            body[key] = [{"role": "user", "content": "Read them"}, *said]
            status, content = await g.post(f"/v1/{dialect.value}", body)
            assert status == 200, content
            assert not [name for name in ("token_ids", "logprob", "meta_info", TOKENS) if name.encode() in content]
            await g.notes.until(turn + 1)
            reply = recorded(g)
            assert list(reply.prompt_token_ids or ()) == engine.prompts[turn]
            assert list(reply.token_ids or ()) == engine.answers[turn]
            assert reply.logprobs == tuple(-token / 100 for token in engine.answers[turn])
            assert reply.versions == (VersionSpan("7", 0, 1), VersionSpan("8", 1, 2))
            assert reply.complete
        assert {path for path, _, _ in g.engine.seen} == {Dialect.CHAT.value}
        (sample,) = samples_of(_stored(g))
        assert list(sample.token_ids) == engine.prompts[1] + engine.answers[1], "the prefix was sent in"


async def test_what_the_agent_asked_for_itself_it_gets(make_settings: MakeSettings) -> None:
    async with training(make_settings) as g:
        _, said = await g.ask(logprobs=True)
        assert "logprobs" in said["choices"][0]
        assert "token_ids" not in said["choices"][0]
        _, said = await g.ask(return_token_ids=True)
        assert said["prompt_token_ids"] == engine_of(g).prompts[-1]
        assert "logprobs" not in said["choices"][0]


async def test_what_bends_the_distribution_is_left_out_of_training_and_told(make_settings: MakeSettings) -> None:
    bending: dict[str, Any] = {"logit_bias": {"5": 100}, "top_k": 1, "top_p": 0.1, "presence_penalty": 1.5}
    async with training(make_settings) as g:
        await g.ask(**bending, stop=["x"])
        assert not bending.keys() & g.engine.last.keys()
        assert g.engine.last["stop"] == ["x"]
        await g.notes.until(1)
        assert g.notes.exchanges[-1].sampled.dropped == tuple(sorted(bending))


async def test_an_evaluation_asks_for_nothing(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(), engine=TokenEngine()) as g:
        await g.ask(top_k=1)
        assert not {"return_token_ids", "logprobs"} & g.engine.last.keys()
        assert g.engine.last["top_k"] == 1


@pytest.mark.parametrize("kind", [EngineKind.TRANSFORMERS, EngineKind.OPENAI])
async def test_an_engine_without_ids_is_refused_in_one_line(make_settings: MakeSettings, kind: EngineKind) -> None:
    async with training(make_settings, kind) as g:
        status, said = await g.ask()
        assert status == 404
        assert "expected vLLM or SGLang for training" in said["error"]["message"]
        assert "\n" not in said["error"]["message"]
        assert g.notes.last.end is CallEnd.NOT_FOUND, "not the agent's fault, and no other attempt would do better"
        assert not g.engine.seen

        def submit(purpose: str) -> None:
            with MegaFlow(g.settings) as flow:
                flow.enqueue_many([a_task("t")], agent="mini-swe-agent", model=MODEL, purpose=purpose)

        with pytest.raises(SpecInvalid, match=f"{MODEL!r}.*expected vLLM or SGLang for training; nothing was"):
            await asyncio.to_thread(submit, "training")
        await asyncio.to_thread(submit, "evaluation")
        await asyncio.to_thread(submit, "synthesis")
        with pytest.raises(SpecInvalid, match="unknown purpose 'fun'; known: evaluation, training, synthesis"):
            await asyncio.to_thread(submit, "fun")
        bodies = [json.loads(row.body) for row in every(g.database, "SELECT body FROM specs")]
        own = [body["model"]["sampling"] for body in bodies if body["task"]["name"] == "t"]
        assert own == [None], "of both"


async def test_synthesis_asks_for_ids_where_the_engine_gives_them(make_settings: MakeSettings) -> None:
    async with training(make_settings) as g:
        with MegaFlow(g.settings) as flow:
            run = await asyncio.to_thread(
                lambda: flow.enqueue_many(
                    [a_task("t")], agent="mini-swe-agent", model=MODEL, purpose="synthesis", idempotency_key="k"
                )
            )
            spec = results.task_spec(flow.database, run.handles[0].task_id)
        assert spec.model is not None
        assert spec.model.sampling == Sampling(token_ids=True)


async def _found(g: Fixture, **candidate: Any) -> EngineKind:
    settings = g.settings.model_copy(update={"gateway_url": (g.url,)})
    candidate = {"url": g.engine.url, **candidate}
    _, kind = await asyncio.to_thread(check_engine, settings, g.database, ModelChoice(name=MODEL), candidate)
    return kind


async def test_which_server_it_is_is_found_out_when_it_is_added(make_settings: MakeSettings) -> None:
    async with fixture(make_settings(), replica=False) as g:
        g.engine.models = [MODEL]
        for owner in ("vllm", "sglang"):
            g.engine.owner = owner
            assert await _found(g) == owner
        assert not g.engine.seen, "a list answers without a call"
        g.engine.owner = ""
        unknown = json.dumps({"detail": "Unexpected fields in the request: {'return_token_ids'}"}).encode()
        for handler, kind in (
            (answers(422, unknown), EngineKind.TRANSFORMERS),
            (answers(400, b'{"error": {"message": "Unrecognized request argument"}}'), EngineKind.OPENAI),
            (answers(500, b"{}"), EngineKind.UNKNOWN),
            (g.engine.well, EngineKind.OPENAI),
            (TokenEngine().chat, EngineKind.VLLM),
        ):
            g.engine.handler = handler
            assert await _found(g) is kind
        seen = len(g.engine.seen)
        assert await _found(g, engine="sglang") is EngineKind.UNKNOWN, "it was said: nothing is found out"
        assert len(g.engine.seen) == seen


_SPANS: list[tuple[list[Any] | None, list[tuple[str, int, int]]]] = [
    (None, [("v1", 0, 3)]),
    ([{"version": 7, "start": 0, "end": 2}, {"version": 8, "start": 2, "end": 3}], [("7", 0, 2), ("8", 2, 3)]),
    ([{"version": "8", "start": "0", "end": None}, 3], [("v1", 0, 3)]),
]


async def test_which_version_wrote_which_tokens_is_recorded(make_settings: MakeSettings) -> None:
    async with training(make_settings, EngineKind.SGLANG, policy_version="v1") as g:
        for (said, kept), stream in itertools.product(_SPANS, (False, True)):
            g.notes.exchanges.clear()
            engine_of(g).spans = said
            status, content = await g.post(
                body={"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": stream}
            )
            assert status == 200
            assert b"meta_info" not in content
            await g.notes.until(1)
            row = row_of(CountedExchange(g.notes.last, TokenUse(), None, True), set())
            call = model_calls.said_in(model_calls.unpacked(row.facts["body"]), {})
            assert call["versions"] == tuple(VersionSpan(*one) for one in kept)


# --- Prompt ids -----------------------------------------------------------------------------------------------------


async def _turns(g: Fixture, says: list[dict[str, Any]], *, stream: bool = False) -> list[StoredCall]:
    """A conversation in which the model says these, a tool answers each, and what was recorded of it."""
    engine = engine_of(g)
    engine.says, messages = list(says), [{"role": "user", "content": "Read them"}]
    for said in says:
        status, content = await g.post(body={"model": MODEL, "messages": messages, "stream": stream})
        assert status == 200, content
        reply = codec_for(Dialect.CHAT).reply(content, streamed=stream)
        assert reply.token_ids is None
        messages += [{"role": "assistant", **said}, RESULT]
    await g.notes.until(len(says))
    return _stored(g)


def _stored(g: Fixture) -> list[StoredCall]:
    calls = []
    for at, exchange in enumerate(g.notes.exchanges):
        request, reply = codec_for(exchange.dialect).request(json.loads(exchange.request)), recorded(g, at)
        calls.append(
            StoredCall(
                exchange.id,
                exchange.session.attempt_id,
                exchange.dialect,
                MODEL,
                exchange.started_at,
                exchange.end,
                messages=request.messages,
                reply=reply.message,
                prompt_token_ids=reply.prompt_token_ids,
                token_ids=reply.token_ids,
                logprobs=reply.logprobs,
            )
        )
    return calls


async def _prefixes(g: Fixture) -> dict[str, float]:
    async with g.http.get(f"{g.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = [line for line in lines if line.startswith("megaflow_gateway_conversations_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefix_that_the_template_would_break_is_sent_in_and_the_sample_is_one(
    make_settings: MakeSettings, stream: bool
) -> None:
    async with training(make_settings) as g:
        samples = samples_of(await _turns(g, [CALL, CALL, {"content": "Done."}], stream=stream))
        engine = engine_of(g)
        for at in (1, 2):
            before = engine.prompts[at - 1] + engine.answers[at - 1]
            assert engine.prompts[at][: len(before)] == before
            tail = [LINE, START, engine.token("tool"), engine.token("two"), engine.token("files"), END, LINE]
            assert engine.prompts[at][len(before) :] == [*tail, START, engine.token("assistant")]
            assert engine.prompts[at] != engine.render(json.loads(g.engine.seen[at][2])["messages"], prompt=True)
        (sample,) = samples
        assert list(sample.token_ids) == engine.prompts[2] + engine.answers[2], "the engine's ids, one by one"
        written = [token for token, own in zip(sample.token_ids, sample.mask, strict=True) if own]
        assert written == [token for answer in engine.answers for token in answer]
        assert await _prefixes(g) == {"sent": 2.0}


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.MESSAGES])
async def test_what_a_killed_gateway_kept_is_read_from_what_it_recorded(
    make_settings: MakeSettings, dialect: Dialect
) -> None:
    if dialect is Dialect.MESSAGES and find_spec("litellm") is None:
        missing("litellm")
    said = _CONVERSATIONS.get(dialect, [{"role": "assistant", **CALL}, RESULT])
    async with training(make_settings) as g:
        engine_of(g).says = [CALL, {"content": "Done."}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Read them"}]
        tools = {"tools": [{"name": "cat", "input_schema": {"type": "object"}}]} if dialect is Dialect.MESSAGES else {}
        assert (await g.ask(dialect, messages=messages, **tools))[0] == 200
        await g.notes.until(1)
        written = [CountedExchange(one, TokenUse(), None, True) for one in g.notes.exchanges]
        await asyncio.to_thread(LedgerStore(g.database).write, written, ())
        g.app.services.attempts = Attempts()
        assert (await g.ask(dialect, messages=[*messages, *said], **tools))[0] == 200
        await g.notes.until(2)
        (sample,) = samples_of(_stored(g))
        assert list(sample.token_ids) == engine_of(g).prompts[1] + engine_of(g).answers[1]
        assert await _prefixes(g) == {"sent": 1.0}


async def test_where_nothing_can_be_sent_in_the_sample_splits_and_is_counted(make_settings: MakeSettings) -> None:
    async with training(make_settings) as g:
        engine_of(g).renders = False
        assert len(samples_of(await _turns(g, [CALL, CALL, {"content": "Done."}]))) == 3
        assert await _prefixes(g) == {"broken": 2.0}


async def test_a_template_that_rewrites_history_on_purpose_is_obeyed(make_settings: MakeSettings) -> None:
    async with training(make_settings) as g:
        engine_of(g).strips = True
        thinking = {"content": "Let me think."}
        assert len(samples_of(await _turns(g, [thinking, {"content": "Done."}]))) == 2
        assert engine_of(g).prompts[1] == engine_of(g).render(json.loads(g.engine.seen[1][2])["messages"], prompt=True)
        assert await _prefixes(g) == {"broken": 1.0}


async def test_an_engine_that_ignores_prompt_ids_is_seen(make_settings: MakeSettings) -> None:
    async with training(make_settings) as g:
        engine_of(g).takes_ids = False
        assert len(samples_of(await _turns(g, [CALL, {"content": "Done."}]))) == 2
        assert await _prefixes(g) == {"sent": 1.0, "ignored": 1.0}
