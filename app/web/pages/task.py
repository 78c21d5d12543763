"""Page of a task: its result with the reason, its attempts, its replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from starlette.responses import RedirectResponse, Response

from app.ledger import events, listings, results, users, validations
from app.ledger.listings import TaskLine
from app.models.groups import MOST_REPLICAS
from app.models.outcome import ArtifactKind, AttemptRecord, TaskResult
from app.models.states import ENDED_TASK, LIVE_ATTEMPT, AttemptState
from app.texts import limit_lines, outcome, spans
from app.web.api import runs as api
from app.web.calls import WebCall
from app.web.pages.page import Pages
from app.web.pages.rendering import PageView, reward

pages = Pages()

_EVENTS = 200
_REPLICAS = 1000
_WITHOUT_FAILURE = {
    AttemptState.LOST: "its worker vanished, or its lease lapsed",
    AttemptState.INTERRUPTED: "its instance was drained: this uses up no retry",
    AttemptState.CANCELLED: "it was told to stop",
}


@pages.get("/tasks/{task}")
def task(call: WebCall) -> PageView:
    """Shows a task, with the evidence of its end at the top."""
    task_id = call.task()
    result = results.results(call.database, [task_id])[0]
    spec = results.task_spec(call.database, task_id)
    known = validations.states_of_run(call.database, result.run_id).get(task_id)
    replicas = listings.task_lines(call.database, {"group": task_id}, limit=MOST_REPLICAS)
    values = {
        "task": result,
        "spec": spec,
        "outcome": outcome(result),
        "result_name": next(one.outcome for one in replicas if one.id == task_id),
        "cause": cause(result),
        "failed_tests": _failed_tests(result),
        "evidence": _evidence(result),
        "story": call.story(task_id),
        "spans": {attempt.id: spans(attempt) for attempt in result.attempts},
        "limits": {attempt.id: limit_lines(attempt) for attempt in result.attempts},
        "replicas": replicas[:_REPLICAS],
        "disagree": disagreement(replicas),
        "reasons": {attempt.id: reason_of(attempt) for attempt in result.attempts},
        "validation": known,
        "events": events.of_task(call.database, task_id)[-_EVENTS:],
        "trail": users.actions(call.database, subjects=[str(task_id)], limit=20),
        "ended": result.state in ENDED_TASK,
    }
    return PageView("task.html", values)


def disagreement(replicas: Sequence[TaskLine]) -> str:
    """Describes how scored replicas disagree; empty: they do not."""
    scored = Counter(one.outcome for one in replicas if one.outcome in ("solved", "unsolved"))
    return f"{scored['solved']} of {scored.total()} scored replicas solved it" if len(scored) > 1 else ""


def reason_of(attempt: AttemptRecord) -> str:
    """Returns the reason why an attempt ended, or how far it is."""
    if attempt.failure is not None:
        return f"{attempt.failure.error}: {attempt.failure.message}"
    if attempt.verdict is not None:
        suspect = f"suspect: {attempt.verdict.suspect}; " if attempt.verdict.suspect else ""
        return f"{suspect}reward {reward(attempt.verdict.reward)}; {attempt.verdict.detail}".rstrip("; ")
    if attempt.state in LIVE_ATTEMPT:
        return f"it goes on; reached: {list(attempt.phases)[-1].value}" if attempt.phases else "it has not begun"
    return _WITHOUT_FAILURE.get(attempt.state, "its worker recorded no reason")


def cause(result: TaskResult) -> str:
    """Returns the cause of a task's end in one text: the failure's message, or the detail of its verdict."""
    last = result.attempt
    failure = (last.failure if last else None) or result.failure
    if failure is not None and result.verdict is None:
        return f"{failure.error}: {failure.message}"
    return result.verdict.detail if result.verdict is not None else ""


def _failed_tests(result: TaskResult) -> list[tuple[str, str]]:
    """Returns the tests of the verdict that did not pass, with their status."""
    tests = result.verdict.tests if result.verdict is not None else {}
    return [(name, status.value) for name, status in tests.items() if status.value not in ("passed", "skipped")]


def _evidence(result: TaskResult) -> list[tuple[str, str]]:
    """Returns links to the last attempt's evidence, the most useful first: a name and a path."""
    last = result.attempt
    if last is None:
        return []
    stored = {artifact.kind for artifact in last.artifacts if artifact.key}
    base = f"/attempts/{last.id}"
    links = [
        (ArtifactKind.TRAJECTORY, "what the agent did", f"{base}/trajectory"),
        (ArtifactKind.PATCH, "its patch", f"{base}/files/patch"),
        (ArtifactKind.TEST_REPORT, "the tests' output", f"{base}/files/test_report"),
        (ArtifactKind.AGENT_LOG, "the agent's log", f"{base}/files/agent_log"),
    ]
    return [(name, path) for kind, name, path in links if kind in stored]


def _then(call: WebCall, answer: Callable[[WebCall], object]) -> Response:
    """Runs an operation of the API, then redirects to the task."""
    task_id = call.task()
    body = api.Selected(task_ids=(task_id,), reason=call.query.get("reason", "")[: api.MOST_REASON])
    answer(WebCall(call.services, call.caller, call.path, body=body))
    return RedirectResponse(f"/tasks/{task_id}", status_code=303)


pages.post("/tasks/{task}/cancel")(partial(_then, answer=api.cancel_tasks))
pages.post("/tasks/{task}/retry")(partial(_then, answer=api.retry_tasks))
