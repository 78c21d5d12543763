"""The dialect of OpenAI's chat completions, with the reasoning and token ids of vLLM and SGLang."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.model_service.dialects.base import (
    DialectCodec,
    Message,
    Reply,
    Request,
    assistant,
    call_of,
    content_of,
    event,
    parts_of,
    pieces,
    spans_in,
    spread,
    text_of,
    tool_of,
)
from app.model_service.dialects.reading import (
    events_of,
    excerpt,
    list_or_empty,
    objects_of,
    scores_in,
    text_or_empty,
    token_count,
    usage_at,
    value_at,
    whole_numbers,
)
from app.models.model_calls import Dialect, TokenUse, VersionSpan

_BOUNDS = ("max_completion_tokens", "max_tokens")
_MODERN = re.compile(r"(openai/)?(o\d|gpt-([5-9]|\d\d))")
"""OpenAI's models that refuse `max_tokens`; self-hosted engines know only `max_tokens`."""
TOO_LONG = "This model's maximum context length is exceeded"
"""Text that clients look for."""
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ChatCodec(DialectCodec):
    """Codec of `Dialect.CHAT`."""

    dialect = Dialect.CHAT
    title = "chat completions"
    own_keys = frozenset({"model", "messages", "tools", "stream", *_BOUNDS})

    def _messages(self, body: Mapping[str, Any]) -> Iterator[Message]:
        return map(_message, objects_of(body, "messages", self.title))

    def _tools(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for tool in list_or_empty(body.get("tools")):
            function = tool.get("function")
            if isinstance(function, dict):
                strict = {"strict": True} if function.get("strict") else {}
                yield tool_of(function.get("name"), function.get("description"), function.get("parameters"), **strict)
            else:
                yield tool_of(value_at(tool, "custom", "name") or tool.get("type"), "", None, given=dict(tool))

    def _max_tokens(self, body: Mapping[str, Any]) -> int | None:
        bounds = (token_count(body.get(name)) for name in _BOUNDS)
        return min((bound for bound in bounds if bound is not None), default=None)

    def _of_body(self, body: Mapping[str, Any]) -> Reply:
        choices = list_or_empty(body.get("choices"))
        if not choices or body.get("error"):
            raise ValueError(f"expected an answer with choices; found {str(body.get('error') or body)[:200]}")
        choice = choices[0]
        ids, scores = _ids_and_logprobs(choice)
        return Reply(
            message=_assistant(choice["message"], content_of(choice["message"].get("content"))),
            finish_reason=_finish(choice.get("finish_reason")),
            usage=usage_of(body.get("usage")),
            model=text_or_empty(body.get("model")),
            prompt_token_ids=_prompt_ids(body, choice),
            token_ids=ids,
            logprobs=scores,
            versions=_versions(choice),
        )

    def _of_stream(self, content: bytes) -> Reply:
        text: list[str] = []
        thoughts: list[str] = []
        calls: dict[int, dict[str, str]] = {}
        ids: list[int] | None = None
        scores: list[float] | None = None
        prompt_ids, finish, model, usage, failed, any_choice = None, None, "", TokenUse(), "", False
        versions: tuple[VersionSpan, ...] = ()
        for chunk in events_of(content):
            failed = failed or (str(chunk["error"])[:200] if chunk.get("error") else "")
            model = model or text_or_empty(chunk.get("model"))
            if isinstance(chunk.get("usage"), dict):
                usage = usage_of(chunk["usage"])
            for choice in list_or_empty(chunk.get("choices"))[:1]:
                if choice.get("index"):
                    continue  # only the first of several answers is read
                any_choice = True
                delta = choice.get("delta") or {}
                text.append(text_or_empty(delta.get("content")) or text_or_empty(delta.get("refusal")))
                thoughts.append(_reasoning(delta))
                _add_calls(calls, delta)
                prompt_ids = _prompt_ids(chunk, choice) if prompt_ids is None else prompt_ids
                some_ids, some_scores = _ids_and_logprobs(choice)
                ids = ids if some_ids is None else [*(ids or ()), *some_ids]
                scores = scores if some_scores is None else [*(scores or ()), *some_scores]
                versions = _versions(choice) or versions  # each chunk reports the versions up to it
                finish = choice.get("finish_reason") or finish
        if not any_choice:
            raise ValueError(f"expected a stream with choices; found {failed or excerpt(content)}")
        return Reply(
            message=assistant(
                "".join(text), reasoning="".join(thoughts), tool_calls=[calls[at] for at in sorted(calls)]
            ),
            finish_reason=_finish(finish),
            usage=usage,
            model=model,
            prompt_token_ids=prompt_ids,
            token_ids=None if ids is None else tuple(ids),
            logprobs=None if scores is None else tuple(scores),
            versions=versions,
            complete=bool(finish) and not failed,
        )

    def _usage(self, bodies: Sequence[Mapping[str, Any]]) -> TokenUse:
        reported = (one["usage"] for one in reversed(bodies) if isinstance(one.get("usage"), dict))
        return usage_of(next(reported, None))

    def with_max_tokens(self, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        names = [name for name in _BOUNDS if token_count(body.get(name)) is not None]
        body = {key: value for key, value in body.items() if key not in _BOUNDS or key in names}
        if not names:
            modern = _MODERN.match(text_or_empty(body.get("model")))
            return {**body, "max_completion_tokens" if modern else "max_tokens": max_tokens}
        return {**body, **{name: min(int(body[name]), max_tokens) for name in names}}

    def whole(self, reply: Reply, *, id: str, request: Request) -> dict[str, Any]:  # noqa: A002
        ids = bool(request.parameters.get("return_token_ids"))
        choice: dict[str, Any] = {
            "index": 0,
            "message": assistant_message(reply.message),
            "logprobs": logprobs_of(reply.logprobs, reply.token_ids) if request.parameters.get("logprobs") else None,
            "finish_reason": reply.finish_reason or None,
        }
        body = {**head(reply, id, request), "object": "chat.completion", "choices": [choice]}
        if (usage := usage_fields(reply.usage)) is not None:
            body["usage"] = usage
        if ids:
            choice["token_ids"] = reply.token_ids
            body["prompt_token_ids"] = reply.prompt_token_ids
        return body

    def events(self, reply: Reply, *, id: str, request: Request) -> Iterator[bytes]:  # noqa: A002
        ids, scores = bool(request.parameters.get("return_token_ids")), bool(request.parameters.get("logprobs"))
        common = {**head(reply, id, request), "object": "chat.completion.chunk"}
        first = {**common, "prompt_token_ids": reply.prompt_token_ids} if ids else common
        yield event({**first, "choices": [_choice({"role": "assistant", "content": ""})]})
        pieces_ = list(deltas(reply.message)) or [{"content": ""}]
        dealt_ids, dealt_scores = spread(reply.token_ids, len(pieces_)), spread(reply.logprobs, len(pieces_))
        for delta, token_ids, logprobs in zip(pieces_, dealt_ids, dealt_scores, strict=True):
            choice = _choice(delta)
            if ids and reply.token_ids is not None:
                choice["token_ids"] = token_ids
            if scores and reply.logprobs is not None:
                choice["logprobs"] = logprobs_of(logprobs, token_ids)
            yield event({**common, "choices": [choice]})
        yield event({**common, "choices": [_choice({}, reply.finish_reason or None)]})
        if value_at(request.parameters.get("stream_options"), "include_usage") and (usage := usage_fields(reply.usage)):
            yield event({**common, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        return error_body(status, code, message)

    def error_event(self, status: int, code: str, message: str) -> bytes:
        return event(error_body(status, code, message))


def error_body(status: int, code: str, message: str) -> dict[str, Any]:
    """Returns an error as OpenAI's clients read it, in both of its dialects."""
    if code == "context_length_exceeded" and "maximum context length" not in message:
        message = f"{TOO_LONG}: {message}"
    kind = _ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


_ROLES = {"developer": "system"}
_FINISHES = {"max_tokens": "length", "model_length": "length", "abort": ""}
_KNOWN_FINISHES = frozenset({"stop", "length", "tool_calls", "content_filter"})
TOKEN = "token_id:"
"""Prefix with which vLLM writes a token's id instead of its text."""


def _message(one: Mapping[str, Any]) -> Message:
    role = one.get("role")
    if not isinstance(role, str):
        raise TypeError(f"a message's role is {role!r}")
    role = _ROLES.get(role, role)
    content = content_of(one.get("content"))
    if role == "assistant":
        return _assistant(one, content)
    message: Message = {"role": role, "content": content}
    if role == "tool":
        message["tool_call_id"] = str(one.get("tool_call_id") or "")
    return message


def _assistant(one: Mapping[str, Any], content: str | list[dict[str, Any]]) -> Message:
    if not content and isinstance(refusal := one.get("refusal"), str):
        content = refusal
    return assistant(content, reasoning=_reasoning(one), tool_calls=list(_tool_calls(one)))


def _reasoning(one: Mapping[str, Any]) -> str:
    for name in ("reasoning_content", "reasoning"):
        if isinstance(text := one.get(name), str) and text:
            return text
    return "".join(text_or_empty(block.get("thinking")) for block in list_or_empty(one.get("thinking_blocks")))


def _tool_calls(one: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for call in list_or_empty(one.get("tool_calls")):
        if isinstance(custom := call.get("custom"), dict):
            yield call_of(call.get("id"), custom.get("name"), {"input": custom.get("input")})
        else:
            function = call.get("function") or {}
            yield call_of(call.get("id"), function.get("name"), function.get("arguments"))


def _add_calls(calls: dict[int, dict[str, str]], delta: Mapping[str, Any]) -> None:
    for place, piece in enumerate(list_or_empty(delta.get("tool_calls"))):
        at = piece.get("index")
        call = calls.setdefault(at if type(at) is int else place, call_of("", "", ""))
        function = piece.get("function") or {}
        call["id"] = call["id"] or text_or_empty(piece.get("id"))
        call["name"] = call["name"] or text_or_empty(function.get("name"))
        call["arguments"] += text_or_empty(function.get("arguments"))


def _finish(value: object) -> str:
    reason = _FINISHES.get(text_or_empty(value), text_or_empty(value))
    return reason if reason in _KNOWN_FINISHES or not reason else "stop"


def usage_of(told: object) -> TokenUse:
    """Reads the tokens that an engine reports."""
    cached = token_count(value_at(told, "prompt_tokens_details", "cached_tokens"))
    return usage_at(
        told,
        prompt="prompt_tokens",
        completion="completion_tokens",
        cached="prompt_cache_hit_tokens" if cached is None else "prompt_tokens_details.cached_tokens",
        reasoning="completion_tokens_details.reasoning_tokens",
    )


def _prompt_ids(body: Mapping[str, Any], choice: Mapping[str, Any]) -> tuple[int, ...] | None:
    for value in (
        body.get("prompt_token_ids"),
        choice.get("prompt_token_ids"),
        value_at(choice, "meta_info", "prompt_token_ids"),
    ):
        if (ids := whole_numbers(value)) is not None:
            return ids
    return None


def _ids_and_logprobs(choice: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    ids = whole_numbers(choice.get("token_ids", choice.get("response_token_ids")))
    triples = value_at(choice, "meta_info", "output_token_logprobs")  # SGLang: log-probability, id, text
    if isinstance(triples, list):
        return ids or whole_numbers([one[1] for one in triples]), scores_in([one[0] for one in triples])
    tokens = value_at(choice, "logprobs", "content")
    if not isinstance(tokens, list):
        return ids, None
    scores = scores_in([value_at(token, "logprob") for token in tokens])
    named = [text_or_empty(token.get("token")) for token in tokens]
    if ids is None and named and all(name.startswith(TOKEN) for name in named):
        ids = tuple(int(name.removeprefix(TOKEN)) for name in named)
    return ids, scores


def _versions(choice: Mapping[str, Any]) -> tuple[VersionSpan, ...]:
    return spans_in(choice.get("weight_versions") or value_at(choice, "meta_info", "weight_versions"))


def head(reply: Reply, answer_id: str, request: Request) -> dict[str, Any]:
    """Returns the fields that an answer and its pieces have in common."""
    return {"id": answer_id, "created": int(time.time()), "model": reply.model or request.model}


def _choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


def assistant_message(message: Message) -> dict[str, Any]:
    """Converts an assistant's message from the normal form to this dialect."""
    content = message["content"]
    body: dict[str, Any] = {"role": "assistant", "content": content if isinstance(content, str) else parts_of(content)}
    if message.get("reasoning"):
        body["reasoning_content"] = message["reasoning"]
    if calls := message.get("tool_calls"):
        body["tool_calls"] = [_call(call) for call in calls]
        body["content"] = body["content"] or None
    return body


def _call(call: Mapping[str, str]) -> dict[str, Any]:
    return {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}


def deltas(message: Message) -> Iterator[dict[str, Any]]:
    """Yields an answer in pieces."""
    for piece in pieces(message.get("reasoning", "")):
        yield {"reasoning_content": piece}
    for piece in pieces(text_of(message["content"])):
        yield {"content": piece}
    for at, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": at, **_call({**call, "arguments": ""})}]}
        for piece in pieces(call["arguments"]):
            yield {"tool_calls": [{"index": at, "function": {"arguments": piece}}]}


def usage_fields(usage: TokenUse) -> dict[str, Any] | None:
    """Returns the fields of a usage. None: not known."""
    if usage.prompt is None or usage.completion is None:
        return None
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
    }
    if usage.cached is not None:
        fields["prompt_tokens_details"] = {"cached_tokens": usage.cached}
    if usage.reasoning is not None:
        fields["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
    return fields


def logprobs_of(scores: Sequence[float] | None, ids: Sequence[int] | None) -> dict[str, Any] | None:
    """Returns log-probabilities, with the ids of their tokens if they are known."""
    if scores is None:
        return None
    names = [f"{TOKEN}{one}" for one in ids] if ids is not None and len(ids) == len(scores) else [""] * len(scores)
    tokens: list[dict[str, Any]] = [
        {"token": name, "logprob": score, "bytes": None, "top_logprobs": []}
        for name, score in zip(names, scores, strict=True)
    ]
    return {"content": tokens, "refusal": None}
