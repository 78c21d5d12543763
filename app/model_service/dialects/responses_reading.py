"""Reading what OpenAI's responses say: requests, answers, streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.model_service.dialects.base import Message, Reply
from app.model_service.dialects.parts import assistant, call_of, content_of, parts_of, text_of, tool_of
from app.model_service.dialects.reading import (
    counted,
    events_of,
    inside,
    listed,
    number,
    quoted,
    refused,
    said,
    scores_in,
    whole_numbers,
)
from app.models.model_calls import TokenUse

_OF = "responses"
_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})
_REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}


# --- Requests -------------------------------------------------------------------------------------------------------


def items_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was put in. Raises: SpecInvalid."""
    found = body.get("input")
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise refused(_OF, "`input`, a text or a list of objects", found)
    return found


def messages_of(items: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    """Items of the assistant that follow each other are one message."""
    own: list[Mapping[str, Any]] = []
    for item in items:
        if _is_assistants(item):
            own.append(item)
            continue
        if own:
            yield _assistant(own)
            own = []
        yield _other(item)
    if own:
        yield _assistant(own)


def _is_assistants(item: Mapping[str, Any]) -> bool:
    kind = said(item.get("type"))
    return item.get("role") == "assistant" or kind == "reasoning" or kind.endswith("_call")


def _assistant(items: Sequence[Mapping[str, Any]]) -> Message:
    parts: list[Any] = []
    thoughts: list[str] = []
    calls = []
    for item in items:
        match item.get("type"):
            case "reasoning":
                thoughts.append(_thoughts(item))
            case "function_call":
                calls.append(call_of(item.get("call_id") or item.get("id"), item.get("name"), item.get("arguments")))
            case "custom_tool_call":
                calls.append(call_of(item.get("call_id"), item.get("name"), {"input": item.get("input")}))
            case "message" | None:
                parts += _plain(item.get("content"))
            case _:
                parts.append(dict(item))
    return assistant(content_of(parts), reasoning="".join(thoughts), tool_calls=calls)


def _plain(content: object) -> list[Any]:
    if not isinstance(content, list):
        return parts_of(content)
    return [{"type": "text", "text": one["refusal"]} if inside(one, "type") == "refusal" else one for one in content]


def _thoughts(item: Mapping[str, Any]) -> str:
    """The thoughts themselves; where they are not shown, what is said about them."""
    return text_of(_renamed(item.get("content"))) or text_of(_renamed(item.get("summary")))


def _renamed(parts: object) -> list[dict[str, Any]]:
    return [{"type": "text", "text": said(inside(part, "text"))} for part in listed(parts)]


def _other(item: Mapping[str, Any]) -> Message:
    kind = said(item.get("type"))
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


def tool_from(tool: Mapping[str, Any]) -> dict[str, Any]:
    """An offered tool."""
    if tool.get("type") == "function":
        strict = {"strict": True} if tool.get("strict") else {}
        return tool_of(tool.get("name"), tool.get("description"), tool.get("parameters"), **strict)
    return tool_of(tool.get("name") or tool.get("type"), tool.get("description"), None, given=dict(tool))


# --- Answers --------------------------------------------------------------------------------------------------------


def of_body(body: Mapping[str, Any]) -> Reply:
    """A whole answer. Raises: ValueError."""
    if body.get("error") or not isinstance(body.get("output"), list):
        raise ValueError(f"expected an answer with output; found {str(body.get('error') or body)[:200]}")
    output = [item for item in body["output"] if isinstance(item, dict)]
    message = _assistant(output)
    status, reason = body.get("status"), inside(body.get("incomplete_details"), "reason")
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    if status == "incomplete":
        finish = _REASONS.get(said(reason), "length")
    elif status not in ("completed", None):
        finish = ""
    return Reply(
        message=message,
        finish_reason=finish,
        usage=usage_of(body.get("usage")),
        model=said(body.get("model")),
        prompt_token_ids=whole_numbers(body.get("prompt_token_ids")),
        token_ids=whole_numbers(body.get("token_ids")),
        logprobs=_scores(body, output),
    )


def _scores(body: Mapping[str, Any], output: Sequence[Mapping[str, Any]]) -> tuple[float, ...] | None:
    if isinstance(found := body.get("logprobs"), list):
        return scores_in(found)
    texts = [part for item in output for part in listed(item.get("content")) if inside(part, "logprobs")]
    return scores_in([inside(one, "logprob") for part in texts for one in part["logprobs"]]) if texts else None


def of_stream(content: bytes) -> Reply:
    """A streamed answer, as far as it came. Raises: ValueError."""
    items: dict[int, dict[str, Any]] = {}
    begun: dict[str, Any] = {}
    ended: dict[str, Any] | None = None
    failed = ""
    for one in events_of(content):
        kind = said(one.get("type"))
        if kind in _ENDS:
            ended = dict(one["response"])
            failed = str(ended.get("error")) if kind == "response.failed" else failed
        elif kind in ("response.created", "response.in_progress"):
            begun = dict(one["response"])
        elif kind == "error" or one.get("error"):
            failed = str(one.get("message") or one.get("error"))[:200]
        else:
            _add(items, kind, one)
    output = [items[at] for at in sorted(items)]
    if not (begun or ended) or (failed and not output):
        raise ValueError(f"expected a stream of events of a response; found {failed or quoted(content)}")
    if ended is None or failed:
        found = of_body({**begun, "error": None, "output": output, "status": "in_progress", "usage": None})
        return replace(found, complete=False)
    return of_body({**ended, "output": ended.get("output") or output})


def _add(items: dict[int, dict[str, Any]], kind: str, one: Mapping[str, Any]) -> None:
    at = one.get("output_index")
    if type(at) is not int:
        return
    match kind.removeprefix("response."):
        case "output_item.added" | "output_item.done":
            items[at] = dict(one["item"])
        case "function_call_arguments.delta":
            item = items.setdefault(at, {"type": "function_call"})
            item["arguments"] = said(item.get("arguments")) + one["delta"]
        case "output_text.delta" | "refusal.delta":
            _lengthen(items.setdefault(at, {"type": "message", "role": "assistant"}), "content", one, "content_index")
        case "reasoning_text.delta":
            _lengthen(items.setdefault(at, {"type": "reasoning"}), "content", one, "content_index")
        case "reasoning_summary_text.delta":
            _lengthen(items.setdefault(at, {"type": "reasoning"}), "summary", one, "summary_index")


def _lengthen(item: dict[str, Any], key: str, one: Mapping[str, Any], index: str) -> None:
    parts = item[key] = listed(item.get(key))
    while len(parts) <= int(one.get(index) or 0):
        parts.append({"type": "output_text", "text": ""})
    part = parts[int(one.get(index) or 0)]
    part["text"] = said(part.get("text")) + one["delta"]


def usage_of(told: object) -> TokenUse:
    """Tokens as engines tell them."""
    use = TokenUse(
        prompt=number(inside(told, "input_tokens")),
        completion=number(inside(told, "output_tokens")),
        cached=number(inside(told, "input_tokens_details", "cached_tokens")),
        reasoning=number(inside(told, "output_tokens_details", "reasoning_tokens")),
    )
    return counted(use)
