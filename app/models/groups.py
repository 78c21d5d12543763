"""Defines when a group of a training run is complete, and when it gets another replica."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import SpecInvalid

MOST_REPLICAS = 10_000
_PERCENTILE = re.compile(r"p[1-9][0-9]?")


@dataclass(frozen=True, slots=True)
class Adaptive:
    """`least` replicas first; up to `most` if their rewards differ.

    The rule: if the first replicas all end with the same reward, the group is closed: more replicas would mostly get
    the same reward, and equal rewards give no training signal. If rewards differ, the rest up to `most` is added at
    once, because an advantage can be estimated. A task solved once in twenty times is often closed too early.
    """

    least: int
    most: int


_LEAST_SPREAD = 1e-6


def advantages(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns each sample's advantage in its group: reward minus mean, in standard deviations; 0 if all are equal.

    An attempt counts once, for any number of samples. Source: Shao et al., DeepSeekMath, arXiv 2402.03300, section
    4.1.2 (outcome supervision).
    """
    rewards = {row["attempt_id"]: float(row["reward"]) for row in rows}
    mean = sum(rewards.values()) / max(1, len(rewards))
    spread = (sum((reward - mean) ** 2 for reward in rewards.values()) / max(1, len(rewards))) ** 0.5
    return [(rewards[row["attempt_id"]] - mean) / spread if spread > _LEAST_SPREAD else 0.0 for row in rows]


def first_replicas(replicas: int | Adaptive) -> int:
    """Returns the number of replicas submitted at first."""
    return replicas.least if isinstance(replicas, Adaptive) else replicas


@dataclass(frozen=True, slots=True)
class GroupRules:
    """Group rules of a training run. Without rules, a group is complete when all its replicas have ended."""

    quorum: int | None = None  # replicas with samples that complete a group; the others are superseded
    hedge_after: str | None = None  # e.g. `p95`: a replica slower than this percentile of the run gets a duplicate
    most: int | None = None  # replicas of a group whose rewards differ; None: only the first replicas

    @classmethod
    def of(cls, replicas: int | Adaptive, quorum: int | None, hedge_after: str | None) -> GroupRules:
        return cls(quorum, hedge_after, replicas.most if isinstance(replicas, Adaptive) else None)

    @property
    def percent(self) -> int | None:
        """The percentile as a number: 95 for `p95`."""
        return None if self.hedge_after is None else int(self.hedge_after[1:])

    def check(self, replicas: int, purpose: str) -> None:
        """Checks the rules. replicas: the first replicas. Raises: SpecInvalid: impossible, or not a training run."""
        if self == NO_RULES:
            return
        most = self.most or replicas
        if purpose != "training":
            raise SpecInvalid(
                "expected a quorum, hedges and adaptive replicas in runs with the purpose 'training' alone, found"
                f" {purpose!r}: a score counts every replica; nothing was submitted"
            )
        if self.most is not None and not 2 <= replicas < self.most <= MOST_REPLICAS:
            raise SpecInvalid(
                f"expected adaptive replicas from at least 2 to more, at most {MOST_REPLICAS}; found from {replicas} to"
                f" {self.most}; nothing was submitted"
            )
        least = 1 if self.most is None else replicas + 1  # a smaller quorum would supersede added replicas at once
        if self.quorum is not None and not least <= self.quorum <= most:
            raise SpecInvalid(
                f"expected a quorum from {least} to {most} replicas, found {self.quorum}; nothing was submitted"
            )
        if self.hedge_after is not None and not _PERCENTILE.fullmatch(self.hedge_after):
            raise SpecInvalid(
                f"hedge_after: expected a percentile such as 'p95', found {self.hedge_after[:40]!r}; nothing was"
                " submitted"
            )


NO_RULES = GroupRules()
