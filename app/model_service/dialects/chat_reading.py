"""Reading what OpenAI's chat completions say: requests, answers, streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from app.model_service.dialects.base import Message, Reply
from app.model_service.dialects.parts import assistant, call_of, content_of, tool_of
from app.model_service.dialects.reading import (
    counted,
    events_of,
    inside,
    listed,
    number,
    quoted,
    said,
    scores_in,
    whole_numbers,
)
from app.models.model_calls import TokenUse

_ROLES = {"developer": "system", "function": "tool"}
_FINISHES = {"function_call": "tool_calls", "max_tokens": "length", "model_length": "length", "abort": ""}
_KNOWN_FINISHES = frozenset({"stop", "length", "tool_calls", "content_filter"})
TOKEN = "token_id:"
"""How vLLM writes a token's id in the place of its text."""


# --- Requests -------------------------------------------------------------------------------------------------------


def message_of(one: Mapping[str, Any]) -> Message:
    """A message in the normal form."""
    role = one.get("role")
    if not isinstance(role, str):
        raise TypeError(f"a message's role is {role!r}")
    role = _ROLES.get(role, role)
    content = content_of(one.get("content"))
    if role == "assistant":
        return _assistant(one, content)
    message: Message = {"role": role, "content": content}
    if role == "tool":
        message["tool_call_id"] = str(one.get("tool_call_id") or one.get("name") or "")
    return message


def _assistant(one: Mapping[str, Any], content: str | list[dict[str, Any]]) -> Message:
    if not content and isinstance(refusal := one.get("refusal"), str):
        content = refusal
    return assistant(content, reasoning=_thoughts(one), tool_calls=list(_calls(one)))


def _thoughts(one: Mapping[str, Any]) -> str:
    for name in ("reasoning_content", "reasoning"):
        if isinstance(found := one.get(name), str) and found:
            return found
    return "".join(said(block.get("thinking")) for block in listed(one.get("thinking_blocks")))


