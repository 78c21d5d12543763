"""Streams as engines send them: what ends them, what breaks them, what of them is kept and shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any, cast

import pytest

from app.model_service.dialects import codec_for
from app.model_service.gateway import relay
from app.model_service.gateway.keys import Keys
from app.model_service.gateway.plans import CallPlan, EngineAnswer
from app.model_service.gateway.relay import RelayedStream, begins_with_error
from app.model_service.gateway.translation import Interrupted, chunks_of, translation_for
from app.model_service.serving import CallRefusal
from app.models.model_calls import CallEnd, Dialect, TokenUse

KEY = "sk-very-secret-0123456789"


class _Content:
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


class _Source:
    """Stands for aiohttp's response: the pieces of a stream."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.content = _Content(pieces)


def stream_of(dialect: Dialect, pieces: list[bytes], keys: Keys | None = None) -> RelayedStream:
    plan = CallPlan(cast(Any, None), dialect, b"")
    redact = keys.redact_bytes if keys else bytes
    return RelayedStream(EngineAnswer(plan, 200, {}, pieces[0], cast(Any, _Source(pieces[1:])), redact))


async def passed(stream: RelayedStream) -> bytes:
    return b"".join([piece async for piece in stream.pieces()])


def said(words: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": words}}]}).encode() + b"\n\n"


def event(name: str, **body: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **body})}\n\n".encode()


