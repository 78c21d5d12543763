"""Whether a task may be counted on: its states, and what a validation has found on one image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from app.models.spec import IMAGELESS, Wire, plain_text

__all__ = ["VALIDATORS", "Validation", "ValidationState", "content_of"]

VALIDATORS = frozenset({"oracle", "nop", "cheat"})
"""Agents that try a task out: they may also run where it is quarantined."""


class ValidationState(StrEnum):
    """Where a task stands on one image."""

    CANDIDATE = "candidate"  # validation has begun, and no image is known yet
    BUILT = "built"  # an environment of the image was there; not all has been judged
    VALID = "valid"  # oracle got 1, nop 0 and every cheat 0, each time
    QUARANTINED = "quarantined"  # one of them did not; `reason` says which


class Validation(Wire):
    """What is known of one task on one image.

    `content` is `content_of` the task: with other tests, another solution or another image it is another task.
    `image_id` is the digest that attempts record; empty where there is none (yet).
    """

    content: str
    image_id: str = ""
    dataset: str
    task: str
    image: str  # the reference, or the context's digest, for a person
    state: ValidationState
    reason: str = ""
    rewards: dict[str, tuple[float | None, ...]] = {}  # by agent (and attack), of each replica; None: not scored
    flipped: tuple[str, ...] = ()  # tests on which replicas of one agent disagree
    findings: tuple[str, ...] = ()  # of the leak scan
    runs: tuple[str, ...] = ()  # ids: the evidence


_ENVIRONMENT = ("image", "build", "compose", "workdir", "setup")


def content_of(task: Mapping[str, Any]) -> str:
    """sha256 of what decides a task's verdict: its image's source, goal and solution; not its limits and network.

    task: an `AgentTask` as JSON.
    """
    environment, goal = task["environment"], task["goal"]
    if apart := goal.get("environment"):
        sizes = {name: value for name, value in apart["resources"].items() if name != "kill_at"}  # a run's setting
        goal = {**goal, "environment": {**apart, "resources": sizes}}
    decides = {
        "environment": {name: environment.get(name) for name in _ENVIRONMENT},
        "contained": environment.get("kind") not in IMAGELESS,
        "goal": goal,
        "solution": task.get("solution"),
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def short_reason(text: str, most: int = 400) -> str:
    """A reason on one line, bounded: parts of it come from what tasks print."""
    line = " ".join(plain_text(text).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
