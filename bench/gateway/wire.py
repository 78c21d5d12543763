"""What load and engine agree on: a request that says what it wants of the engine, an answer that says when. Pure.

Both travel inside of texts, which every gateway passes on as they are. Times are CLOCK_MONOTONIC's, in nanoseconds:
one clock for all processes of a host.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

MODEL = "bench"
_WISH = re.compile(rb"\[\[wish wait=(\d+) events=(\d+) every=(\d+) hold=([01])\]\]")
_STAMP = re.compile(rb"\[\[arrived=(\d{20}) sent=(\d{20})\]\]")
_SERIAL = "[[serial {}]]"
_DIGITS = 12
_ANSWER_CHARS = 1000
_PIECES = ("the", "loop", "ends", "one", "field", "too", "early", "here")


@dataclass(frozen=True, slots=True)
class Wish:
    """How the engine shall answer. `events` 0: in one piece, else as a stream of so many."""

    wait_ms: int = 0  # on average, before the answer or its first event: from half of it to one and a half
    events: int = 0
    every_ms: int = 0  # between two events; 0: all at once
    hold: bool = False  # after the first event, until the engine is told to go on

    def text(self) -> str:
        return f"[[wish wait={self.wait_ms} events={self.events} every={self.every_ms} hold={int(self.hold)}]]"


def wish_in(request: bytes) -> Wish:
    """What a request wants; without a word of it: an answer at once."""
    found = _WISH.search(request)
    if found is None:
        return Wish()
    wait, events, every, hold = map(int, found.groups())
    return Wish(wait, events, every, bool(hold))


def stamp(arrived_ns: int, sent_ns: int) -> bytes:
    return b"[[arrived=%020d sent=%020d]]" % (arrived_ns, sent_ns)


def stamp_in(answer: bytes) -> tuple[int, int] | None:
    """When the engine got the request, and when it sent this; None: it does not say."""
    found = _STAMP.search(answer)
    return None if found is None else (int(found[1]), int(found[2]))


# --- The request ----------------------------------------------------------------------------------------------------

_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the task's repository and see what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
_RULES = "You repair software. Look before you change anything, change as little as possible, and run the tests. "
_TASK = "The parser drops the last field of a line that ends in a quote, and nobody is told about it. "
_OUTPUT = "tests/test_lines.py::test_quotes PASSED\ntests/test_lines.py::test_fields FAILED\n"


@dataclass(frozen=True, slots=True)
class Numbered:
    """A request body whose last message differs by a number, always of the same length."""

    head: bytes
    tail: bytes

    def __len__(self) -> int:
        return len(self.head) + _DIGITS + len(self.tail)

    def __call__(self, serial: int) -> bytes:
        return b"%b%0*d%b" % (self.head, _DIGITS, serial, self.tail)


def conversation(wish: Wish, *, owner: str, steps: int = 4) -> Numbered:
    """An agent's call after some steps, about 5 kB: what was said, one tool, and a last output that nobody sent before.

    `owner` makes one agent's conversation another than the next one's, as it is in a run of different tasks.
    """
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _RULES * 10},
        {"role": "user", "content": f"{wish.text()} {owner}: {_TASK * 10}"},
    ]
    for step in range(steps):
        call = {"name": "bash", "arguments": json.dumps({"command": f"python -m pytest -q tests/part_{step}"})}
        messages += [
            {
                "role": "assistant",
                "content": f"Step {step}: the tests first.",
                "tool_calls": [{"id": f"call_{step}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call_{step}", "content": _OUTPUT * 5},
        ]
    blank = "0" * _DIGITS
    messages[-1]["content"] += _SERIAL.format(blank)
    body = {"model": MODEL, "messages": messages, "tools": [_TOOL], "temperature": 0.0, "max_tokens": 4096}
    if wish.events:
        body["stream"] = True
    head, found, tail = json.dumps(body).encode().partition(blank.encode())
    assert found
    return Numbered(head, tail)


# --- The answer -----------------------------------------------------------------------------------------------------


def answer() -> tuple[bytes, bytes]:
    """A completion of about 1 kB of text, as the JSON before and after its stamp."""
    said = ("I found the cause: the loop ends one field too early. " * 40)[:_ANSWER_CHARS]
    whole = _shared("chat.completion") | {
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": f"@@{said}"}, "finish_reason": "stop"},
        ],
        "usage": _USAGE,
    }
    return _split(json.dumps(whole).encode())


def first_event() -> tuple[bytes, bytes]:
    """The first event of a stream, before and after its stamp."""
    return _split(_event([_choice({"role": "assistant", "content": "@@"})]))


def next_events() -> tuple[bytes, ...]:
    """More pieces of text, to be sent in turns: LiteLLM takes a piece that is repeated for a model out of order."""
    return tuple(_event([_choice({"content": f" {word}"})]) for word in _PIECES)


def last_events(*, usage: bool) -> bytes:
    """The end of a stream; with the tokens used, when the request asked for them."""
    told = _event([], usage=_USAGE) if usage else b""
    return _event([_choice({}, "stop")]) + told + b"data: [DONE]\n\n"


_USAGE = {"prompt_tokens": 1200, "completion_tokens": 200, "total_tokens": 1400}


def _shared(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-bench", "object": kind, "created": 1_700_000_000, "model": MODEL}


def _choice(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def _event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    told = _shared("chat.completion.chunk") | {"choices": choices} | more
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def _split(told: bytes) -> tuple[bytes, bytes]:
    head, found, tail = told.partition(b"@@")
    assert found
    return head, tail
