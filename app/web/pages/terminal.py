"""Page of the commands in an attempt's environments: played as they ran, and as text."""

from __future__ import annotations

from typing import Any

from app.errors import ArtifactMissing, SpecInvalid
from app.models.outcome import ArtifactKind
from app.models.states import AttemptState
from app.web import recordings
from app.web.api.attempts import artifact_of
from app.web.calls import WebCall
from app.web.pages.attempt import attempt_record, read_whole
from app.web.pages.page import Pages
from app.web.pages.rendering import TERMINAL_POLICY, PageView
from app.web.recordings import Recording

pages = Pages()

_MOST_ROWS = 500
"""Most commands that are listed."""
_NO_STATE = {
    AttemptState.LOST: "the attempt's worker was lost before it wrote one",
    AttemptState.INTERRUPTED: "the attempt was interrupted before its worker wrote one",
    AttemptState.DISPATCHED: "the attempt has not begun",
    AttemptState.RUNNING: "it is written when the agent has ended",
}


@pages.get("/attempts/{attempt}/terminal")
def terminal(call: WebCall) -> PageView:
    """Shows the recording in a player, if a player can show it; its text; its commands with their times.

    The query `at` is the second at which the player begins.
    """
    place, result, record = attempt_record(call)
    problem, recording = "", Recording(0.0, ())
    try:
        artifact = artifact_of(call, place.attempt_id, ArtifactKind.TERMINAL.value)
        recording = recordings.read_recording(read_whole(call, artifact, recordings.MOST_BYTES))
    except ArtifactMissing as error:
        left = next((one.missing for one in record.artifacts if one.kind is ArtifactKind.TERMINAL), None)
        problem = f"There is no recording: {left or _NO_STATE.get(record.state, str(error))}."
    except SpecInvalid as error:
        problem = str(error)
    values: dict[str, Any] = {
        "task": result,
        "attempt": record,
        "problem": problem,
        "recording": recording,
        "commands": recording.commands[:_MOST_ROWS],
        "at": _second(call.query.get("at", "")),
    }
    return PageView("terminal.html", values, headers={"content-security-policy": TERMINAL_POLICY})


def _second(asked: str) -> float:
    return float(asked) if len(asked) < 12 and asked.isascii() and asked.replace(".", "", 1).isdigit() else 0.0
