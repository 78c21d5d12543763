"""Calls joined to conversations: whole, rewritten, forked, with sub-agents, after a summary, with holes; ATIF."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import jsonschema
import orjson
import pytest
import zstandard

from app.ledger.model_calls import StoredCall
from app.model_service.dialects.base import text_of
from app.model_service.trajectory import About, BranchKind, atif, branches, export, join, read
from app.model_service.trajectory.artifact import FORMAT
from app.models.model_calls import CallEnd, Dialect, TokenUse

SYSTEM = {"role": "system", "content": "You fix bugs."}
TASK = {"role": "user", "content": "Fix the bug in parser.py, please."}
TOOLS = ({"name": "bash", "description": "", "parameters": {"type": "object"}},)
ABOUT = About(session_id="attempt-1", agent="mini-swe-agent", version="2.4.6", model="m", task="fix-it")
_count = itertools.count(1)
_BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def said(text: str, *commands: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if commands:
        message["tool_calls"] = [
            {"id": f"call_{text}_{n}", "name": "bash", "arguments": orjson.dumps({"command": command}).decode()}
            for n, command in enumerate(commands)
        ]
    return message


def results(message: dict[str, Any], *outputs: str) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": output}
        for call, output in zip(message["tool_calls"], outputs, strict=True)
    ]


def a_call(messages: Sequence[dict[str, Any]], reply: dict[str, Any] | None, **values: Any) -> StoredCall:
    number = next(_count)
    given = {
        "id": UUID(int=number),
        "attempt_id": UUID(int=0),
        "dialect": Dialect.CHAT,
        "model": "m",
        "started_at": _BEGAN + timedelta(seconds=number),
        "end": CallEnd.ANSWERED,
        "is_turn": True,
        "use": TokenUse(100, 10, 50),
        "cost_usd": 0.25,
        "tools": TOOLS,
        "messages": tuple(messages),
        "reply": reply,
        "duration_s": 0.5,
        "finish_reason": "stop",
    }
    return StoredCall(**(given | values))


def a_conversation(*texts: str, head: Sequence[dict[str, Any]] = (SYSTEM, TASK), **values: Any) -> list[StoredCall]:
    """Turns that run a command each, but for the last."""
    messages, calls = list(head), []
    for text in texts[:-1]:
        reply = said(text, f"run {text}")
        calls.append(a_call(messages, reply, **values))
        messages = [*messages, reply, *results(reply, f"output of {text}")]
    calls.append(a_call(messages, said(texts[-1]), **values))
    return calls


def checked(calls: Sequence[StoredCall], about: About = ABOUT) -> dict[str, Any]:
    found = orjson.loads(orjson.dumps(atif(calls, about)))
    jsonschema.validate(found, SCHEMA)
    _hold_together(found)
    return found


def words(trajectory: dict[str, Any]) -> list[tuple[str, str]]:
    return [(step["source"], step["message"]) for step in trajectory["steps"]]


# --- Joining --------------------------------------------------------------------------------------------------------


def test_a_conversation_is_one_branch() -> None:
    calls = a_conversation("a", "b", "c")
    found = checked(calls)
    assert words(found) == [("system", SYSTEM["content"]), ("user", TASK["content"]), *(("agent", t) for t in "abc")]
    assert found["steps"][2]["observation"] == {"results": [{"source_call_id": "call_a_0", "content": "output of a"}]}
    assert found["steps"][2]["tool_calls"][0]["arguments"] == {"command": "run a"}
    assert found["steps"][2]["metrics"]["prompt_tokens"] == 100
    assert found["final_metrics"]["total_cost_usd"] == 0.75
    assert found["final_metrics"]["total_prompt_tokens"] == 300
    assert "subagent_trajectories" not in found


def test_ids_and_blanks_and_parts_make_no_other_message() -> None:
    first, second = a_conversation("a", "b")
    system, task, answer, result = second.messages
    spaced = {**answer, "tool_calls": [{"id": "new", "name": "bash", "arguments": '{ "command" : "run a" }'}]}
    parts = {**task, "content": [{"type": "text", "text": TASK["content"]}]}
    moved = replace(second, messages=(system, parts, spaced, {**result, "tool_call_id": "new"}))
    forest = join([first, moved])
    assert [node.join.value for node in forest.nodes] == ["none", "exact"]
    step = checked([first, moved])["steps"][2]
    assert step["observation"]["results"][0]["source_call_id"] == "call_a_0"


def test_an_answer_in_other_words_is_marked() -> None:
    first, second = a_conversation("a", "b")
    system, task, answer, result = second.messages
    rewritten = replace(second, messages=(system, task, {**answer, "content": "a, but tidied"}, result))
    found = checked([first, rewritten])
    assert [text for _, text in words(found)][2:] == ["a", "b"]
    assert found["steps"][3]["extra"]["joined"] == "rewritten"


def test_changes_of_what_was_said_before_are_marked() -> None:
    first, second, third = a_conversation("a", "b", "c")
    reminded = (SYSTEM, {**TASK, "content": TASK["content"] + "<reminder>be brief</reminder>"}, *third.messages[2:])
    found = checked([first, second, replace(third, messages=reminded)])
    assert [text for _, text in words(found)][2:] == ["a", "b", "c"]
    assert found["steps"][-1]["extra"]["joined"] == "edited"


def test_a_retried_request_is_one_step() -> None:
    first, second = a_conversation("a", "b")
    busy = replace(first, id=UUID(int=900), reply=None, end=CallEnd.UPSTREAM_BUSY, status=429, started_at=_BEGAN)
    cut = replace(first, id=UUID(int=901), reply=said("a an"), end=CallEnd.CUT, complete=False, started_at=_BEGAN)
    found = checked([busy, cut, first, second])
    assert [text for _, text in words(found)][2:] == ["a", "b"]
    ends = [repeat["end"] for repeat in found["steps"][2]["extra"]["repeats"]]
    assert sorted(ends) == ["cut", "upstream_busy"]
    assert found["final_metrics"]["extra"]["model_calls"] == 4


def test_two_ways_from_one_point_are_a_fork() -> None:
    first, second, third = a_conversation("a", "b", "c")
    lost = a_call(second.messages, said("other"))
    other = a_call([*second.messages, said("other"), {"role": "user", "content": "no"}], said("else"))
    found = checked([first, second, lost, other, third, *a_conversation("a", "b", "c", "d")[-1:]])
    assert [text for _, text in words(found)][2:] == ["a", "b", "c", "d"]
    [fork] = found["subagent_trajectories"]
    assert fork["extra"] == {"kind": "fork", "of": {"trajectory_id": "attempt-1", "step_id": 3}}
    assert words(fork) == [("agent", "other"), ("user", "no"), ("agent", "else")]


def test_a_call_that_was_never_recorded_is_taken_from_the_prompt() -> None:
    first, _, third = a_conversation("a", "b", "c")
    found = checked([first, third])
    assert [text for _, text in words(found)][2:] == ["a", "b", "c"]
    hole = found["steps"][3]
    assert hole["extra"] == {"recovered": True}
    assert "metrics" not in hole
    assert hole["observation"]["results"][0]["content"] == "output of b"
    assert "1 of the agent's steps" in found["notes"]


def test_asides_and_sub_agents_stand_apart() -> None:
    title = a_call([{"role": "user", "content": "Title for: Fix the bug"}], said("Bug fix"), tools=(), is_turn=False)
    send = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "t1", "name": "task", "arguments": '{"prompt": "Find every use of parse()."}'}],
    }
    main = [a_call([SYSTEM, TASK], send)]
    helper = a_conversation("x", "y", head=({"role": "user", "content": "Find every use of parse()."},))
    result = {"role": "tool", "tool_call_id": "t1", "content": "y"}
    main += [
        a_call([SYSTEM, TASK, send, result], said("m2", "run")),
        a_call([SYSTEM, TASK, send, result, said("m2", "run"), *results(said("m2", "run"), "o")], said("m3")),
    ]
    found = checked([title, *main[:1], *helper, *main[1:]])
    assert [text for source, text in words(found) if source == "agent"] == ["", "m2", "m3"]
    kinds = {one["extra"]["kind"]: one for one in found["subagent_trajectories"]}
    assert set(kinds) == {"aside", "sub-agent"}
    reference = found["steps"][2]["observation"]["results"][0]["subagent_trajectory_ref"]
    assert reference == [{"trajectory_id": kinds["sub-agent"]["trajectory_id"]}]
    assert found["final_metrics"]["total_cost_usd"] == 0.25 * 6


def test_what_goes_on_after_a_summary_is_a_branch_that_says_so() -> None:
    before = a_conversation("a", "b", "c")
    told = "We found that parser.py drops the last token; a patch is half written in parse()."
    asked = {"role": "user", "content": "Summarise the conversation."}
    compaction = a_call([*before[-1].messages, said("c"), asked], said(f"<summary>{told}</summary>"), tools=())
    kept = said("b", "run b")
    head = (SYSTEM, {"role": "user", "content": f"So far: {told}"}, kept, *results(kept, "output of b"))
    after = a_conversation("d", "e", "f", "g", "h", head=head)
    calls = [*before, compaction, *after]
    longer, earlier = branches(join(calls))
    assert (longer.kind, longer.of, longer.at) == (BranchKind.MAIN, 1, earlier.nodes[2])
    assert [text_of(node.call.reply["content"]) for node in earlier.nodes][:3] == ["a", "b", "c"]
    trajectory = checked(calls)
    assert trajectory["steps"][2]["is_copied_context"] is True
    assert trajectory["extra"]["of"]["trajectory_id"] == trajectory["subagent_trajectories"][0]["trajectory_id"]


def test_no_calls_make_a_trajectory_too() -> None:
    refused = a_call([SYSTEM, TASK], None, end=CallEnd.UNAUTHORISED, status=401, cost_usd=None)
    for calls in ([], [refused]):
        found = checked(calls)
        assert len(found["steps"]) == 1
    assert found["extra"]["faults"][0]["end"] == "unauthorised"
    assert "total_cost_usd" not in found["final_metrics"]


# --- The artifact ---------------------------------------------------------------------------------------------------


def test_the_artifact_has_everything_and_each_message_once() -> None:
    calls = a_conversation("a", "b", "c")
    calls[0] = replace(calls[0], prompt_token_ids=(1, 2), token_ids=(3,), logprobs=(-0.5,), parameters={"top_p": 1})
    calls[1] = replace(calls[1], scripted=True, sampling={"applied": {"seed": 7}, "dropped": []})
    calls.append(a_call((), None, end=CallEnd.REFUSED, raw={"request": "{"}, lost="x", waited_s={"model": 1.0}))
    content = export(calls)
    assert read(content) == calls
    lines = zstandard.ZstdDecompressor().decompressobj().decompress(content).splitlines()
    assert orjson.loads(lines[0]) == {"format": FORMAT, "version": 1}
    assert sum(b'"digest"' in line for line in lines) == 2 + 3 + 2 + 1


def test_a_file_of_an_earlier_release_has_no_marks() -> None:
    lines = zstandard.ZstdDecompressor().decompressobj().decompress(export([a_call([TASK], None)])).splitlines()
    told = [orjson.loads(line) for line in lines]
    for line in told:
        for later in ("scripted", "sampling"):
            line.get("call", {}).pop(later, None)
    (found,) = read(zstandard.compress(b"\n".join(orjson.dumps(line) for line in told) + b"\n"))
    assert (found.scripted, found.sampling) == (False, {})


def test_a_trajectory_says_what_was_scripted_and_sampled() -> None:
    calls = a_conversation("a", "b")
    assert checked(calls)["extra"]["scripted"] is False
    sampling = {"applied": {"seed": 7}, "dropped": []}
    calls[1] = replace(calls[1], scripted=True, sampling=sampling)
    found = checked(calls)
    assert found["extra"]["scripted"] is True
    extras = [step["extra"] for step in found["steps"] if step["source"] == "agent"]
    assert [(one.get("scripted"), one.get("sampling")) for one in extras] == [(None, None), (True, sampling)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not zstd",
        zstandard.compress(b"[]\n"),
        zstandard.compress(b'{"format": "other"}\n'),
        zstandard.compress(b'{"format": "megaflow-model-calls", "version": 2}\n'),
        zstandard.compress(b'{"format": "megaflow-model-calls", "version": 1}\n{"call": {}}\n'),
        export(a_conversation("a", "b"))[:-9],
    ],
)
def test_another_file_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="expected"):
        read(content)


def test_the_result_of_the_last_turn_is_in_the_call_that_was_refused_for_it() -> None:
    calls = a_conversation("one", "two")
    last = said("two", "run two")
    calls[-1] = replace(calls[-1], reply=last)
    more = [*calls[-1].messages, last, *results(last, "output of two")]
    refused = a_call(more, None, end=CallEnd.STEP_LIMIT, status=400, cost_usd=None)
    steps = checked([*calls, refused])["steps"]
    assert steps[-1]["observation"]["results"][0]["content"] == "output of two"
    assert checked([*calls, refused, replace(refused, id=UUID(int=next(_count)))])["steps"] == steps


# --- ATIF, as the RFC tells it --------------------------------------------------------------------------------------

_EXTRA = {"type": "object"}
_COUNT = {"type": "integer", "minimum": 0}


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": properties}


_TEXT = {"type": "string"}
SCHEMA: dict[str, Any] = {
    "$ref": "#/$defs/trajectory",
    "$defs": {
        "trajectory": _object(
            "schema_version agent steps",
            schema_version={"const": "ATIF-v1.7"},
            session_id=_TEXT,
            trajectory_id=_TEXT,
            agent=_object(
                "name version",
                name=_TEXT,
                version=_TEXT,
                model_name=_TEXT,
                tool_definitions={"type": "array", "items": {"type": "object"}},
                extra=_EXTRA,
            ),
            steps={"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/step"}},
            notes=_TEXT,
            final_metrics=_object(
                "",
                total_prompt_tokens=_COUNT,
                total_completion_tokens=_COUNT,
                total_cached_tokens=_COUNT,
                total_cost_usd={"type": "number"},
                total_steps=_COUNT,
                extra=_EXTRA,
            ),
            extra=_EXTRA,
            subagent_trajectories={"type": "array", "items": {"$ref": "#/$defs/trajectory"}},
        ),
        "step": _object(
            "step_id source message",
            step_id={"type": "integer", "minimum": 1},
            timestamp=_TEXT,
            source={"enum": ["system", "user", "agent"]},
            model_name=_TEXT,
            message=_TEXT,
            reasoning_content=_TEXT,
            tool_calls={
                "type": "array",
                "items": _object(
                    "tool_call_id function_name arguments",
                    tool_call_id=_TEXT,
                    function_name=_TEXT,
                    arguments={"type": "object"},
                    extra=_EXTRA,
                ),
            },
            observation=_object("results", results={"type": "array", "items": {"$ref": "#/$defs/result"}}),
            metrics=_object(
                "",
                prompt_tokens=_COUNT,
                completion_tokens=_COUNT,
                cached_tokens=_COUNT,
                cost_usd={"type": "number"},
                prompt_token_ids={"type": "array", "items": _COUNT},
                completion_token_ids={"type": "array", "items": _COUNT},
                logprobs={"type": "array", "items": {"type": "number"}},
                extra=_EXTRA,
            ),
            is_copied_context={"type": "boolean"},
            llm_call_count=_COUNT,
            extra=_EXTRA,
        ),
        "result": _object(
            "",
            source_call_id=_TEXT,
            content=_TEXT,
            subagent_trajectory_ref={"type": "array", "items": _object("trajectory_id", trajectory_id=_TEXT)},
            extra=_EXTRA,
        ),
    },
}
_AGENTS_ALONE = {"model_name", "reasoning_content", "tool_calls", "metrics"}


def _hold_together(trajectory: dict[str, Any]) -> None:
    """What a schema of JSON cannot say."""
    assert [step["step_id"] for step in trajectory["steps"]] == list(range(1, len(trajectory["steps"]) + 1))
    for step in trajectory["steps"]:
        assert step["source"] == "agent" or not _AGENTS_ALONE & set(step)
        called = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        for result in step.get("observation", {}).get("results", ()):
            assert result.get("source_call_id") in {*called, None}
    below = trajectory.get("subagent_trajectories", [])
    assert len({one["trajectory_id"] for one in below}) == len(below)
    for one in below:
        _hold_together(one)
