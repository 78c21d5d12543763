"""Checks rows of samples and splits them as trainers do: a prompt, then all that follows it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import SampleRefused
from app.models.groups import advantages

Row = Mapping[str, Any]
"""A sample by the columns of docs/reference/experience.md."""


@dataclass(frozen=True, slots=True)
class SplitSample:
    """A sample as prompt and completion. `mask` is True on the policy's own tokens of the completion."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[bool]
    logprobs: list[float]


def checked(row: Row) -> Row:
    """Returns the row. Raises: SampleRefused: no ids, unequal lengths, not finite, no policy token after the first."""
    where = f"attempt {row.get('attempt_id', 'unknown')}"
    ids = row.get("token_ids")
    if not ids:
        raise SampleRefused(f"expected a sample with `token_ids`, found none in {where}; leave it out")
    lengths = [len(row.get(name) or ()) for name in ("token_ids", "mask", "logprobs")]
    if len(set(lengths)) > 1:
        raise SampleRefused(
            f"expected a mask and a log-probability for each of {lengths[0]} ids, found {lengths[1:]} in {where}"
        )
    if not all(math.isfinite(score) for score in row["logprobs"]):
        raise SampleRefused(f"expected finite `logprobs`, found NaN or infinity in {where}; leave it out")
    reward = row.get("reward")
    if reward is None or not math.isfinite(reward):
        raise SampleRefused(f"expected a finite `reward`, found {reward} in {where}; leave it out")
    if not any(row["mask"][1:]):
        raise SampleRefused(f"expected a token of the policy after the first, found none in {where}; leave it out")
    return row


def split(row: Row) -> SplitSample:
    """Splits a row into prompt and completion, at the policy's first token after the first. Raises: SampleRefused."""
    checked(row)
    at = row["mask"].index(True, 1)
    return SplitSample(
        list(row["token_ids"][:at]), list(row["token_ids"][at:]), list(row["mask"][at:]), list(row["logprobs"][at:])
    )


def scored(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Yields all rows with their advantages, group by group. Raises: SampleRefused."""
    for group in by_group(rows).values():
        yield from zip(group, advantages([checked(row) for row in group]), strict=True)


def attempts_for(tasks: Sequence[str], rows: Sequence[Row]) -> list[tuple[list[Row], bool]]:
    """Returns for each place of a trainer's batch (a task) the samples of an attempt, and whether it is a new attempt.

    If a task has fewer attempts than places, its last one is used again. Raises: SampleRefused: a task without samples.
    """
    attempts: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        attempts.setdefault(row["task"], {}).setdefault(row["attempt_id"], []).append(row)
    places: dict[str, int] = {}
    chosen: list[tuple[list[Row], bool]] = []
    for task in tasks:
        if task not in attempts:
            raise SampleRefused(f"expected samples of the task {task!r}, found samples of {sorted(attempts)[:5]}")
        own, place = list(attempts[task].values()), places.get(task, 0)
        places[task] = place + 1
        chosen.append((own[min(place, len(own) - 1)], place < len(own)))
    return chosen


def by_group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows by the id of their group."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    return groups
