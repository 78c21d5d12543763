"""The dialect of OpenAI's responses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from app.model_service.dialects.base import (
    TOKENS,
    DialectCodec,
    Message,
    Reply,
    Request,
    assistant,
    call_of,
    content_of,
    event,
    is_text,
    parts_of,
    pieces,
    text_of,
    token_fields,
    tokens_in,
    tool_of,
)
from app.model_service.dialects.chat import error_body
from app.model_service.dialects.reading import (
    events_of,
    excerpt,
    list_or_empty,
    scores_in,
    text_or_empty,
    token_count,
    unexpected,
    usage_at,
    value_at,
)
from app.models.model_calls import Dialect, TokenUse


class ResponsesCodec(DialectCodec):
    """Codec of `Dialect.RESPONSES`."""

    dialect = Dialect.RESPONSES
    title = "responses"
    own_keys = frozenset({"model", "input", "instructions", "tools", "stream", "max_output_tokens"})

    def _messages(self, body: Mapping[str, Any]) -> Iterator[Message]:
        """Reads the messages; neighbouring items of the assistant become one message."""
        instructions, items = body.get("instructions"), body.get("input")
        if isinstance(instructions, str) and instructions:
            yield {"role": "system", "content": instructions}
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if not isinstance(items, list) or not all(isinstance(one, dict) for one in items):
            raise unexpected(self.title, "`input`, a text or a list of objects", items)
        for is_assistants, group in groupby(items, _is_assistants):
            if is_assistants:
                yield _assistant(list(group))
            else:
                yield from map(_other_message, group)

    def _tools(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for tool in list_or_empty(body.get("tools")):
            if tool.get("type") == "function":
                strict = {"strict": True} if tool.get("strict") else {}
                yield tool_of(tool.get("name"), tool.get("description"), tool.get("parameters"), **strict)
            else:
                yield tool_of(tool.get("name") or tool.get("type"), tool.get("description"), None, given=dict(tool))

    def _max_tokens(self, body: Mapping[str, Any]) -> int | None:
        return token_count(body.get("max_output_tokens"))

    def _of_body(self, body: Mapping[str, Any]) -> Reply:
        if body.get("error") or not isinstance(body.get("output"), list):
            raise ValueError(f"expected an answer with output; found {str(body.get('error') or body)[:200]}")
        output = [item for item in body["output"] if isinstance(item, dict)]
        message = _assistant(output)
        status, reason = body.get("status"), value_at(body.get("incomplete_details"), "reason")
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        if status == "incomplete":
            finish = _REASONS.get(text_or_empty(reason), "length")
        elif status not in ("completed", None):
            finish = ""
        return Reply(
            message=message,
            finish_reason=finish,
            usage=usage_of(body.get("usage")),
            model=text_or_empty(body.get("model")),
            **(tokens_in(body) | {"logprobs": _scores(body, output)}),
        )

    def _of_stream(self, content: bytes) -> Reply:
        items: dict[int, dict[str, Any]] = {}
        begun: dict[str, Any] = {}
        ended: dict[str, Any] | None = None
        failed = ""
        for one in events_of(content):
            kind = text_or_empty(one.get("type"))
            if kind in _ENDS:
                ended = dict(one["response"])
                failed = str(ended.get("error")) if kind == "response.failed" else failed
            elif kind in ("response.created", "response.in_progress"):
                begun = dict(one["response"])
            elif kind == TOKENS:
                begun = one | begun
            elif kind == "error" or one.get("error"):
                failed = str(one.get("message") or one.get("error"))[:200]
            else:
                _add(items, kind, one)
        output = [items[at] for at in sorted(items)]
        if not (begun or ended) or (failed and not output):
            raise ValueError(f"expected a stream of events of a response; found {failed or excerpt(content)}")
        if ended is None or failed:
            reply = self._of_body({**begun, "error": None, "output": output, "status": "in_progress", "usage": None})
            return replace(reply, complete=False)
        return self._of_body({**begun, **ended, "output": ended.get("output") or output})

    def _usage(self, bodies: Sequence[Mapping[str, Any]]) -> TokenUse:
        reported = (value_at(one.get("response", one), "usage") for one in reversed(bodies))
        return usage_of(next((usage for usage in reported if isinstance(usage, dict)), None))

    def with_max_tokens(self, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        limit = token_count(body.get("max_output_tokens"))
        return {**body, "max_output_tokens": max_tokens if limit is None else min(limit, max_tokens)}

    def whole(self, reply: Reply, *, id: str, request: Request) -> dict[str, Any]:  # noqa: A002
        body = head(reply, id, request)
        body |= {
            "output": list(output_of(reply, id)),
            "usage": usage_fields(reply.usage),
            **status_of(reply.finish_reason),
        }
        return body | (token_fields(reply) if request.parameters.get("return_token_ids") else {})

    def events(self, reply: Reply, *, id: str, request: Request) -> Iterator[bytes]:  # noqa: A002
        whole = self.whole(reply, id=id, request=request)
        begun = {**head(reply, id, request), "status": "in_progress"}
        steps: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for at, item in enumerate(whole["output"]):
            steps += [(name, {"output_index": at, **data}) for name, data in item_events(item)]
        last = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
        steps.append((last, {"response": whole}))
        for number_, (name, data) in enumerate(steps):
            yield event({"type": name, "sequence_number": number_, **data}, name)

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        return error_body(status, code, message)

    def error_event(self, status: int, code: str, message: str) -> bytes:
        error = error_body(status, code, message)["error"]
        data = {"type": "error", "code": code, "message": error["message"], "param": None, "sequence_number": 0}
        return event(data, "error")


_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})
_REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}


def _is_assistants(item: Mapping[str, Any]) -> bool:
    kind = text_or_empty(item.get("type"))
    return item.get("role") == "assistant" or kind == "reasoning" or kind.endswith("_call")


def _assistant(items: Sequence[Mapping[str, Any]]) -> Message:
    parts: list[Any] = []
    thoughts: list[str] = []
    calls = []
    for item in items:
        match item.get("type"):
            case "reasoning":
                thoughts.append(_reasoning(item))
            case "function_call":
                calls.append(call_of(item.get("call_id") or item.get("id"), item.get("name"), item.get("arguments")))
            case "custom_tool_call":
                calls.append(call_of(item.get("call_id"), item.get("name"), {"input": item.get("input")}))
            case "message" | None:
                parts += _plain_parts(item.get("content"))
            case _:
                parts.append(dict(item))
    return assistant(content_of(parts), reasoning="".join(thoughts), tool_calls=calls)


def _plain_parts(content: object) -> list[Any]:
    if not isinstance(content, list):
        return parts_of(content)
    return [{"type": "text", "text": one["refusal"]} if value_at(one, "type") == "refusal" else one for one in content]


def _reasoning(item: Mapping[str, Any]) -> str:
    """Returns the thoughts, or their summary if they are not shown."""
    return text_of(_as_text_parts(item.get("content"))) or text_of(_as_text_parts(item.get("summary")))


def _as_text_parts(parts: object) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text_or_empty(value_at(part, "text"))} for part in list_or_empty(parts)]


def _other_message(item: Mapping[str, Any]) -> Message:
    kind = text_or_empty(item.get("type"))
    if kind.endswith("_output"):
        return {
            "role": "tool",
            "content": content_of(item.get("output")),
            "tool_call_id": str(item.get("call_id") or ""),
        }
    role = item.get("role")
    if not isinstance(role, str):
        return {"role": "user", "content": [dict(item)]}
    return {"role": "system" if role == "developer" else role, "content": content_of(item.get("content"))}


def _scores(body: Mapping[str, Any], output: Sequence[Mapping[str, Any]]) -> tuple[float, ...] | None:
    if isinstance(scores := body.get("logprobs"), list):
        return scores_in(scores)
    texts = [part for item in output for part in list_or_empty(item.get("content")) if value_at(part, "logprobs")]
    return scores_in([value_at(one, "logprob") for part in texts for one in part["logprobs"]]) if texts else None


def _add(items: dict[int, dict[str, Any]], kind: str, one: Mapping[str, Any]) -> None:
    at = one.get("output_index")
    if type(at) is not int:
        return
    match kind.removeprefix("response."):
        case "output_item.added" | "output_item.done":
            items[at] = dict(one["item"])
        case "function_call_arguments.delta":
            item = items.setdefault(at, {"type": "function_call"})
            item["arguments"] = text_or_empty(item.get("arguments")) + one["delta"]
        case "output_text.delta" | "refusal.delta":
            _append_delta(
                items.setdefault(at, {"type": "message", "role": "assistant"}), "content", one, "content_index"
            )
        case "reasoning_text.delta":
            _append_delta(items.setdefault(at, {"type": "reasoning"}), "content", one, "content_index")
        case "reasoning_summary_text.delta":
            _append_delta(items.setdefault(at, {"type": "reasoning"}), "summary", one, "summary_index")


def _append_delta(item: dict[str, Any], key: str, one: Mapping[str, Any], index: str) -> None:
    parts = item[key] = list_or_empty(item.get(key))
    while len(parts) <= int(one.get(index) or 0):
        parts.append({"type": "output_text", "text": ""})
    part = parts[int(one.get(index) or 0)]
    part["text"] = text_or_empty(part.get("text")) + one["delta"]


def usage_of(told: object) -> TokenUse:
    """Reads the tokens that an engine reports."""
    return usage_at(
        told,
        prompt="input_tokens",
        completion="output_tokens",
        cached="input_tokens_details.cached_tokens",
        reasoning="output_tokens_details.reasoning_tokens",
    )


def head(reply: Reply, answer_id: str, request: Request) -> dict[str, Any]:
    """Returns the fields that clients expect in addition to the answer; they repeat the request."""
    options = request.parameters
    return {
        "id": answer_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": options.get("metadata") or {},
        "model": reply.model or request.model,
        "output": [],
        "parallel_tool_calls": options.get("parallel_tool_calls", True),
        "temperature": options.get("temperature", 1.0),
        "tool_choice": options.get("tool_choice", "auto"),
        "tools": [tool_entry(tool) for tool in request.tools],
        "top_p": options.get("top_p", 1.0),
        "max_output_tokens": request.max_tokens,
        "previous_response_id": options.get("previous_response_id"),
        "usage": None,
    }


def status_of(finish_reason: str) -> dict[str, Any]:
    """Returns the fields that describe how an answer ended."""
    reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
    if finish_reason in reasons:
        return {"status": "incomplete", "incomplete_details": {"reason": reasons[finish_reason]}}
    return {"status": "completed", "incomplete_details": None}


def output_of(reply: Reply, answer_id: str) -> Iterator[dict[str, Any]]:
    """Yields the items of an answer, with ids."""
    stem = answer_id.removeprefix("resp_")
    for at, item in enumerate(assistant_items(reply.message)):
        kind = item.get("type")
        prefix = {"reasoning": "rs", "function_call": "fc"}.get(str(kind), "msg")
        entry = {"id": f"{prefix}_{stem}_{at}", **item}
        if kind == "message":
            text: dict[str, Any] = {"annotations": [], "logprobs": []}
            entry["content"] = [text | part if part.get("type") == "output_text" else part for part in item["content"]]
        yield entry if kind == "reasoning" else {"status": "completed", **entry}


def assistant_items(message: Message) -> Iterator[dict[str, Any]]:
    """Yields an assistant's message of the normal form as items."""
    if thoughts := message.get("reasoning"):
        yield {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thoughts}]}
    parts = parts_of(message["content"])
    if named := [{"type": "output_text", "text": one["text"]} if is_text(one) else one for one in parts]:
        yield {"type": "message", "role": "assistant", "content": named}
    for call in message.get("tool_calls", ()):
        yield {"type": "function_call", "call_id": call["id"], "name": call["name"], "arguments": call["arguments"]}


