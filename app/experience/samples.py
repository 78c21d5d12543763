"""Turns an attempt's recorded calls into training samples.

A sample is one flat sequence of token ids: prompts and tool results have mask 0, the policy's own tokens mask 1 and a
log-probability. Nothing is tokenised here: every id is the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from app.errors import SampleRefused
from app.ledger.model_calls import StoredCall
from app.model_service.trajectory.tree import Branch, BranchKind, branches, join
from app.models.model_calls import VersionSpan

_MOST_ID = 2**31 - 1
_MOST_LOGPROB = 1e-3
"""Tolerance for log-probabilities above 0: the rounding of 16 bits."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A token sequence. `token_ids`, `mask`, `logprobs` have the same length; 0.0 stands where `mask` is False."""

    branch: int  # of the attempt; 0 is the main conversation
    kind: BranchKind
    part: int  # 0, or the next number after a prompt that did not begin with the tokens before
    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    temperature: float | None
    models: tuple[str, ...]  # as the agent named them

    @property
    def trained(self) -> int:
        """Number of the policy's own tokens."""
        return sum(self.mask)


@dataclass
class _Open:
    """A sample that is still growing."""

    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    models: list[str] = field(default_factory=list)

    def add(self, call: StoredCall, answer: Sequence[int], scores: Sequence[float], prompt: Sequence[int]) -> None:
        fresh = prompt[len(self.token_ids) :]
        self.token_ids += fresh
        self.mask += [False] * len(fresh)
        self.logprobs += [0.0] * len(fresh)
        start = len(self.token_ids)
        self.token_ids += answer
        self.mask += [True] * len(answer)
        self.logprobs += scores
        spans = call.versions or (VersionSpan(call.policy_version, 0, len(answer)),)
        self.versions += [VersionSpan(one.version, start + one.start, start + one.end) for one in spans]
        if call.model not in self.models:
            self.models.append(call.model)

    def continued_by(self, prompt: Sequence[int]) -> bool:
        return list(prompt[: len(self.token_ids)]) == self.token_ids


def samples_of(calls: Iterable[StoredCall]) -> list[Sample]:
    """Makes the samples of one attempt: one for each branch, more where a prompt changed earlier messages.

    Side calls without tools (`aside`) are left out.

    Raises: SampleRefused: an answer has no token ids or log-probabilities, or impossible ones.
    """
    samples: list[Sample] = []
    for branch in branches(join(calls)):
        if branch.kind is not BranchKind.ASIDE:
            samples += _of_branch(branch)
    if not samples:
        raise SampleRefused("expected at least one answered call of the policy, found none")
    return samples


def _of_branch(branch: Branch) -> list[Sample]:
    parts = [_Open()]
    temperature: float | None = None
    for node in branch.nodes:
        prompt, answer, scores = _checked(node.call)
        if not parts[-1].continued_by(prompt):
            parts.append(_Open())
        parts[-1].add(node.call, answer, scores, prompt)
        temperature = _temperature(node.call, temperature)
    return [
        Sample(
            branch=branch.number,
            kind=branch.kind,
            part=number,
            token_ids=tuple(part.token_ids),
            mask=tuple(part.mask),
            logprobs=tuple(part.logprobs),
            versions=_merged(part.versions),
            temperature=temperature,
            models=tuple(part.models),
        )
        for number, part in enumerate(parts)
    ]


def _merged(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Merges neighbouring spans of one version."""
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = VersionSpan(span.version, merged[-1].start, span.end)
        elif span.end > span.start:
            merged.append(span)
    return tuple(merged)


def _temperature(call: StoredCall, known: float | None) -> float | None:
    applied = call.sampling.get("applied", {}) if call.sampling else {}
    value = applied.get("temperature", call.parameters.get("temperature"))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else known


def _checked(call: StoredCall) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Returns prompt ids, answer ids and their log-probabilities. Raises: SampleRefused."""
    prompt, answer, scores = call.prompt_token_ids, call.token_ids, call.logprobs
    where = f"call {call.id} (engine {call.replica or 'unknown'}, model {call.upstream_model or call.model})"
    if prompt is None or answer is None or scores is None:
        missing = [
            name
            for name, value in (("prompt ids", prompt), ("token ids", answer), ("log-probabilities", scores))
            if value is None
        ]
        raise SampleRefused(
            f"expected token ids and log-probabilities of every answer; found no {' and no '.join(missing)} in {where};"
            " serve the policy with vLLM or SGLang (`transformers serve` gives neither)"
        )
    if len(answer) != len(scores):
        raise SampleRefused(
            f"expected one log-probability for each token; found {len(answer)} tokens and {len(scores)} in {where}"
        )
    ends = [0, *(span.end for span in call.versions)]
    if call.versions and ([span.start for span in call.versions] != ends[:-1] or ends[-1] != len(answer)):
        raise SampleRefused(
            f"expected versions for tokens 0 to {len(answer)}, one after the other; found {call.versions} in {where}"
        )
    if any(ids and not 0 <= min(ids) <= max(ids) <= _MOST_ID for ids in (prompt, answer)):
        raise SampleRefused(f"expected token ids from 0 to {_MOST_ID}; found others in {where}")
    if any(not math.isfinite(score) or score > _MOST_LOGPROB for score in scores):
        raise SampleRefused(f"expected finite log-probabilities of at most 0; found others in {where}")
    return prompt, answer, scores
