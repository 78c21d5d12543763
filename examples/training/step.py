"""One step of `megaflow train` with `kind: external`, for a trainer elsewhere: its samples, then its commit.

megaflow train train.yaml         # makes the runs: NAME-step-0, …
megaflow experience serve         # hands their groups out
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from app.errors import UnknownName
from app.experience.hand_out import Experience
from app.experience.http import HttpExperience


class Step:
    """All groups of a step, which are this trainer's until `commit`."""

    def __init__(self, experience: Experience | HttpExperience, groups: int, wait_s: float = 600.0) -> None:
        self._experience = experience
        self._batches: list[Any] = []
        self.rows: list[Mapping[str, Any]] = []
        found = 0
        while (left := experience.groups_left) is None or found < min(groups, left):  # some may be lost
            try:
                batch = experience.next_batch(groups - found, wait_s=wait_s)
            except UnknownName:  # the loop is not at this step yet
                continue
            if batch is not None:
                self._batches.append(batch)
                found += len(batch.groups())
                self.rows += [row for group in batch.groups().values() for row in group]

    def commit(self, version: str) -> None:
        """Say that all was trained on into a version; then `megaflow models publish POLICY --version VERSION`."""
        self._experience.publish(version)
        for batch in self._batches:
            self._experience.commit(batch, version)


def connected(name: str, step: int, policy: str, consumer: str) -> HttpExperience:
    """The hand-out of a step's run, by MEGAFLOW_EXPERIENCE_URL and MEGAFLOW_EXPERIENCE_TOKEN."""
    url, token = os.environ["MEGAFLOW_EXPERIENCE_URL"], os.environ["MEGAFLOW_EXPERIENCE_TOKEN"]
    return HttpExperience(url, token, f"{name}-step-{step}", policy=policy, consumer=consumer, max_staleness=0)
