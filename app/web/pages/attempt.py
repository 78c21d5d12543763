"""Pages of an attempt: where its time went, second by second; its trajectory, step by step; its files as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any
from uuid import UUID

from app.errors import ArtifactMissing, ArtifactStoreUnavailable, SpecInvalid
from app.ledger import results
from app.ledger.database import sql
from app.ledger.stories import AttemptStory
from app.models.outcome import Artifact, ArtifactKind, AttemptRecord, TaskResult
from app.texts import clean
from app.web import recordings
from app.web.api.attempts import AttemptPlace, artifact_of, attempt_of, content_of
from app.web.calls import WebCall
from app.web.pages.page import Pages
from app.web.pages.rendering import PageView
from app.web.pages.step_diffs import diffs_after, final_patch
from app.web.pages.usage import limits_met, mapping_of, number_of, usage_charts
from app.workers.usage_samples import EVERY_S

pages = Pages()

_MOST_TRAJECTORY = 64 << 20
"""Most bytes of a trajectory that is read for a page; a longer one can be fetched as it is."""
_MOST_TEXT = 1 << 20
"""Most characters of a file that are shown."""
_STEPS = 50
_WIDTH = 1000.0
"""Width of the timeline, in units of its drawing."""
_TEXTS = ("patch", "agent_log", "test_report", "environment_log", "verdict")


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of the timeline: `x` and `width` in units of the drawing, `kind` chooses its colour."""

    x: float
    width: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class ModelCallLine:
    """A model call of an attempt."""

    started_at: datetime
    duration_s: float
    waited_s: float
    waited: Mapping[str, Any]
    model: str
    policy_version: str
    end_kind: str
    prompt_tokens: int | None
    completion_tokens: int | None
    cost_usd: float | None


_CALLS = """
SELECT started_at, duration_s, model, policy_version, end_kind, prompt_tokens, completion_tokens, cost_usd,
    waited, coalesce((SELECT sum(value::float8) FROM jsonb_each_text(waited)), 0) AS waited_s
FROM model_calls WHERE attempt_id = :id ORDER BY started_at LIMIT 2000"""


def attempt_record(call: WebCall) -> tuple[AttemptPlace, TaskResult, AttemptRecord]:
    """Returns the attempt that the path names, with its task. Raises: UnknownName: none, or of another user's task."""
    place = attempt_of(call)
    result = results.results(call.database, [place.task_id])[0]
    return place, result, next(one for one in result.attempts if one.id == place.attempt_id)


@pages.get("/attempts/{attempt}")
def attempt(call: WebCall) -> PageView:
    """Shows the timeline of an attempt: waiting apart from working, model calls and commands as lanes."""
    place, result, record = attempt_record(call)
    story = call.story(place.task_id)
    history = story.tries[place.number - 1]
    with call.database.begin() as connection:
        rows = sql(connection, _CALLS, {"id": place.attempt_id}).all()
    calls = [ModelCallLine(**row._asdict()) for row in rows]
    waiting_since = result.attempts[0].phases and story.accepted_at if place.number == 1 else history.steps[0].begin
    begin = waiting_since or history.steps[0].begin
    end = max([step.end or datetime.now(begin.tzinfo) for step in history.steps], default=begin)
    seconds = (end - begin).total_seconds()
    scale = _WIDTH / max(0.001, seconds)
    values = {
        "task": result,
        "attempt": record,
        "told": history,
        "calls": calls,
        "phases": _phases(history, begin, scale),
        "limit_lane": list(_limit_bars(history, calls, record, begin, scale)),
        "model_lane": [_call_bar(one, begin, scale) for one in calls],
        "usage": usage_charts(record.environment, begin.timestamp(), seconds),
        "about": {name: value for name, value in record.environment.items() if name != "samples"},
        "command_lane": list(_command_bars(call, record, begin, scale)),
        "width": _WIDTH,
        "seconds": seconds,
        "texts": _TEXTS,
    }
    return PageView("attempt.html", values)


def _phases(told: AttemptStory, begin: datetime, scale: float) -> list[Bar]:
    """Returns the queue, then every phase. A phase's waits for limits are drawn at its begin, in another colour."""
    first = told.steps[0].begin if told.steps else begin
    bars = [Bar(0.0, (first - begin).total_seconds() * scale, "waiting", "waiting in the queue")]
    for step in told.steps:
        x = (step.begin - begin).total_seconds() * scale
        waited = min(step.seconds, sum(share.seconds for share in step.waits))
        limits = ", ".join(f"{share.seconds:.1f} s for {share.name}" for share in step.waits)
        if waited:
            bars.append(Bar(x, waited * scale, "waiting", f"{step.phase}: waited {limits}"))
        kind = "waiting" if "queue" in step.phase or step.phase == "start" else "working"
        bars.append(
            Bar(x + waited * scale, (step.seconds - waited) * scale, kind, f"{step.phase}: {step.seconds:.2f} s")
        )
    return [bar for bar in bars if bar.width > 0]


