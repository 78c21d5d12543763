"""One recorded attempt, ready to be played: which answer belongs to which conversation. Pure.

Only digests of the conversations are kept; what is asked for is found by all of its messages, or by its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.model_service.dialects.base import Message, Reply, Request
from app.model_service.replay.volatile import Digests


@dataclass(frozen=True, slots=True)
class Refused:
    """What an engine said instead of an answer, for a reason that lies in the request."""

    status: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Take:
    """A recorded call that ended with something that can be said again."""

    asked: Request
    said: Reply | Refused


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation as it is compared."""

    kind: frozenset[str]
    """The tools on offer: a framework's main conversation, its sub-agents and its asides differ in them."""
    messages: tuple[bytes, ...]
    """Digests of what is steady in each."""
    answers: int
    """How many of them are the assistant's."""
    task: tuple[bytes, ...]
    """The user's messages before the first answer. The system's may name folders that are made anew each time."""

    @property
    def key(self) -> bytes:
        return hashlib.blake2b(b"".join((*sorted(map(str.encode, self.kind)), b"|", *self.messages))).digest()


def asked(request: Request, digests: Digests, swap: tuple[str, str] | None = None) -> Asked:
    """`request` as it is compared. `swap`: a word to be read as another, for the model's own name."""
    messages = tuple(digests.of(message, swap) for message in request.messages)
    assistant = [at for at, message in enumerate(request.messages) if message.get("role") == "assistant"]
    first = assistant[0] if assistant else len(messages)
    return Asked(
        kind=frozenset(str(tool["name"]) for tool in request.tools),
        messages=messages,
        answers=len(assistant),
        task=tuple(messages[at] for at in range(first) if request.messages[at].get("role") == "user"),
    )


class Reel:
    """The takes of one attempt."""

    def __init__(self, takes: Iterable[Take], digests: Digests) -> None:
        found = list(takes)
        self._takes = [(asked(take.asked, digests), take.said) for take in found]
        # Of calls with one conversation the last counts: with its answer the agent went on.
        self._exact = {known.key: said for known, said in self._takes}
        self.model = next((take.asked.model for take in found), "")
        self.tasks = frozenset(known.task for known, _ in self._takes if known.task)

    def exact(self, wanted: Asked) -> Reply | Refused | None:
        """The answer to just this conversation."""
        return self._exact.get(wanted.key)

    def by_position(self, wanted: Asked) -> Reply | Refused | None:
        """The answer at the same point of the most similar conversation of the same kind."""
        there = [
            (common(known.messages, wanted.messages), known.messages[-1:] == wanted.messages[-1:], at)
            for at, (known, _) in enumerate(self._takes)
            if known.kind == wanted.kind and known.answers == wanted.answers
        ]
        return self._takes[max(there)[2]][1] if there else None

    def nearest(self, wanted: Asked) -> tuple[int, int]:
        """The number of the most similar take and how many messages it has in common; (-1, -1) without takes."""
        close = [
            (
                common(known.messages, wanted.messages),
                known.kind == wanted.kind,
                -abs(known.answers - wanted.answers),
                at,
            )
            for at, (known, _) in enumerate(self._takes)
        ]
        found = max(close, default=(-1, False, 0, -1))
        return found[3], found[0]


def common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many messages two conversations share from their beginning."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def difference(recorded: Sequence[str], found: Sequence[str], messages: Sequence[Message]) -> str:
    """The first difference of two conversations in words, both given as their steady texts."""
    for at, text in enumerate(found):
        role = messages[at].get("role")
        if at >= len(recorded):
            return f"message {at + 1} ({role}) was never recorded: {_quoted(text, 0)}"
        if text != recorded[at]:
            begin = _first_difference(text, recorded[at])
            return f"message {at + 1} ({role}): recorded {_quoted(recorded[at], begin)}, found {_quoted(text, begin)}"
    if len(recorded) > len(found):
        return f"the recorded conversation goes on after message {len(found)}"
    return "the messages are the same, the tools on offer are not"


def _first_difference(one: str, other: str) -> int:
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def _quoted(text: str, at: int) -> str:
    begin = max(0, at - 40)
    return repr(("…" if begin else "") + text[begin : at + 80] + ("…" if at + 80 < len(text) else ""))
