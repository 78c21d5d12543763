"""What the screens say of tasks, and that their counts lead to the rows behind them."""

from __future__ import annotations

import re
from uuid import UUID

from app.ledger import results, validations
from app.ledger.database import sql
from app.models.outcome import Failure
from app.models.validation import Validation, ValidationState, content_of
from tests.integration.test_reports import SUSPECT, verdict
from tests.integration.web_ground import Web, web

__all__ = ["web"]


def _tasks(web: Web, run_id: UUID) -> list[UUID]:
    return results.task_ids(web.database, run_id)


def _text(page: str) -> str:
    """Without tags and with single spaces."""
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def test_replicas_that_disagree_are_flaky_and_others_are_not(web: Web) -> None:
    run_id = web.reports.run("night", {"click-1": verdict(1.0)}, replicas=3)
    first, second, third = _tasks(web, run_id)
    with web.user() as client:
        assert "flaky" not in client.get(f"/tasks/{first}").text
        with web.database.begin() as connection:
            wrong = "UPDATE tasks SET verdict = jsonb_set(verdict, '{reward}', '0') WHERE id = :id"
            sql(connection, wrong, {"id": second})
        for task_id in (first, second, third):
            assert "flaky : 2 of 3 scored replicas solved it" in _text(client.get(f"/tasks/{task_id}").text)


def test_a_task_says_whether_its_score_may_be_counted_on(web: Web) -> None:
    run_id = web.reports.run("night", {"click-1": verdict(1.0)})
    (task_id,) = _tasks(web, run_id)
    task = results.task_spec(web.database, task_id).task
    with web.user() as client:
        assert "not validated : whether its score may be counted on is unknown" in _text(
            client.get(f"/tasks/{task_id}").text
        )
        found = Validation(
            content=content_of(task.model_dump(mode="json")),
            image_id="sha256:a",
            dataset=task.dataset,
            task=task.name,
            image="i",
            state=ValidationState.QUARANTINED,
            reason="nop got 1",
            flipped=("t::a",),
        )
        validations.record(web.database, [found])
        page = _text(client.get(f"/tasks/{task_id}").text)
        assert "quarantined : nop got 1" in page
        assert "flaky tests : t::a" in page


def test_each_attempt_is_listed_with_its_reason(web: Web) -> None:
    broken = Failure(error="ImageUnavailable", message="no image 17")
    outcomes = {"click-1": verdict(0.0), "click-2": broken, "click-3": SUSPECT}
    reasons = ["reward 0", "ImageUnavailable: no image 17", "suspect: conftest-hook; reward 0"]
    with web.user() as client:
        for task_id, reason in zip(_tasks(web, web.reports.run("night", outcomes)), reasons, strict=True):
            attempts = client.get(f"/tasks/{task_id}").text.partition("<h2>Attempts</h2>")[2].partition("</table>")[0]
            assert reason in _text(attempts)
