"""Token ids of scripted answers: only where they are asked for, and such that a conversation's prefix stays."""

from __future__ import annotations

from typing import Any

from app.model_service.dialects.base import Reply, Request
from app.model_service.replay.player import ReplayAnswer, ScriptPlayer, with_ids
from app.model_service.replay.script import Script, Turn

PLAYER = ScriptPlayer([Script(match="box", name="s", turns=(Turn(command="ls"), Turn(thought="Done.", submit=True)))])
TOOL = {"name": "bash", "description": "", "parameters": {"properties": {"command": {"type": "string"}}}}


def _ask(messages: list[dict[str, Any]], **parameters: Any) -> Reply:
    request = Request("replay", tuple(messages), (TOOL,), False, None, parameters)
    found = with_ids(PLAYER.play(request, {}, prompt_tokens=1, script=None), request).content
    assert isinstance(found, Reply)
    return found


def test_the_second_prompt_begins_with_the_first_and_its_answer() -> None:
    messages = [{"role": "user", "content": "open the box"}]
    first = _ask(messages, return_token_ids=True)
    result = {"role": "tool", "tool_call_id": first.message["tool_calls"][0]["id"], "content": "a"}
    second = _ask([*messages, first.message, result], return_token_ids=True)
    assert first.prompt_token_ids
    assert first.token_ids
    before = (*first.prompt_token_ids, *first.token_ids)
    assert second.prompt_token_ids is not None
    assert second.prompt_token_ids[: len(before)] == before
    assert len(second.prompt_token_ids) > len(before)
    assert first.logprobs == (0.0,) * len(first.token_ids)


def test_without_being_asked_for_there_are_none_and_an_engines_own_stay() -> None:
    assert _ask([{"role": "user", "content": "open the box"}]).token_ids is None
    request = Request("replay", (), (), False, None, {"return_token_ids": True})
    recorded = ReplayAnswer(Reply({"role": "assistant", "content": ""}, "stop", None, token_ids=(4,)))  # type: ignore[arg-type]
    assert with_ids(recorded, request) is recorded
