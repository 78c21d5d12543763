"""Pages of a run: its score, a cell for each attempt, a table of tasks; and its operations."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from typing import Any
from uuid import UUID

from markupsafe import Markup
from pydantic import TypeAdapter, ValidationError
from starlette.responses import RedirectResponse, Response

from app.errors import MegaFlowError, SpecInvalid, UnknownName
from app.evaluation import Submission, statistics
from app.evaluation.pages import STYLE_HASH, html_page
from app.evaluation.report import BASELINES
from app.ledger import explain_run, listings, pauses, results, users
from app.ledger.database import sql
from app.ledger.listings import OUTCOMES
from app.ledger.users import Scope
from app.texts import summary
from app.web.api import administration
from app.web.api import runs as api
from app.web.api.operation import invalid
from app.web.calls import WebCall, WebServices
from app.web.pages.page import Pages
from app.web.pages.rendering import PageView, fragment

pages = Pages()

_LINES = 100
_SUBMISSIONS = TypeAdapter(Submission)
HAS_STATISTICS = find_spec("scipy") is not None
"""Whether intervals can be computed, which needs the extra `report`."""


def run_values(services: WebServices, run_id: UUID) -> dict[str, Any]:
    """Returns the values of the run page's live part."""
    database = services.database
    status = results.run_status(database, run_id)
    solved = results.solved_counts(database, run_id, BASELINES) if status.scored and HAS_STATISTICS else {}
    letters = listings.outcome_letters(database, run_id)
    counts = {name: letters.count(letter) for name, letter in OUTCOMES.items()}
    many = any(len(one) > 1 for one in solved.values())
    with database.begin() as connection:
        ends = dict(sql(connection, _ENDS, {"run": run_id}).all())
        cost = sql(connection, _COST, {"run": run_id}).scalar_one()  # of models, of ended attempts; None: unknown
    ks = [k for k in (1, 2, 4, 8, 16) if many and any(len(one) >= k for one in solved.values())]
    return {
        "run": status,
        "counts": counts,
        "letters": letters,
        "rate": statistics.pass_rate(solved) if solved else None,
        "pass_at": [(k, statistics.pass_at(k, solved), statistics.pass_hat(k, solved)) for k in ks],
        "summary": summary(status),
        "cost": cost,
        "ends": ends,
        "left_s": time_left(status),
        "paused": pauses.of_run(database, run_id),
    }


_ENDS = "SELECT end_reason, count(*) FROM tasks WHERE run_id = :run AND end_reason <> '' GROUP BY 1 ORDER BY 2 DESC"
_COST = "SELECT sum(a.cost_usd) FROM tasks t JOIN attempts a ON a.task_id = t.id WHERE t.run_id = :run"


def time_left(status: results.RunStatus) -> float | None:
    """Estimates the seconds until the run's end, at its pace until now; None: no task has ended yet, or all have."""
    if status.done or not status.ended:
        return None
    return (datetime.now(UTC) - status.created_at).total_seconds() / status.ended * (status.total - status.ended)


def run_text(services: WebServices, run_id: UUID) -> str:
    """Renders the live part of the page."""
    return fragment("run_part.html", run_values(services, run_id))


def run_part(services: WebServices, run_id: UUID) -> Markup:
    """Returns the live part as viewers of the page have it: made again only after a change of the ledger."""
    return Markup(services.live.text(f"run {run_id}", lambda: run_text(services, run_id)))


@pages.get("/runs/{run}")
def run(call: WebCall) -> PageView:
    """Shows a run; the table's conditions are in the URL."""
    run_id = call.run()
    values = {
        "run": results.run_head(call.database, run_id),
        "part": run_part(call.services, run_id),
        "paused": pauses.of_run(call.database, run_id),
        "trail": users.actions(call.database, subjects=[str(run_id)], limit=20),
    }
    return PageView("run.html", {**values, **_table(call, ("end", "agent", "name"), run=run_id)})


@pages.get("/tasks")
def tasks(call: WebCall) -> PageView:
    """Lists tasks of all runs: the rows behind the fleet's counts."""
    own = {} if call.caller.administers else {"user": call.caller.user_name}
    return PageView("tasks.html", {"run": None, **_table(call, listings.CONDITIONS, **own)})


