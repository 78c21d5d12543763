"""Reading a recorded attempt from its file: which of its calls can be said again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import orjson

from app.ledger.model_calls import StoredCall
from app.model_service.dialects.base import Reply, Request
from app.model_service.replay.reels import Refused, Take
from app.model_service.trajectory import read
from app.models.model_calls import CallEnd

SUFFIX = ".jsonl.zst"


def file_name(task: str, replica: int, agent: str = "") -> str:
    """The name of an attempt's file within its recording; a run may have given a task to several agents."""
    by = f"--{quote(agent, safe='')}" if agent else ""
    return f"{quote(task, safe='')}--{replica}{by}{SUFFIX}"


def read_takes(path: Path) -> list[Take]:
    """The calls of an attempt that can be played, in the order in which they were made.

    Raises: OSError; ValueError: not an export of model calls.
    """
    return list(_takes(read(path.read_bytes())))


def _takes(calls: list[StoredCall]) -> Iterator[Take]:
    for call in calls:
        if call.lost or not call.messages:
            continue
        said = _said(call)
        if said is not None:
            yield Take(_asked(call), said)


def _asked(call: StoredCall) -> Request:
    return Request(
        model=call.model,
        messages=call.messages,
        tools=call.tools,
        stream=call.streamed,
        max_tokens=call.max_tokens,
        parameters=dict(call.parameters),
    )


def _said(call: StoredCall) -> Reply | Refused | None:
    """None: a fault of that day. A refusal lies in the request, so it comes again."""
    if call.end is CallEnd.ANSWERED and call.reply is not None and call.complete:
        return Reply(
            message=call.reply,
            finish_reason=call.finish_reason,
            usage=call.use,
            model=call.upstream_model,
            prompt_token_ids=call.prompt_token_ids,
            token_ids=call.token_ids,
            logprobs=call.logprobs,
        )
    if call.end in (CallEnd.REFUSED, CallEnd.CONTEXT_EXHAUSTED) and call.status is not None and call.upstream_model:
        code = "context_length_exceeded" if call.end is CallEnd.CONTEXT_EXHAUSTED else "recorded_refusal"
        return Refused(call.status, code, _message(call))
    return None


def _message(call: StoredCall) -> str:
    """What the engine's refusal said, in either of the two shapes that errors have."""
    content = call.raw.get("response", "")
    try:
        error = orjson.loads(content)["error"]
        return str(error["message"]) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        return content or call.detail or f"HTTP {call.status}"