def tool_entry(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an offered tool in this dialect."""
    if isinstance(entry := tool.get("given"), dict):
        return entry
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool["description"],
        "parameters": tool["parameters"],
        "strict": bool(tool.get("strict")),
    }


def item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the events of one item: name and data."""
    kind, item_id = item["type"], item["id"]
    opened = {**item, "status": "in_progress"} if "status" in item else dict(item)
    opened["arguments" if kind == "function_call" else "content"] = "" if kind == "function_call" else []
    yield "response.output_item.added", {"item": opened}
    if kind == "function_call":
        for piece in pieces(item["arguments"]):
            yield "response.function_call_arguments.delta", {"item_id": item_id, "delta": piece}
        final = {"item_id": item_id, "name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", final
    else:
        stem = "response.reasoning_text" if kind == "reasoning" else "response.output_text"
        more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        for at, part in enumerate(item["content"]):
            place = {"item_id": item_id, "content_index": at}
            if not isinstance(part.get("text"), str):
                continue
            yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
            for piece in pieces(part["text"]):
                yield f"{stem}.delta", {**place, "delta": piece, **more}
            yield f"{stem}.done", {**place, "text": part["text"], **more}
            yield "response.content_part.done", {**place, "part": part}
    yield "response.output_item.done", {"item": item}


def usage_fields(usage: TokenUse) -> dict[str, Any] | None:
    """Returns the fields of a usage. None: not known."""
    if usage.prompt is None or usage.completion is None:
        return None
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": usage.prompt + usage.completion,
    }