def _limit_bars(
    told: AttemptStory, calls: Sequence[ModelCallLine], record: AttemptRecord, begin: datetime, scale: float
) -> Iterator[Bar]:
    """Yields what delayed the attempt, and when: the queue's limits, starts, models' limits, its own limits."""

    def bar(at: datetime, seconds: float, title: str) -> Bar:
        return _bar_within((at - begin).total_seconds(), seconds, scale, "limit", title)

    for step in told.steps:
        for limit, since, until in step.limits:
            lasted = (until - since).total_seconds()
            yield bar(since, lasted, f"{lasted:.1f} s for {limit}")
        if step.limits or "queue" in step.phase:
            continue
        at = step.begin
        for share in step.waits:
            yield bar(at, share.seconds, f"{share.seconds:.1f} s for {share.name}")
            at += timedelta(seconds=share.seconds)
    for one in calls:
        if one.waited_s > 0:
            limits = ", ".join(f"{float(seconds):.1f} s for {limit}" for limit, seconds in one.waited.items())
            yield bar(one.started_at, one.waited_s, f"{one.model}: {limits}")
    for second, mark in limits_met(record.environment, begin.timestamp(), _WIDTH / scale):
        yield bar(begin + timedelta(seconds=max(0.0, second - EVERY_S)), min(second, EVERY_S), mark)


def _call_bar(one: ModelCallLine, begin: datetime, scale: float) -> Bar:
    tokens = f"{one.prompt_tokens or 0:,} tokens in, {one.completion_tokens or 0:,} out"
    title = f"{one.model}: {one.duration_s:.2f} s, {tokens}, {one.end_kind}"
    return _bar_within((one.started_at - begin).total_seconds(), one.duration_s, scale, "model", title)


def _bar_within(second: float, seconds: float, scale: float, kind: str, title: str) -> Bar:
    """Returns a bar that begins at `second` of the timeline, kept within the drawing even if clocks differed."""
    x = min(max(0.0, second * scale), _WIDTH - 1)
    return Bar(x, min(max(1.0, seconds * scale), _WIDTH - x), kind, title)


def _command_bars(call: WebCall, record: AttemptRecord, begin: datetime, scale: float) -> Iterator[Bar]:
    """Yields the recording's commands, if there is a readable recording."""
    artifact = next((one for one in record.artifacts if one.kind is ArtifactKind.TERMINAL and one.key), None)
    if artifact is None:
        return
    try:
        recording = recordings.read_header(read_whole(call, artifact, recordings.MOST_BYTES))
    except (ArtifactMissing, ArtifactStoreUnavailable, SpecInvalid):
        return
    offset_s = recording.began - begin.timestamp()
    for one in recording.commands:
        kind = "own" if one.stage.partition("@")[0] not in ("agent", "set-up") else "command"
        how = f", {one.how}" if one.how else ""
        seconds = one.ended_s - one.begun_s
        title = f"{one.stage}: {seconds:.2f} s{how}: {one.label}"
        yield _bar_within(one.begun_s + offset_s, seconds, scale, kind, title)


def read_whole(call: WebCall, artifact: Artifact, most: int) -> bytes:
    """Raises: SpecInvalid: the artifact has more than `most` bytes; ArtifactMissing, ArtifactStoreUnavailable."""
    if (artifact.size_bytes or 0) > most:
        raise SpecInvalid(
            f"the {artifact.kind.value} has {artifact.size_bytes:,} bytes, too many for a page; fetch the file"
        )
    return content_of(call, artifact)


@pages.get("/attempts/{attempt}/files/{kind}")
def file(call: WebCall) -> PageView:
    """Shows the beginning of an artifact as text, with a link to all of it."""
    place, result, record = attempt_record(call)
    artifact = artifact_of(call, place.attempt_id, call.path["kind"])
    text, missing = "", artifact.missing
    if artifact.key is not None:
        try:
            text = content_of(call, artifact)[: _MOST_TEXT + 1].decode(errors="replace")
        except ArtifactMissing as error:
            missing = str(error)
    values = {
        "task": result,
        "attempt": record,
        "artifact": artifact,
        "text": clean(text[:_MOST_TEXT]),
        "cut": len(text) > _MOST_TEXT,
        "missing": missing,
    }
    return PageView("file.html", values)


