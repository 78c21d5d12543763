"""What engines and clients really write, beyond what we write ourselves: as seen at vLLM, SGLang and the providers."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from app.model_service.dialects import codec_for
from app.model_service.dialects.base import meaning_digest
from app.models.model_calls import Dialect, TokenUse

CHAT, RESPONSES, MESSAGES = (codec_for(dialect) for dialect in (Dialect.CHAT, Dialect.RESPONSES, Dialect.MESSAGES))


def body(**values: Any) -> bytes:
    return orjson.dumps(values)


def stream(*events: dict[str, Any], done: bool = True) -> bytes:
    return b"".join(b"data: " + orjson.dumps(one) + b"\n\n" for one in events) + (b"data: [DONE]\n\n" if done else b"")


def test_vllms_token_ids_and_thoughts_in_a_stream() -> None:
    def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta, **more}], "usage": None}

    content = stream(
        {**chunk({"role": "assistant"}), "prompt_token_ids": [1, 2, 3], "model": "qwen"},
        chunk({"reasoning": "hm"}, token_ids=[4]),
        chunk({"content": "yes"}, token_ids=[5, 6], logprobs={"content": [{"token": "y", "logprob": -1}] * 2}),
        chunk({}, token_ids=[7], finish_reason="stop"),
        {
            "choices": [],
            "usage": {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}},
        },
    )
    found = CHAT.reply(content, streamed=True)
    assert found.message == {"role": "assistant", "content": "yes", "reasoning": "hm"}
    assert (found.prompt_token_ids, found.token_ids, found.logprobs) == ((1, 2, 3), (4, 5, 6, 7), (-1.0, -1.0))
    assert CHAT.usage(content, streamed=True) == found.usage == TokenUse(3, 4, 2)


def test_token_ids_in_place_of_tokens() -> None:
    tokens = [{"token": f"token_id:{one}", "logprob": -0.5} for one in (7, 8)]
    choice = {
        "message": {"role": "assistant", "content": "x"},
        "finish_reason": "stop",
        "logprobs": {"content": tokens},
    }
    found = CHAT.reply(body(choices=[choice]), streamed=False)
    assert (found.token_ids, found.logprobs) == ((7, 8), (-0.5, -0.5))


def test_sglangs_triples() -> None:
    choice = {
        "message": {"role": "assistant", "content": "x", "reasoning_content": "r"},
        "finish_reason": "stop",
        "meta_info": {"output_token_logprobs": [[-0.5, 7, "x"], [-0.25, 8, ""]]},
    }
    found = CHAT.reply(body(choices=[choice]), streamed=False)
    assert (found.token_ids, found.logprobs, found.message["reasoning"]) == ((7, 8), (-0.5, -0.25), "r")


def test_tool_calls_in_pieces_that_are_mixed() -> None:
    def piece(at: int, **function: str) -> dict[str, Any]:
        call = {"index": at, "id": f"c{at}" if "name" in function else None, "function": function}
        return {"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}

    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    pieces = (
        piece(0, name="a", arguments=""),
        piece(1, name="b", arguments=""),
        piece(1, arguments="{}"),
        piece(0, arguments="[1]"),
    )
    found = CHAT.reply(stream(*pieces, end), streamed=True)
    assert found.message["tool_calls"] == [
        {"id": "c0", "name": "a", "arguments": "[1]"},
        {"id": "c1", "name": "b", "arguments": "{}"},
    ]
    assert found.complete


def test_an_end_without_done_is_an_end_and_an_error_is_none() -> None:
    said = {"choices": [{"index": 0, "delta": {"content": "x"}}]}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    assert CHAT.reply(stream(said, end, done=False), streamed=True).complete
    assert not CHAT.reply(stream(said), streamed=True).complete
    assert not CHAT.reply(stream(said, {"error": {"message": "no"}}), streamed=True).complete
    with pytest.raises(ValueError, match="out of memory"):
        CHAT.reply(stream({"error": {"message": "out of memory"}}), streamed=True)
    with pytest.raises(ValueError, match="choices"):
        CHAT.reply(body(error={"message": "no"}), streamed=False)


def test_parts_and_bounds_of_a_request() -> None:
    asked = CHAT.request(
        {
            "model": "m",
            "messages": [
                {
                    "role": "developer",
                    "content": [{"type": "text", "text": "be brief", "cache_control": {"type": "x"}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}],
                },
            ],
            "max_completion_tokens": 10,
            "max_tokens": 20,
            "temperature": 0,
        }
    )
    assert [message["role"] for message in asked.messages] == ["system", "user"]
    assert asked.messages[0]["content"] == "be brief"
    assert asked.messages[1]["content"][1]["image_url"] == {"url": "u"}
    assert (asked.max_tokens, asked.parameters) == (10, {"temperature": 0})


@pytest.mark.parametrize(
    ("codec", "given", "expected"),
    [
        (CHAT, {"model": "m"}, {"max_tokens": 100}),
        (CHAT, {"model": "gpt-5-mini"}, {"max_completion_tokens": 100}),
        (CHAT, {"model": "o3", "max_tokens": 7}, {"max_tokens": 7}),
        (CHAT, {"max_tokens": 700, "max_completion_tokens": 50}, {"max_tokens": 100, "max_completion_tokens": 50}),
        (RESPONSES, {"max_output_tokens": 101}, {"max_output_tokens": 100}),
        (RESPONSES, {}, {"max_output_tokens": 100}),
        (MESSAGES, {"max_tokens": 3000}, {"max_tokens": 100}),
        (
            MESSAGES,
            {"max_tokens": 3000, "thinking": {"type": "enabled", "budget_tokens": 2000}},
            {"max_tokens": 100, "thinking": {"type": "disabled"}},
        ),
    ],
)
def test_wishes_are_cut(codec: Any, given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert codec.with_max_tokens(given, 100) == {**given, **expected}


def test_a_budget_for_thinking_stays_below_the_bound() -> None:
    given = {"max_tokens": 32000, "thinking": {"type": "enabled", "budget_tokens": 31999}}
    assert MESSAGES.with_max_tokens(given, 8000)["thinking"] == {"type": "enabled", "budget_tokens": 4000}
    assert MESSAGES.with_max_tokens(given, 32000)["thinking"]["budget_tokens"] == 31999


def test_results_of_tools_are_messages_of_their_own() -> None:
    asked = MESSAGES.request(
        {
            "model": "m",
            "max_tokens": 5,
            "system": [
                {"type": "text", "text": "a"},
                {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                {"role": "user", "content": "go"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "text", "text": "both"},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                        {"type": "tool_use", "id": "2", "name": "f", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": "one"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "2",
                            "content": [{"type": "text", "text": "two"}],
                            "is_error": True,
                        },
                        {"type": "text", "text": "<system-reminder/>"},
                    ],
                },
            ],
        }
    )
    assert asked.messages == (
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "both",
            "reasoning": "hm",
            "reasoning_signature": "s",
            "tool_calls": [
                {"id": "1", "name": "f", "arguments": '{"x":1}'},
                {"id": "2", "name": "f", "arguments": "{}"},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two", "is_error": True},
        {"role": "user", "content": "<system-reminder/>"},
    )


def test_the_tokens_of_a_stream_are_told_at_both_ends() -> None:
    start = {
        "type": "message_start",
        "message": {"usage": {"input_tokens": 10, "cache_read_input_tokens": 5, "output_tokens": 1}},
    }
    text = [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}}] * 50
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 60}}
    content = stream(
        start,
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *text,
        end,
        done=False,
    )
    assert MESSAGES.usage(content, streamed=True) == TokenUse(15, 60, 5)
    found = MESSAGES.reply(content, streamed=True)
    assert (found.message["content"], found.finish_reason, found.complete) == ("x" * 50, "stop", True)
    assert not MESSAGES.reply(content[: content.rindex(b"data:")], streamed=True).complete


def test_tools_of_the_provider_keep_their_form() -> None:
    tool = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    asked = MESSAGES.request(
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    )
    assert asked.tools[0]["name"] == "web_search"
    assert asked.tools[0]["given"] == tool


def test_items_of_one_turn_are_one_message() -> None:
    asked = RESPONSES.request(
        {
            "model": "m",
            "instructions": "be brief",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [{"type": "summary_text", "text": "hm"}],
                    "encrypted_content": "z",
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "ok", "annotations": []}],
                },
                {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "1"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
            ],
        }
    )
    assert [message["role"] for message in asked.messages] == ["system", "user", "assistant", "tool", "tool"]
    turn = asked.messages[2]
    assert (turn["content"], turn["reasoning"], [call["id"] for call in turn["tool_calls"]]) == (
        "ok",
        "hm",
        ["c1", "c2"],
    )
    assert asked.messages[4]["content"] == "2"


def test_a_response_whose_last_event_repeats_nothing() -> None:
    """Some servers leave the output out of it."""
    item = {"type": "message", "id": "m1", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}
    content = stream(
        {"type": "response.created", "response": {"id": "r", "output": [], "model": "m"}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {
            "type": "response.completed",
            "response": {
                "id": "r",
                "status": "completed",
                "output": [],
                "usage": {"input_tokens": 1, "output_tokens": 2},
            },
        },
        done=False,
    )
    found = RESPONSES.reply(content, streamed=True)
    assert (found.message["content"], found.finish_reason, found.complete) == ("hi", "stop", True)
    assert RESPONSES.usage(content, streamed=True) == TokenUse(1, 2)


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "assistant", "content": "x", "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "image", "source": "s"}]},
    ],
)
def test_what_makes_another(other: dict[str, Any]) -> None:
    assert meaning_digest({"role": "assistant", "content": "x"}) != meaning_digest(other)
