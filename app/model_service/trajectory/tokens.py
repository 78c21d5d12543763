"""Checks whether recorded token ids match the recorded text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from app.ledger.model_calls import StoredCall
from app.model_service.dialects.base import as_object, text_of
from app.model_service.trajectory.tree import Node, join

Decode = Callable[[Sequence[int]], str]
"""A tokenizer's way from ids to text, special tokens included."""


@dataclass(frozen=True, slots=True)
class TokenFinding:
    """A disagreement. `count`: of ids, log-probabilities and tokens told. `text`: of ids and words. `prefix`: a prompt
    does not begin with the one before it and its answer, so that a conversation's ids cannot be strung together."""

    call_id: UUID
    kind: Literal["count", "text", "prefix"]
    detail: str


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """Answers with ids, and those of them that go on from another; what disagrees."""

    with_ids: int
    strung: int
    findings: tuple[TokenFinding, ...]


def check_tokens(calls: Iterable[StoredCall], decode: Decode | None = None) -> TokenCheck:
    """Hold ids against counts, against each other, and, given a tokenizer, against the words."""
    nodes = [node for node in join(calls).nodes if node.call.token_ids is not None]
    findings: list[TokenFinding] = []
    strung = 0
    for node in nodes:
        findings += _count_findings(node.call)
        if decode is not None:
            findings += _text_findings(node.call, decode)
        if node.parent is not None and node.parent.call.token_ids is not None:
            strung += 1
            findings += _prefix_findings(node, node.parent)
    return TokenCheck(len(nodes), strung, tuple(findings))


def _count_findings(call: StoredCall) -> Iterable[TokenFinding]:
    ids = len(call.token_ids or ())
    if call.logprobs is not None and len(call.logprobs) != ids:
        yield TokenFinding(call.id, "count", f"{ids} token ids and {len(call.logprobs)} log-probabilities")
    if call.use.completion is not None and call.complete and call.use.completion != ids:
        yield TokenFinding(call.id, "count", f"{ids} token ids and {call.use.completion} tokens told")
    prompt = call.prompt_token_ids
    if prompt is not None and call.use.prompt is not None and call.use.prompt != len(prompt):
        yield TokenFinding(call.id, "count", f"{len(prompt)} token ids of the prompt and {call.use.prompt} tokens told")


def _text_findings(call: StoredCall, decode: Decode) -> Iterable[TokenFinding]:
    """All that was said must stand in the decoded text, in order; markup of tools and thoughts may stand between."""
    assert call.reply is not None
    text = decode(call.token_ids or ())
    at = 0
    for word in _said(call):
        found = text.find(word, at)
        if found < 0:
            yield TokenFinding(
                call.id, "text", f"expected {word[:80]!r} from character {at} on; found {text[at : at + 80]!r}"
            )
            return
        at = found + len(word)


def _said(call: StoredCall) -> Iterable[str]:
    reply = call.reply or {}
    for text in (reply.get("reasoning", ""), text_of(reply.get("content"))):
        if text.strip():
            yield text.strip()
    for tool in reply.get("tool_calls", ()):
        yield tool["name"]
        yield from (name for name in as_object(tool["arguments"]))


def _prefix_findings(node: Node, parent: Node) -> Iterable[TokenFinding]:
    prompt = node.call.prompt_token_ids
    if prompt is None or parent.call.prompt_token_ids is None:
        return
    before = (*parent.call.prompt_token_ids, *(parent.call.token_ids or ()))
    if prompt[: len(before)] == before:
        return
    pairs = zip(prompt, before, strict=False)
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(prompt), len(before)))
    where = "its prompt" if at < len(parent.call.prompt_token_ids) else "its answer"
    yield TokenFinding(node.call.id, "prefix", f"differs from call {parent.call.id} at token {at}, within {where}")
