"""What a dialect writes it reads again, whole and streamed, whatever was said and wherever the stream is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.model_service.dialects import codec_for
from app.model_service.dialects.base import DialectCodec, Reply, Request, exact_digest, meaning_digest
from app.models.model_calls import Dialect, TokenUse
from tests.dialect_requests import body_of

CODECS = [codec_for(dialect) for dialect in Dialect]
few = settings(max_examples=30, deadline=None)
every_dialect = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.dialect.name.lower())

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
_words = _text.filter(lambda text: bool(text))
_names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_-]{0,20}", fullmatch=True)
_plain = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _text
_values = st.recursive(_plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3))
_arguments = st.dictionaries(_names, _values, max_size=4).map(lambda value: orjson.dumps(value).decode())
_calls = st.lists(st.fixed_dictionaries({"id": _names, "name": _names, "arguments": _arguments}), max_size=3)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    calls = draw(_calls)
    said: dict[str, Any] = {"role": "assistant", "content": draw(_text if calls else _words)}
    if thoughts := draw(_text):
        said["reasoning"] = thoughts
    if calls:
        said["tool_calls"] = calls
    return said


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    message = draw(messages())
    ids = draw(st.none() | st.lists(st.integers(0, 200_000), max_size=40).map(tuple))
    prompt = draw(st.integers(1, 10**6))  # noughts for all stand for "not counted"
    return Reply(
        message=message,
        finish_reason=draw(st.sampled_from(["length", "tool_calls" if "tool_calls" in message else "stop"])),
        usage=TokenUse(prompt, draw(st.integers(0, 10**6)), draw(st.integers(0, prompt))),
        model=draw(_names),
        prompt_token_ids=None if ids is None else draw(st.lists(st.integers(0, 200_000), max_size=40).map(tuple)),
        token_ids=ids,
        logprobs=None if ids is None else tuple(-0.5 for _ in ids),
    )


ASKED = Request("m", ({"role": "user", "content": "x"},), (), False, None, {"return_token_ids": True, "logprobs": True})
WITH_USAGE = replace(ASKED, parameters={**ASKED.parameters, "stream_options": {"include_usage": True}})


def _read_as_said(found: Reply, said: Reply) -> None:
    assert replace(found, usage=TokenUse()) == replace(said, usage=TokenUse())
    assert (found.usage.prompt, found.usage.completion, found.usage.cached) == (
        said.usage.prompt,
        said.usage.completion,
        said.usage.cached,
    )


@every_dialect
@given(said=replies())
@few
def test_an_answer_is_read_as_it_was_written(codec: DialectCodec, said: Reply) -> None:
    content = orjson.dumps(codec.whole(said, id="a1", request=ASKED))
    found = codec.reply(content, streamed=False)
    _read_as_said(found, said)
    assert found.complete
    assert codec.usage(content, streamed=False) == found.usage


@every_dialect
@given(said=replies())
@few
def test_a_streamed_answer_is_read_as_it_was_written(codec: DialectCodec, said: Reply) -> None:
    content = b"".join(codec.events(said, id="a1", request=WITH_USAGE))
    found = codec.reply(content, streamed=True)
    _read_as_said(found, said)
    assert found.complete
    assert codec.usage(content, streamed=True) == found.usage


@every_dialect
@given(said=replies(), line_end=st.sampled_from([b"\r\n", b"\r"]))
@few
def test_other_line_ends_make_no_difference(codec: DialectCodec, said: Reply, line_end: bytes) -> None:
    content = b": a comment\n\n" + b"".join(codec.events(said, id="a1", request=WITH_USAGE))
    found = codec.reply(content.replace(b"\n", line_end), streamed=True)
    _read_as_said(found, said)


@every_dialect
@given(said=replies(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_stream_may_be_cut_anywhere(codec: DialectCodec, said: Reply, data: st.DataObject) -> None:
    content = b"".join(codec.events(said, id="a1", request=WITH_USAGE))
    cut = content[: data.draw(st.integers(0, len(content) - 1), label="cut at")]
    codec.usage(cut, streamed=True)
    try:
        found = codec.reply(cut, streamed=True)
    except ValueError:
        return  # nothing of it had come
    ended = codec.reply(content, streamed=True)
    if found.complete:  # all was said; what went missing tells no more of the answer
        assert found.message == ended.message
        assert found.finish_reason == ended.finish_reason
    else:
        assert len(str(found.message["content"])) <= len(str(ended.message["content"]))


@st.composite
def conversations(draw: st.DrawFn) -> Request:
    said: list[dict[str, Any]] = []
    if system := draw(_text):
        said.append({"role": "system", "content": system})
    said.append({"role": "user", "content": draw(_words)})
    for answer in draw(st.lists(messages(), max_size=3)):
        said.append(answer)
        for call in answer.get("tool_calls", ()):
            said.append({"role": "tool", "content": draw(_text), "tool_call_id": call["id"]})
        if "tool_calls" not in answer:
            said.append({"role": "user", "content": draw(_words)})
    tools = [
        {"name": name, "description": draw(_text), "parameters": {"type": "object"}} for name in draw(st.sets(_names))
    ]
    wish = draw(st.integers(16, 10**5))
    return Request("m", tuple(said), tuple(tools), draw(st.booleans()), wish, {"temperature": 0.5})


@every_dialect
@given(asked=conversations())
@few
def test_a_request_is_read_as_it_was_written(codec: DialectCodec, asked: Request) -> None:
    found = codec.request(orjson.loads(orjson.dumps(body_of(codec.dialect, asked))))
    assert found == asked
    assert [exact_digest(message) for message in found.messages] == [
        exact_digest(message) for message in asked.messages
    ]


@given(said=replies())
@few
def test_dialects_agree_on_who_a_message_is(said: Reply) -> None:
    found = set()
    for codec in CODECS:
        for content, streamed in (
            (orjson.dumps(codec.whole(said, id="a1", request=ASKED)), False),
            (b"".join(codec.events(said, id="a1", request=ASKED)), True),
        ):
            found.add(meaning_digest(codec.reply(content, streamed=streamed).message))
    assert len(found) == 1
