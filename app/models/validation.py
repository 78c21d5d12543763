"""Defines validations of tasks: states, and findings on one image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from app.models.spec import IMAGELESS, Wire, plain_text

__all__ = ["VALIDATORS", "Validation", "ValidationState", "content_of"]

VALIDATORS = frozenset({"oracle", "nop", "cheat"})
"""Agents that validate tasks: they may also run quarantined tasks."""


class ValidationState(StrEnum):
    """Validation states of a task on one image."""

    CANDIDATE = "candidate"  # validation has begun, and no image is known yet
    BUILT = "built"  # an environment of the image existed; grading is not complete
    VALID = "valid"  # in all replicas: reward 1 for oracle, 0 for nop and every cheat
    QUARANTINED = "quarantined"  # one of these failed; `reason` names it


class Validation(Wire):
    """Result of validating a task on one image.

    `content` is `content_of` the task: other tests, another solution or another image make another task.
    `image_id` is the digest that attempts record; empty if there is none (yet).
    """

    content: str
    image_id: str = ""
    dataset: str
    task: str
    image: str  # the reference, or the context's digest, as text for people
    state: ValidationState
    reason: str = ""
    rewards: dict[str, tuple[float | None, ...]] = {}  # by agent (and attack), one per replica; None: not scored
    flipped: tuple[str, ...] = ()  # tests with different results in replicas of one agent
    findings: tuple[str, ...] = ()  # of the leak scan
    runs: tuple[str, ...] = ()  # ids of the runs that are the evidence


_ENVIRONMENT = ("image", "build", "compose", "workdir", "setup")


def content_of(task: Mapping[str, Any]) -> str:
    """Returns the sha256 of all that decides a task's verdict: image source, goal, solution; not limits and network.

    task: an `AgentTask` as JSON.
    """
    environment, goal = task["environment"], task["goal"]
    if apart := goal.get("environment"):
        sizes = {
            name: value for name, value in apart["resources"].items() if name != "kill_at"
        }  # `kill_at` is set by a run
        goal = {**goal, "environment": {**apart, "resources": sizes}}
    decides = {
        "environment": {name: environment.get(name) for name in _ENVIRONMENT},
        "contained": environment.get("kind") not in IMAGELESS,
        "goal": goal,
        "solution": task.get("solution"),
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def short_reason(text: str, most: int = 400) -> str:
    """Shortens a reason to one line of limited length: parts of it come from output of tasks."""
    line = " ".join(plain_text(text).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
