"""Writing OpenAI's chat completions: messages, answers, their pieces."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.model_service.dialects.base import Message, Reply, Request
from app.model_service.dialects.chat_reading import TOKEN
from app.model_service.dialects.parts import parts_of, pieces, text_of
from app.models.model_calls import TokenUse


def head(reply: Reply, answer_id: str, request: Request) -> dict[str, Any]:
    """What an answer and its pieces have in common."""
    return {"id": answer_id, "created": int(time.time()), "model": reply.model or request.model}


def choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    """A piece of the one answer."""
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


def written(message: Message) -> dict[str, Any]:
    """A message of the normal form as this dialect writes it."""
    role, content = message["role"], message["content"]
    written: dict[str, Any] = {"role": role, "content": content if isinstance(content, str) else parts_of(content)}
    if role == "tool":
        written["tool_call_id"] = message.get("tool_call_id", "")
    if message.get("reasoning"):
        written["reasoning_content"] = message["reasoning"]
    if calls := message.get("tool_calls"):
        written["tool_calls"] = [_call(call) for call in calls]
        written["content"] = written["content"] or None
    return written


def _call(call: Mapping[str, str]) -> dict[str, Any]:
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["name"], "arguments": call["arguments"]},
    }


def deltas(message: Message) -> Iterator[dict[str, Any]]:
    """An answer in pieces."""
    for piece in pieces(message.get("reasoning", "")):
        yield {"reasoning_content": piece}
    for piece in pieces(text_of(message["content"])):
        yield {"content": piece}
    for at, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": at, **_call({**call, "arguments": ""})}]}
        for piece in pieces(call["arguments"]):
            yield {"tool_calls": [{"index": at, "function": {"arguments": piece}}]}


def usage_told(usage: TokenUse) -> dict[str, Any] | None:
    """None: not known."""
    if usage.prompt is None or usage.completion is None:
        return None
    told: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
    }
    if usage.cached is not None:
        told["prompt_tokens_details"] = {"cached_tokens": usage.cached}
    if usage.reasoning is not None:
        told["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
    return told


def as_list(ids: tuple[int, ...] | None) -> list[int] | None:
    """For JSON."""
    return None if ids is None else list(ids)


def logprobs_of(scores: Sequence[float] | None, ids: Sequence[int] | None) -> dict[str, Any] | None:
    """Log-probabilities, with the ids of their tokens where they are known."""
    if scores is None:
        return None
    names = [f"{TOKEN}{one}" for one in ids] if ids is not None and len(ids) == len(scores) else [""] * len(scores)
    tokens: list[dict[str, Any]] = [
        {"token": name, "logprob": score, "bytes": None, "top_logprobs": []}
        for name, score in zip(names, scores, strict=True)
    ]
    return {"content": tokens, "refusal": None}
