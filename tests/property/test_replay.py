"""Playing again: whatever volatile text a conversation holds, however often and in whatever order it is asked."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.model_service.dialects import Dialect, Message, Reply, Request, codec_for
from app.model_service.replay.player import ScriptPlayer
from app.model_service.replay.recordings import Digests, RecordedAttempt, RecordedCall, conversation_key, steady
from app.model_service.replay.script import Script, Turn
from app.models.model_calls import TokenUse
from tests.dialect_requests import body_of

BASH = {
    "name": "bash",
    "description": "",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


_two = st.integers(10, 59)
_hex = st.text("0123456789abcdef", min_size=12, max_size=40).filter(lambda text: any(c.isdigit() for c in text))
_volatile = st.one_of(
    st.uuids().map(str),
    st.builds(
        "2026-{:02d}-{:02d}T{:02d}:{:02d}:{:02d}.123Z".format, st.integers(1, 12), st.integers(1, 28), _two, _two, _two
    ),
    st.builds(
        "2026-{:02d}-{:02d} 1{}:{:02d}:{:02d}".format,
        st.integers(1, 12),
        st.integers(1, 28),
        st.integers(0, 9),
        _two,
        _two,
    ),
    st.builds("Sat Nov {} 1{}:{:02d}:{:02d} UTC 2026".format, st.integers(1, 28), st.integers(0, 9), _two, _two),
    _hex,
    st.builds("0x7f{:08x}".format, st.integers(0, 2**32 - 1)),
    st.builds("/tmp/tmp{}/x".format, st.text("abcdefgh_123", min_size=3, max_size=9)),
    st.builds("http://127.0.0.1:{}/v1".format, st.integers(1024, 65535)),
    st.builds("{}.{:02d}s".format, st.integers(0, 900), _two),
    st.builds("{} seconds".format, st.integers(2, 900)),
    st.builds("{:.3f} ms".format, st.floats(0.1, 900)),
    st.builds("pid {}".format, st.integers(2, 4_000_000)),
    st.builds("call_{}".format, st.text("abcdefghijklmnopqrstuvwxyzABCDEFGH0123456789", min_size=12, max_size=24)),
)
_kinds = len(_volatile.element_strategies)  # type: ignore[attr-defined]
_plain = st.text("abcdefghij XYZ.,:;()='\n", max_size=30).map(lambda text: f" {text} ")


@st.composite
def twins(draw: st.DrawFn) -> tuple[str, str]:
    """A text, and the same with other times, ids, ports and so on."""
    one, two = "", ""
    for _ in range(draw(st.integers(1, 5))):
        text = draw(_plain)
        kind = _volatile.element_strategies[draw(st.integers(0, _kinds - 1))]  # type: ignore[attr-defined]
        one, two = one + text + draw(kind), two + text + draw(kind)
    return one, two


@settings(max_examples=300, deadline=None)
@given(twins())
def test_texts_that_differ_in_volatile_things_alone_are_the_same(pair: tuple[str, str]) -> None:
    assert steady(pair[0]) == steady(pair[1])


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_what_is_steady_stays_so(text: str) -> None:
    assert steady(steady(text)) == steady(text)


@pytest.mark.parametrize(
    "text",
    [
        "3 failed, 12 passed",
        "def add(a, b):\n    return a + b",
        "exit code 1",
        "line 1234 of module decade",
        "version 2.31.0",
        "'a' != 'b'",
    ],
)
def test_what_an_agent_acts_on_is_kept(text: str) -> None:
    assert steady(text) == text


def reply(text: str, *ids: str) -> Reply:
    message: Message = {"role": "assistant", "content": text}
    if ids:
        message["tool_calls"] = [{"id": one, "name": "bash", "arguments": '{"command": "ls"}'} for one in ids]
    return Reply(message, "tool_calls" if ids else "stop", TokenUse(1, 1))


def request(messages: list[Message], *tools: dict[str, Any]) -> Request:
    return Request("m", tuple(messages), tools or (BASH,), stream=False, max_tokens=None)


def attempt(task: str, outputs: list[str], made: str) -> list[RecordedCall]:
    """A conversation of one command after another; `made` is where its ids come from."""
    messages: list[Message] = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": task}]
    calls = []
    for turn, output in enumerate(outputs):
        id_ = f"call_{uuid.uuid5(uuid.NAMESPACE_OID, f'{made}{turn}').hex}"
        said = reply(f"answer {turn}", id_)
        calls.append(RecordedCall(request(list(messages)), said))
        messages += [said.message, {"role": "tool", "content": output, "tool_call_id": id_}]
    return calls


@settings(max_examples=100, deadline=None)
@given(st.lists(twins(), min_size=1, max_size=6), twins(), st.randoms(use_true_random=False))
def test_a_conversation_is_found_again_in_any_order_and_as_often_as_wanted(
    outputs: list[tuple[str, str]], task: tuple[str, str], random: Any
) -> None:
    recorded = attempt(task[0], [one for one, _ in outputs], "before")
    again = attempt(task[1], [two for _, two in outputs], "after")
    recording, digests = RecordedAttempt(recorded, Digests()), Digests()
    order = list(range(len(again))) * 2
    random.shuffle(order)
    for at in order:
        assert recording.exact(conversation_key(again[at].request, digests)) is recorded[at].response


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("abc ", max_size=9), min_size=1, max_size=6), st.data())
def test_where_the_text_differs_the_place_decides(outputs: list[str], data: st.DataObject) -> None:
    recorded = attempt("fix it", outputs, "before")
    again = attempt("fix it", [f"{output} but 7 failed" for output in outputs], "after")
    recording, digests = RecordedAttempt(recorded, Digests()), Digests()
    at = data.draw(st.integers(0, len(again) - 1))
    wanted = conversation_key(again[at].request, digests)
    assert (recording.exact(wanted) is None) == (at > 0)
    assert recording.by_position(wanted) is recorded[at].response
    beyond = conversation_key(
        request([*again[-1].request.messages, *({"role": "assistant", "content": "x"},) * 2]), digests
    )
    assert recording.by_position(beyond) is None


def test_the_models_own_name_may_be_another() -> None:
    told: list[Message] = [{"role": "system", "content": "You are powered by the model big-one."}]
    call = RecordedCall(request(told), reply("x"))
    renamed = request([{"role": "system", "content": "You are powered by the model replay:42."}])
    recording = RecordedAttempt([call], Digests())
    assert recording.exact(conversation_key(renamed, Digests())) is None
    assert recording.exact(conversation_key(renamed, Digests(), ("replay:42", "big-one"))) is call.response


SCRIPT = Script(
    match="the sentence",
    turns=(*(Turn(thought=f"t{at}", command=f"echo {at}") for at in range(4)), Turn(thought="end", submit=True)),
    name="one",
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(Dialect)), st.integers(0, 4)), min_size=1, max_size=12))
def test_conversations_may_cross_in_any_dialect_and_each_gets_its_own_turn(steps: list[tuple[Dialect, int]]) -> None:
    player = ScriptPlayer([SCRIPT])
    for dialect, turns in steps:
        messages: list[Message] = [{"role": "user", "content": "Please: the sentence."}]
        codec = codec_for(dialect)
        for at in range(turns + 1):
            body = json.loads(json.dumps(body_of(codec.dialect, request(messages))))
            read = codec.request(body)
            answer = player.play(read, body, prompt_tokens=1, script=None)
            assert isinstance(answer.content, Reply)
            said = answer.content.message
            assert said["content"] == ("end" if at == 4 else f"t{at}")
            messages.append(said)
            messages += [
                {"role": "tool", "content": "the sentence", "tool_call_id": call["id"]}
                for call in said.get("tool_calls", ())
            ]