WORDS = "event: error data: [DONE] event: message_stop event: response.completed event: response.failed"
TALK = {
    Dialect.CHAT: (said(WORDS), b"data: [DONE]\n\n"),
    Dialect.MESSAGES: (event("content_block_delta", delta={"text": WORDS}), event("message_stop")),
    Dialect.RESPONSES: (event("response.output_text.delta", delta=WORDS), event("response.completed")),
}
ERRORS = {
    Dialect.CHAT: b'data: {"error": {"message": "no"}}\n\n',
    Dialect.MESSAGES: event("error", error={"message": "no"}),
    Dialect.RESPONSES: event("response.failed"),
}


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("size", [1, 11, 10_000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
async def test_what_a_model_says_neither_ends_nor_breaks_a_stream(dialect: Dialect, size: int, line_end: bytes) -> None:
    async def end_of(content: bytes) -> CallEnd:
        content = content.replace(b"\n", line_end)
        stream = stream_of(dialect, [content[at : at + size] for at in range(0, len(content), size)])
        assert await passed(stream) == content == stream.recorded
        return stream.end

    talk, last = TALK[dialect]
    assert await end_of(talk + last) is CallEnd.ANSWERED
    assert await end_of(talk + talk) is CallEnd.CUT, "only quoted"
    assert await end_of(last) is CallEnd.ANSWERED
    assert await end_of(talk + ERRORS[dialect]) is CallEnd.UPSTREAM_ERROR
    assert begins_with_error(dialect, ERRORS[dialect].replace(b"\n", line_end))
    assert not begins_with_error(dialect, talk)


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_an_error_in_a_stream_shows_no_key(size: int) -> None:
    keys = Keys({"K": KEY})
    keys.value("K")
    content = said("a") + b'data: {"error": {"message": "wrong key ' + KEY.encode() + b'"}}\n\ndata: [DONE]\n\n'
    stream = stream_of(Dialect.CHAT, [content[at : at + size] for at in range(0, len(content), size)], keys)
    shown = await passed(stream)
    assert shown == stream.recorded == content.replace(KEY.encode(), b"[key]")
    cut = stream_of(Dialect.CHAT, [said("a"), b'data: {"error": "' + KEY.encode()], keys)
    assert KEY.encode() not in await passed(cut) + cut.recorded, "also in a line that has no end"


async def test_of_a_very_long_stream_the_end_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "RECORDED_BYTES", 400)
    monkeypatch.setattr(relay, "TAIL_BYTES", 400)

    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
    content = b"".join(said(f"word {number}") for number in range(50)) + usage + b"data: [DONE]\n\n"
    stream = stream_of(Dialect.CHAT, [content[at : at + 33] for at in range(0, len(content), 33)])
    assert await passed(stream) == content
    assert stream.cut_off
    assert len(stream.recorded) < 900
    assert codec_for(Dialect.CHAT).usage(stream.recorded, streamed=True).total == 10
    words = codec_for(Dialect.CHAT).reply(stream.recorded, streamed=True).message["content"]
    assert words.startswith("word 0word 1")
    assert words.endswith("word 49")


async def _each(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for one in pieces:
        yield one


MALFORMED = [
    b"data: {nonsense\n\n",
    b"data: [1]\n\n",
    b'data: {"choices": 5}\n\n',
    b'data: {"choices": ["x"]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": {"tool_calls": "zzz"}}]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": {"tool_calls": [{"function": {"arguments": {}}}]}}]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": {"content": 5}}]}\n\n',
    b'data: {"error": {"message": "boom"}}\n\n',
]


@pytest.mark.parametrize("content", MALFORMED)
async def test_a_chunk_of_another_shape_is_no_answer(content: bytes) -> None:
    with pytest.raises(Interrupted) as broken:
        [one async for one in chunks_of(_each([content]))]
    assert broken.value.why


async def test_a_translated_stream_that_breaks_is_not_made_whole() -> None:
    if find_spec("litellm") is None:
        pytest.skip("needs litellm")
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    def chunk(delta: Any, finish: str | None = None) -> bytes:
        body = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
        return b"data: " + json.dumps(body).encode() + b"\n\n"

    async def told(asked: Dialect, pieces: list[bytes]) -> tuple[CallEnd, bytes]:
        translation = await translation_for(asked, Dialect.CHAT)
        body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 5}
        wish = {"input": "x"} if asked is Dialect.RESPONSES else {"messages": [{"role": "user", "content": "x"}]}
        translation.request(body | wish)
        stream = stream_of(Dialect.CHAT, pieces)
        out = b""
        try:
            async for event in translation.events(stream.pieces()):
                out += event
        except CallRefusal as refusal:
            return refusal.end, out
        assert stream.detail or stream.end is CallEnd.ANSWERED
        return stream.end, out

    first, done = chunk({"role": "assistant", "content": "he"}), b"data: [DONE]\n\n"
    both = await asyncio.gather(*(translation_for(one, Dialect.CHAT) for one in (Dialect.MESSAGES,) * 3))
    assert len(both) == 3, "whoever comes while it is imported waits for the same import"
    for asked, last in ((Dialect.MESSAGES, b"message_stop"), (Dialect.RESPONSES, b"response.completed")):
        end, out = await told(asked, [first, chunk({}, "stop"), done])
        assert (end, last in out) == (CallEnd.ANSWERED, True)
        end, out = await told(asked, [first])
        assert (end, last in out) == (CallEnd.CUT, False)
        for broken in MALFORMED:
            end, out = await told(asked, [first, broken, done])
            assert (end, last in out) == (CallEnd.UPSTREAM_ERROR, False), broken


async def test_an_engine_that_does_not_count_is_translated_and_its_tokens_are_unknown() -> None:
    if find_spec("litellm") is None:
        pytest.skip("needs litellm")
    said: dict[str, Any] = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
    said["choices"] = [{"index": 0, "message": {"role": "assistant", "content": "Good."}, "finish_reason": "stop"}]
    wishes = {
        Dialect.MESSAGES: {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
        Dialect.RESPONSES: {"model": "m", "input": "x"},
    }

    async def whole(asked: Dialect, answer: dict[str, Any]) -> bytes:
        translation = await translation_for(asked, Dialect.CHAT)
        translation.request(wishes[asked])
        return translation.whole(json.dumps(answer).encode())

    for asked in wishes:
        for usage in ({}, {"usage": None}):
            out = await whole(asked, said | usage)
            reply = codec_for(asked).reply(out, streamed=False)
            assert reply.message["content"] == "Good."
            assert reply.usage == codec_for(asked).usage(out, streamed=False) == TokenUse()
        told = {"usage": {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}}
        assert codec_for(asked).usage(await whole(asked, said | told), streamed=False).total == 3