def _calls(one: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for call in listed(one.get("tool_calls")):
        if isinstance(custom := call.get("custom"), dict):
            yield call_of(call.get("id"), custom.get("name"), {"input": custom.get("input")})
        else:
            function = call.get("function") or {}
            yield call_of(call.get("id"), function.get("name"), function.get("arguments"))
    if isinstance(old := one.get("function_call"), dict):
        yield call_of("", old.get("name"), old.get("arguments"))


def tools_of(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The offered tools, and what used to be called functions."""
    for tool in listed(body.get("tools")):
        function = tool.get("function")
        if isinstance(function, dict):
            strict = {"strict": True} if function.get("strict") else {}
            yield tool_of(function.get("name"), function.get("description"), function.get("parameters"), **strict)
        else:
            yield tool_of(inside(tool, "custom", "name") or tool.get("type"), "", None, given=dict(tool))
    for function in listed(body.get("functions")):
        yield tool_of(function.get("name"), function.get("description"), function.get("parameters"))


# --- Answers --------------------------------------------------------------------------------------------------------


def of_body(body: Mapping[str, Any]) -> Reply:
    """A whole answer. Raises: ValueError."""
    choices = listed(body.get("choices"))
    if not choices or body.get("error"):
        raise ValueError(f"expected an answer with choices; found {str(body.get('error') or body)[:200]}")
    choice = choices[0]
    ids, scores = _scored(choice)
    return Reply(
        message=_assistant(choice["message"], content_of(choice["message"].get("content"))),
        finish_reason=_finish(choice.get("finish_reason")),
        usage=usage_of(body.get("usage")),
        model=said(body.get("model")),
        prompt_token_ids=_prompt_ids(body, choice),
        token_ids=ids,
        logprobs=scores,
    )


def of_stream(content: bytes) -> Reply:
    """A streamed answer, as far as it came. Raises: ValueError."""
    text: list[str] = []
    thoughts: list[str] = []
    calls: dict[int, dict[str, str]] = {}
    ids: list[int] | None = None
    scores: list[float] | None = None
    prompt_ids, finish, model, usage, failed, any_choice = None, None, "", TokenUse(), "", False
    for chunk in events_of(content):
        failed = failed or (str(chunk["error"])[:200] if chunk.get("error") else "")
        model = model or said(chunk.get("model"))
        if isinstance(chunk.get("usage"), dict):
            usage = usage_of(chunk["usage"])
        for choice in listed(chunk.get("choices"))[:1]:
            if choice.get("index"):
                continue  # the other answers of a request for several
            any_choice = True
            delta = choice.get("delta") or {}
            text.append(said(delta.get("content")) or said(delta.get("refusal")))
            thoughts.append(_thoughts(delta))
            _add_calls(calls, delta)
            prompt_ids = _prompt_ids(chunk, choice) if prompt_ids is None else prompt_ids
            some_ids, some_scores = _scored(choice)
            ids = ids if some_ids is None else [*(ids or ()), *some_ids]
            scores = scores if some_scores is None else [*(scores or ()), *some_scores]
            finish = choice.get("finish_reason") or finish
    if not any_choice:
        raise ValueError(f"expected a stream with choices; found {failed or quoted(content)}")
    return Reply(
        message=assistant("".join(text), reasoning="".join(thoughts), tool_calls=[calls[at] for at in sorted(calls)]),
        finish_reason=_finish(finish),
        usage=usage,
        model=model,
        prompt_token_ids=prompt_ids,
        token_ids=None if ids is None else tuple(ids),
        logprobs=None if scores is None else tuple(scores),
        complete=bool(finish) and not failed,
    )


def _add_calls(calls: dict[int, dict[str, str]], delta: Mapping[str, Any]) -> None:
    for place, piece in enumerate(listed(delta.get("tool_calls"))):
        at = piece.get("index")
        call = calls.setdefault(at if type(at) is int else place, call_of("", "", ""))
        function = piece.get("function") or {}
        call["id"] = call["id"] or said(piece.get("id"))
        call["name"] = call["name"] or said(function.get("name"))
        call["arguments"] += said(function.get("arguments"))
    if isinstance(old := delta.get("function_call"), dict):
        call = calls.setdefault(0, call_of("", "", ""))
        call["name"] = call["name"] or said(old.get("name"))
        call["arguments"] += said(old.get("arguments"))


def _finish(value: object) -> str:
    found = _FINISHES.get(said(value), said(value))
    return found if found in _KNOWN_FINISHES or not found else "stop"


def usage_of(told: object) -> TokenUse:
    """Tokens as engines tell them."""
    cached = number(inside(told, "prompt_tokens_details", "cached_tokens"))
    return counted(
        TokenUse(
            prompt=number(inside(told, "prompt_tokens")),
            completion=number(inside(told, "completion_tokens")),
            cached=number(inside(told, "prompt_cache_hit_tokens")) if cached is None else cached,
            reasoning=number(inside(told, "completion_tokens_details", "reasoning_tokens")),
        )
    )


def _prompt_ids(body: Mapping[str, Any], choice: Mapping[str, Any]) -> tuple[int, ...] | None:
    for found in (
        body.get("prompt_token_ids"),
        choice.get("prompt_token_ids"),
        inside(choice, "meta_info", "prompt_token_ids"),
    ):
        if (ids := whole_numbers(found)) is not None:
            return ids
    return None


def _scored(choice: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    """Ids and log-probabilities of the tokens of an answer, or of a piece of one."""
    ids = whole_numbers(choice.get("token_ids"))
    triples = inside(choice, "meta_info", "output_token_logprobs")  # SGLang: log-probability, id, text
    if isinstance(triples, list):
        return ids or whole_numbers([one[1] for one in triples]), scores_in([one[0] for one in triples])
    tokens = inside(choice, "logprobs", "content")
    if not isinstance(tokens, list):
        return ids, None
    scores = scores_in([inside(token, "logprob") for token in tokens])
    named = [said(token.get("token")) for token in tokens]
    if ids is None and named and all(name.startswith(TOKEN) for name in named):
        ids = tuple(int(name.removeprefix(TOKEN)) for name in named)
    return ids, scores
