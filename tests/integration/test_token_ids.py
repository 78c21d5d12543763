"""Token ids for training: asked for, hidden from the agent, kept, and sent back in, at a real gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.client import MegaFlow
from app.errors import SpecInvalid
from app.model_service.checking import check_engine
from app.model_service.dialects import codec_for
from app.model_service.dialects.base import Reply
from app.models.engines import EngineKind
from app.models.model_calls import CallEnd
from app.models.spec import ModelChoice, Sampling
from tests.building import a_task
from tests.integration.gateway_ground import MODEL, Ground, an_attempt, answers, ground
from tests.integration.token_engine import TokenEngine
from tests.services import MakeSettings

TRAINING = ModelChoice(name=MODEL, sampling=Sampling(token_ids=True))
OURS = ("token_ids", "prompt_token_ids", "logprobs", "meta_info")


@asynccontextmanager
async def training(make_settings: MakeSettings, kind: EngineKind = EngineKind.VLLM) -> AsyncIterator[Ground]:
    """A gateway with a `TokenEngine`, and an attempt for training whose token is t1."""
    async with ground(make_settings(), engine=TokenEngine(), replica=False, attempt=False) as g:
        await asyncio.to_thread(an_attempt, g.database, "t1", model=TRAINING)
        await g.add(g.engine.url, engine=kind)
        yield g


def engine_of(g: Ground) -> TokenEngine:
    assert isinstance(g.engine, TokenEngine)
    return g.engine


def recorded(g: Ground, at: int = -1) -> Reply:
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


async def test_what_the_agent_asked_for_itself_it_gets(make_settings: MakeSettings) -> None:
    async with training(make_settings) as g:
        _, said = await g.ask(logprobs=True)
        assert "logprobs" in said["choices"][0]
        assert "token_ids" not in said["choices"][0]
        _, said = await g.ask(return_token_ids=True)
        assert said["prompt_token_ids"] == engine_of(g).prompts[-1]
        assert "logprobs" not in said["choices"][0]


async def test_an_evaluation_asks_for_nothing(make_settings: MakeSettings) -> None:
    async with ground(make_settings(), engine=TokenEngine()) as g:
        await g.ask()
        assert not {"return_token_ids", "logprobs"} & g.engine.last.keys()


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


async def _found(g: Ground, **candidate: Any) -> EngineKind:
    settings = g.settings.model_copy(update={"gateway_url": (g.url,)})
    candidate = {"url": g.engine.url, **candidate}
    _, kind = await asyncio.to_thread(check_engine, settings, g.database, ModelChoice(name=MODEL), candidate)
    return kind


async def test_which_server_it_is_is_found_out_when_it_is_added(make_settings: MakeSettings) -> None:
    async with ground(make_settings(), replica=False) as g:
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
