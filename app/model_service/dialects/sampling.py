"""Sampling options of a submission, put into a request in place of the agent's own."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from app.model_service.dialects import codec_for
from app.models.model_calls import Dialect, Sampled
from app.models.spec import Sampling

_PLAIN = {
    Dialect.CHAT: ("temperature", "top_p", "seed"),
    Dialect.RESPONSES: ("temperature", "top_p"),
    Dialect.MESSAGES: ("temperature", "top_p"),
}
"""Options that the dialect has, under the same name. The bound of tokens has names of its own."""
_BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_NOT_TAKEN = re.compile(
    rb"unsupported|not support|deprecated|unknown|unrecogni[sz]ed|unexpected|extra inputs|not permitted", re.IGNORECASE
)


def sampled(
    body: dict[str, Any], dialect: Dialect, options: Sampling, *, most: int | None, refused: Collection[str] = ()
) -> tuple[dict[str, Any], Sampled]:
    """The request with these options, and which of them it has.

    most: tokens of one answer that the attempt may have. refused: options that the model was found not to take.
    """
    given = options.model_dump(exclude_none=True)
    bound = given.pop("max_tokens", None)
    applied = {name: value for name, value in given.items() if name in _PLAIN[dialect] and name not in refused}
    found = body | applied
    if bound is not None:
        bound = bound if most is None else min(bound, most)
        found = codec_for(dialect).limited(found | {name: bound for name in _BOUNDS if name in found}, bound)
        applied["max_tokens"] = bound
    return found, Sampled(applied, tuple(name for name in given if name not in applied))


def not_taken(refusal: bytes, applied: Collection[str]) -> set[str]:
    """Which of the options an engine's 4xx names as not supported by the model. The bound of tokens is never one."""
    if not _NOT_TAKEN.search(refusal):
        return set()
    return {name for name in applied if name != "max_tokens" and re.search(rf"\b{name}\b".encode(), refusal)}
