"""`megaflow regrade`: kept test reports are judged again, over a real ledger and store."""

from __future__ import annotations

import pytest

from app.artifacts import open_store
from app.errors import ArtifactChanged
from app.evaluation import regrade
from app.grading.suite_run import TestRun
from app.ledger import ends, events, results
from app.models.outcome import TaskResult, TestStatus, Verdict
from tests.integration.test_reports import Reports, reports, verdict

__all__ = ["reports"]

WRONG = Verdict(reward=0.0, counts=True, tests={"a": TestStatus.FAILED}, grader="megaflow 0.0.1")


def report(word: str, *, rule: str | None = "", exit_code: int = 0) -> bytes:
    """A kept report in which the test `a` ended with a word."""
    output = f">>>>> MegaFlow n start\n{word} a\n\n>>>>> MegaFlow n end {exit_code}\n".encode()
    return TestRun("n", output, exit_code, rule=rule).report()


def of(reports: Reports, name: str) -> TaskResult:
    (found,) = results.results(reports.database, [results.find(reports.database, "tasks", name)])
    return found


def test_kept_reports_are_judged_again_and_both_verdicts_stay(reports: Reports) -> None:
    reports.test_reports = {"up": report("PASSED"), "down": report("FAILED"), "same": report("PASSED")}
    reports.run("night", {"up": WRONG, "down": verdict(1.0), "same": verdict(1.0)})
    said = reports("regrade", "night")
    assert "3 judged again: 1 0→1, 1 1→0, 0 unscored; 3 new verdicts stored" in said  # by another grader, all three
    up = of(reports, "up")
    assert up.verdict is not None
    assert (up.reward, up.verdict.tests) == (1.0, {"a": TestStatus.PASSED})
    assert up.verdict.regraded_at is not None
    assert up.verdict.previous == (WRONG,)
    assert up.attempts[0].verdict == up.verdict
    shown = reports("show", "up")
    assert "verdict: reward 1" in shown
    assert "before, first verdict: reward 0 by megaflow 0.0.1" in shown
    assert "3 regraded: judged again from their kept test reports" in reports("report", "night")
    assert reports.json("report", "night")["headline"]["regraded"] == 3
    (fact,) = [one for one in events.of_task(reports.database, up.task_id) if one.kind == "attempt.regraded"]
    assert (fact.data["previous_reward"], fact.data["reward"]) == (0.0, 1.0)


def test_a_second_regrade_changes_nothing(reports: Reports) -> None:
    reports.test_reports = {"up": report("PASSED")}
    reports.run("night", {"up": WRONG})
    reports("regrade", "night")
    first = of(reports, "up")
    found = reports.json("regrade", "night")
    assert (found["judged"], found["stored"], found["flips"]) == (1, 0, [])
    assert of(reports, "up") == first


def test_what_is_suspect_or_broke_its_grading_stays_so(reports: Reports) -> None:
    suspect = WRONG.model_copy(update={"suspect": "conftest-hook", "claimed_reward": 0.0})
    broke = Verdict(reward=0.0, counts=True, detail="broke grading: expected markers; found none")
    names = ("suspect", "broke", "ruled", "older", "hung")
    reports.test_reports = dict.fromkeys(names, report("PASSED"))
    reports.test_reports |= {"ruled": report("PASSED", rule="pytest.ini"), "older": report("PASSED", rule=None)}
    reports.test_reports |= {"hung": TestRun("n", b">>>>> MegaFlow n start\nFAILED a\n", None, timed_out=True).report()}
    reports.run("night", {"suspect": suspect, "broke": broke, "ruled": WRONG, "older": WRONG, "hung": verdict(0.0)})
    found = reports.json("regrade", "night")
    assert found["left_out"] == {
        "broke grading": 1,
        "its tests did not end, and no report says whose fault that was": 1,
        "solved now, by a report that does not say whether a rule makes it suspect": 1,
    }
    assert found["flips"] == []
    for name, rule in (("suspect", "conftest-hook"), ("ruled", "pytest.ini")):
        judged = of(reports, name).verdict
        assert judged is not None
        assert (judged.reward, judged.suspect, judged.claimed_reward) == (0.0, rule, 1.0), name
    assert of(reports, "broke").verdict == broke
    assert of(reports, "older").reward == 0.0


def test_a_report_that_is_not_the_recorded_one_is_refused(reports: Reports) -> None:
    reports.test_reports = {"forged": report("FAILED")}
    reports.run("night", {"forged": WRONG})
    key = next(one.key for one in of(reports, "forged").artifacts if one.kind == "test_report")
    reports.store.put(str(key), report("PASSED"))
    with pytest.raises(ArtifactChanged, match=rf"{key}: expected the report that was recorded, sha256"):
        reports("regrade", "night")
    assert of(reports, "forged").verdict == WRONG


def test_what_cannot_be_judged_again_is_counted_by_its_reason(reports: Reports) -> None:
    reports.test_reports = {"gone": report("PASSED"), "runner": report("no", exit_code=127)}
    run_id = reports.run("night", {"gone": WRONG, "no-tests": WRONG, "runner": WRONG})
    gone = of(reports, "gone")
    key = next(one.key for one in gone.artifacts if one.kind == "test_report")
    store = open_store(reports.settings.artifacts())
    (reports.settings.home / "artifacts" / str(key)).unlink(missing_ok=True)
    found = regrade.regrade(reports.database, store, None, run_id)
    assert found.left_out == {
        "its test report is gone from the artifact store": 1,
        "no tests ran: a patch that did not apply, or an agent that ended all by itself": 1,
    }
    assert (found.judged, found.unscored_now) == (1, 1)
    runner = of(reports, "runner").verdict
    assert runner is not None
    assert (runner.counts, runner.reward) == (False, None)
    assert "is its program in the image" in runner.detail
    other = reports.json("regrade", "night", "--grader-version", "swebench 1")
    assert other["left_out"] == {"judged by another grader": 3}


def test_two_regrades_at_once_lose_no_verdict(reports: Reports) -> None:
    reports.run("night", {"up": WRONG})
    before = of(reports, "up")
    assert before.verdict is not None
    assert before.attempt is not None
    late = verdict(1.0).after(before.verdict, before.attempt.phases["agent_ended"])  # type: ignore[index]
    assert ends.regrade(reports.database, {before.attempt.id: late}) == {before.attempt.id}
    assert ends.regrade(reports.database, {before.attempt.id: late}) == set()
    assert of(reports, "up").verdict == late