def _table(call: WebCall, filters: Sequence[str], **fixed: Any) -> dict[str, Any]:
    """Returns the tasks by the conditions in the URL and the fixed ones. Raises: SpecInvalid."""
    chosen = {name: value for name in filters if (value := call.query.get(name))}
    if (outcome := call.query.get("outcome", "")) not in ("", "scored", *OUTCOMES):
        raise SpecInvalid(f"expected an outcome of scored, {', '.join(OUTCOMES)}, found {outcome[:80]!r}")
    try:
        after = {"after": UUID(call.query["after"])} if call.query.get("after") else {}
    except ValueError:
        raise SpecInvalid("expected the id of a task in `after`, found something else") from None
    outcomes = ("solved", "unsolved", "suspect") if outcome == "scored" else (outcome,) if outcome else ()
    lines = listings.task_lines(call.database, {**chosen, **fixed, **after}, outcomes=outcomes, limit=_LINES)
    known = {
        "outcomes": ("scored", *OUTCOMES),
        "filters": filters,
        "more": lines[-1].id if len(lines) == _LINES else "",
    }
    return {"lines": lines, "chosen": {**chosen, "outcome": outcome}, **known}


@pages.get("/runs/{run}/at/{index}/{number}")
def cell_at(call: WebCall) -> Response:
    """Redirects to the attempt of a cell, or to its task if it has no attempt."""
    run_id, places = call.run(), [call.path["index"], call.path["number"]]
    known = all(place.isascii() and place.isdigit() and len(place) < 10 for place in places)
    cell = listings.cell_at(call.database, run_id, *map(int, places)) if known else None
    if cell is None:
        raise UnknownName(f"the run has no task {places[0][:20]}")
    return RedirectResponse(f"/attempts/{cell.attempt_id}" if cell.attempt_id else f"/tasks/{cell.task_id}", 303)


@pages.get("/runs/{run}/explain")
def explained(call: WebCall) -> PageView:
    """Explains where a run's time went, and what delays the rest."""
    story = explain_run.run(call.database, call.services.settings, call.run())
    return PageView("run_explain.html", {"story": story})


@pages.get("/runs/{run}/report")
def report(call: WebCall) -> PageView:
    """Shows the report of `megaflow report`, as a page."""
    run_id = call.run()
    run_report = call.flow.installation.report(run_id, allow_loss=True)
    policy = f"default-src 'none'; style-src 'sha256-{STYLE_HASH}'; frame-ancestors 'none'; base-uri 'none'"
    return PageView("plain.html", {"text": html_page(run_report)}, headers={"Content-Security-Policy": policy})


def _then(call: WebCall, answer: Any) -> Response:
    """Runs an operation of the API, then redirects to the run."""
    reason = api.Reason(reason=call.query.get("reason", "")[: api.MOST_REASON])
    answer(WebCall(call.services, call.caller, call.path, body=reason))
    return RedirectResponse(f"/runs/{call.run()}", status_code=303)


for _name, _operation in (
    ("cancel", api.cancel_run), ("retry", api.retry_run), ("pause", api.pause_run), ("resume", api.resume_run)
):  # fmt: skip
    pages.post(f"/runs/{{run}}/{_name}")(partial(_then, answer=_operation))


@pages.get("/submit", Scope.SUBMIT)
def submit_form(call: WebCall) -> PageView:
    """Shows a form that submits a dataset."""
    return PageView("submit.html", {"given": {}, "error": ""})


@pages.post("/submit")
def submit(call: WebCall) -> PageView | Response:
    """Submits the form; an error is shown next to it."""
    form = call.query
    given = {name: form[name].strip() for name in ("dataset", "agent", "replicas", "name") if form.get(name)}
    if form.get("model"):
        given["model"] = {"name": form["model"].strip()}
    try:
        submission = _SUBMISSIONS.validate_python({"dataset": "", "agent": "", **given}, strict=False)
        accepted = api.submit_run(WebCall(call.services, call.caller, {}, body=api.DatasetRun(submission=submission)))
    except ValidationError as error:
        return PageView("submit.html", {"given": form, "error": str(invalid(error))}, 422)
    except MegaFlowError as error:
        return PageView("submit.html", {"given": form, "error": str(error)}, 422)
    return RedirectResponse(f"/runs/{accepted.run_id}", status_code=303)


@pages.post("/limits", Scope.ADMINISTER)
def set_limit(call: WebCall) -> Response:
    """Sets a limit."""
    form = call.query
    try:
        capacity = float(form["capacity"]) if form.get("capacity") else None
    except ValueError:
        raise SpecInvalid(f"expected a number as capacity, found {form['capacity'][:40]!r}; nothing changed") from None
    body = administration.LimitChange(capacity=capacity, reason=form.get("reason", "")[:1000])
    administration.set_limit(WebCall(call.services, call.caller, {"name": form.get("name", "")}, body=body))
    return RedirectResponse("/", status_code=303)
