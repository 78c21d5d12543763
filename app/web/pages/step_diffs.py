"""Diffs of the repository during an attempt, by the step of the trajectory that each one follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson

from app.errors import ArtifactMissing
from app.models.outcome import ArtifactKind
from app.web.api.attempts import artifact_of, content_of
from app.web.calls import WebCall

_MOST = 20_000
"""Most characters of one diff that are shown."""


def diffs_after(call: WebCall, attempt_id: UUID, steps: Sequence[Mapping[str, Any]]) -> dict[int, tuple[str, str]]:
    """Returns a title and the diff after an agent's step, by the step's index; steps that changed nothing are left out.

    A step's commands have ended when the model's next answer arrives. Raises: ArtifactStoreUnavailable.
    """
    try:
        lines = content_of(call, artifact_of(call, attempt_id, ArtifactKind.STEP_DIFFS.value)).splitlines()
    except ArtifactMissing:
        return {}
    entries = [orjson.loads(line) for line in lines]
    agents = [(n, at) for n, one in enumerate(steps) if one.get("source") == "agent" and (at := _seconds(one))]
    if not agents:
        return {}
    diffs, shown = {}, sum(one["at"] <= agents[0][1] for one in entries)
    for (index, _), (_, until) in zip(agents, [*agents[1:], (0, float("inf"))], strict=True):
        past = sum(one["at"] <= until for one in entries)
        if past > shown:
            diffs[index] = _titled(entries[past - 1])
        shown = max(shown, past)
    return diffs


def final_patch(call: WebCall, attempt_id: UUID) -> str:
    """Returns the beginning of the attempt's patch; empty: there is none."""
    try:
        return _cut(content_of(call, artifact_of(call, attempt_id, ArtifactKind.PATCH.value)).decode(errors="replace"))
    except ArtifactMissing:
        return ""


def _titled(entry: Mapping[str, Any]) -> tuple[str, str]:
    if "missing" in entry:
        return "no diff after this step", str(entry["missing"])
    diff = str(entry["diff"])
    count = diff.count("\ndiff --git ") + diff.startswith("diff --git ")
    return f"the repository after this step: {count} {'file' if count == 1 else 'files'} changed", _cut(diff)


def _cut(diff: str) -> str:
    return diff if len(diff) <= _MOST else f"{diff[:_MOST]}\n… {len(diff) - _MOST:,} more characters in the file"


def _seconds(step: Mapping[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(str(step.get("timestamp"))).timestamp()
    except ValueError:
        return None