@pages.get("/attempts/{attempt}/trajectory")
def trajectory(call: WebCall) -> PageView:
    """Shows the steps of the agent and the model; conversations of sub-agents are folded."""
    place, result, record = attempt_record(call)
    values: dict[str, Any] = {"task": result, "attempt": record, "problem": ""}
    try:
        whole = _read(call, place.attempt_id)
    except (ArtifactMissing, SpecInvalid) as error:
        return PageView("trajectory.html", {**values, "problem": str(error)})
    branches = [one for one in _list(whole.get("subagent_trajectories")) if isinstance(one, Mapping)]
    chosen = call.query.get("branch", "")
    shown = next((one for one in branches if str(one.get("trajectory_id")) == chosen), whole)
    steps = [one for one in _list(shown.get("steps")) if isinstance(one, Mapping)]
    page = _page(call.query.get("page", "1"), len(steps))
    diffs, first = diffs_after(call, place.attempt_id, steps), (page - 1) * _STEPS
    step_values = [step_of(one) | {"diff": diffs.get(n)} for n, one in enumerate(steps[first : page * _STEPS], first)]
    values |= {
        "steps": [(copied, list(part)) for copied, part in groupby(step_values, key=itemgetter("copied"))],
        "patch": "" if diffs else final_patch(call, place.attempt_id),
        "others": [_branch(one) for one in branches],
        "kind": _branch(shown)["kind"] if shown is not whole else "",
        "branch": chosen if shown is not whole else "",
        "page": page,
        "pages": max(1, -(-len(steps) // _STEPS)),
        "total": len(steps),
        "final": mapping_of(whole.get("final_metrics")),
    }
    return PageView("trajectory.html", values)


def _read(call: WebCall, attempt_id: UUID) -> Mapping[str, Any]:
    """Raises: ArtifactMissing, SpecInvalid: too long, or not JSON."""
    artifact = artifact_of(call, attempt_id, "trajectory")
    try:
        content = json.loads(read_whole(call, artifact, _MOST_TRAJECTORY))
    except (ValueError, RecursionError) as error:
        raise SpecInvalid(f"expected a trajectory in JSON, found: {str(error)[:100]}; fetch the file") from None
    return mapping_of(content)


def _page(asked: str, steps: int) -> int:
    number = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 7 else 1
    return min(max(1, number), max(1, -(-steps // _STEPS)))


def step_of(step: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a step with every field that the page shows, even if fields are missing or of another type."""
    metrics, extra = mapping_of(step.get("metrics")), mapping_of(step.get("extra"))
    return {
        "id": step.get("step_id"),
        "at": str(step.get("timestamp") or ""),
        "source": str(step.get("source") or "unknown"),
        "message": _text(step.get("message")),
        "thoughts": _text(step.get("reasoning_content")),
        "calls": [_tool_call(one) for one in _list(step.get("tool_calls")) if isinstance(one, Mapping)],
        "observed": _observed(step),
        "prompt_tokens": metrics.get("prompt_tokens"),
        "completion_tokens": metrics.get("completion_tokens"),
        "cost_usd": number_of(metrics.get("cost_usd")),
        "policy_version": str(extra.get("policy_version") or ""),
        "copied": bool(step.get("is_copied_context")),
        "marks": [name for name in ("scripted", "cut", "recovered", "joined") if extra.get(name)],
    }


def _observed(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    observations = []
    for one in _list(mapping_of(step.get("observation")).get("results")):
        references = [
            mapping_of(each).get("trajectory_id") for each in _list(mapping_of(one).get("subagent_trajectory_ref"))
        ]
        observations.append(
            {"text": _text(mapping_of(one).get("content")), "branches": [str(each) for each in references if each]}
        )
    return observations


def _tool_call(one: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the tool's name and its arguments: a command as it is, others as JSON."""
    arguments = one.get("arguments")
    if (
        isinstance(arguments, Mapping)
        and len(arguments) == 1
        and isinstance(only := next(iter(arguments.values())), str)
    ):
        return str(one.get("function_name") or "?"), only
    return str(one.get("function_name") or "?"), _text(arguments)


def _branch(one: Mapping[str, Any]) -> dict[str, Any]:
    extra = mapping_of(one.get("extra"))
    return {
        "id": str(one.get("trajectory_id") or ""),
        "kind": str(extra.get("kind") or "conversation"),
        "steps": len(_list(one.get("steps"))),
    }


def _text(value: Any) -> str:
    """Returns a text as it is, and the beginning of any other value as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    pieces, length = [], 0
    for piece in json.JSONEncoder(indent=2, ensure_ascii=False, default=str).iterencode(value):
        pieces.append(piece)
        if (length := length + len(piece)) > _MOST_TEXT:
            pieces.append("…")
            break
    return "".join(pieces)


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
