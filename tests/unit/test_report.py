"""Reports and comparisons by rows: who counts, who is lost, when a figure is refused."""

from __future__ import annotations

import io
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from app.cli import report as command
from app.cli import validate
from app.cli.sweep import sweep_line
from app.cli.tables import SafeConsole
from app.errors import ReportRefused
from app.evaluation.comparison import compare
from app.evaluation.diagnosis import diagnose
from app.evaluation.pages import html_page
from app.evaluation.report import report_of, require_headline
from app.evaluation.transcript_checks import TranscriptFinding
from app.evaluation.transcripts import TaskFindings, TranscriptReport
from app.ledger.report_rows import ReportRow
from app.ledger.results import RunHead
from app.models.spec import AgentTask, EnvironmentSpec, ModelChoice, TaskSpec, TestsGoal
from app.models.validation import Validation, ValidationState

HEAD = RunHead(
    uuid.uuid4(), "nightly <b>", "default", "evaluation", datetime(2026, 11, 24, tzinfo=UTC), {"datasets": []}
)
SPEC = TaskSpec(
    task=AgentTask(
        name="t",
        description="d",
        environment=EnvironmentSpec(image="i"),
        goal=TestsGoal(base_commit="HEAD", test_command="t", fail_to_pass=("a",), pass_to_pass=()),
    ),
    agent="mini-swe-agent",
    model=ModelChoice(name="m"),
).model_dump(mode="json")


def row(name: str, reward: float | None = 1.0, **changes: Any) -> ReportRow:
    verdict = {} if reward is None else {"reward": reward, "counts": True, "grader": "own"}
    made = ReportRow(
        task_id=uuid.uuid4(),
        name=name,
        replica=0,
        agent="mini-swe-agent",
        model="m",
        state="succeeded",
        end_reason="submitted",
        verdict=verdict,
        failure={},
        scripted=False,
        attempts=1,
        cost_usd=0.5,
        environment={"image_id": "sha256:a", "agent_version": "2"},
        phases={"agent_started": "2026-11-24T10:00:00+00:00", "agent_ended": "2026-11-24T10:01:00+00:00"},
        host="h1",
        spec=SPEC,
    )
    return replace(made, **changes)


def lost(name: str, reason: str = "environment_error", **failure: str) -> ReportRow:
    said = {"error": "ImageUnavailable", "message": "no image", "phase": "claimed", **failure}
    return row(name, None, end_reason=reason, state="failed", failure=said)


def test_a_report_tells_scored_lost_suspect_and_cost_per_solved_task() -> None:
    suspect = row("d", 0.0, verdict={"reward": 0.0, "counts": True, "suspect": "rule", "claimed_reward": 1.0})
    rows = [row("a__b-1"), row("a__b-2", 0.0), suspect, lost("e"), row("f", scripted=True), row("g", agent="oracle")]
    part = report_of(HEAD, rows).headline
    assert (part.total, part.scored, part.solved, part.suspect, part.scripted) == (5, 3, 1, 1, 1)
    assert part.lost == {"environment_error (ImageUnavailable)": 1}
    assert part.rate is not None
    assert part.rate.value == pytest.approx(1 / 3)
    assert part.cost_per_solved_usd == pytest.approx(2.5)
    assert part.seconds_per_solved == pytest.approx(300)


def test_baselines_are_apart_and_their_contradictions_named() -> None:
    rows = [row("a"), row("b", agent="oracle"), row("b", 0.0, agent="oracle", replica=1)]
    report = report_of(HEAD, rows)
    (oracle,) = report.baselines
    assert (report.headline.total, oracle.name, oracle.unstable) == (1, "oracle", ("b",))


def test_a_headline_is_refused_when_infrastructure_lost_too_much() -> None:
    good = [row(f"t{n}") for n in range(98)]
    require_headline(report_of(HEAD, [*good, lost("x"), lost("y")]))
    with pytest.raises(ReportRefused, match="lost 3 of 101 tasks"):
        require_headline(report_of(HEAD, [*good, lost("x"), lost("y"), lost("z")]))
    require_headline(report_of(HEAD, [*good, *(lost(f"c{n}", "cancelled") for n in range(9))]))


def test_replicas_give_pass_at_k_and_an_interval_by_task() -> None:
    rows = [row(f"t{n}", float(replica == n), replica=replica) for n in range(2) for replica in range(5)]
    part = report_of(HEAD, rows).headline
    assert part.rate is not None
    assert part.rate.method == "clustered by task"
    assert list(part.pass_at) == list(part.pass_hat) == [1, 2, 4, 5]
    assert (part.pass_at[4], part.pass_at[5], part.pass_hat[5]) == (pytest.approx(0.8), 1.0, 0.0)


def test_a_verdict_that_broke_grading_brings_no_unknown_grader() -> None:
    broke = row("b", 0.0, verdict={"reward": 0.0, "counts": True, "detail": "broke grading: no reward"})
    old = row("c", verdict={"reward": 1.0, "counts": True})
    assert report_of(HEAD, [row("a"), broke, lost("d")]).versions["grader"] == ("own",)
    assert report_of(HEAD, [row("a"), old]).versions["grader"] == ("own", "unknown")
    assert report_of(HEAD, [broke]).versions["grader"] == ("unknown",)


def test_rewards_outside_0_to_1_are_counted_beside_their_mean() -> None:
    suspect = row("d", 0.0, verdict={"reward": -3.0, "counts": True, "suspect": "rule", "claimed_reward": 90.0})
    report = report_of(HEAD, [row("a", 60.0), row("b", -0.5), row("c", 1.0), suspect])
    assert report.headline.rewards_outside == 2
    assert any(note.startswith("2 of 4 rewards lie outside 0..1: the mean reward, 15.125,") for note in report.notes)
    inside = report_of(HEAD, [row("a"), row("b", 0.0)])
    assert not any("outside" in note for note in inside.notes)


def test_the_range_of_rewards_that_tasks_state_is_named() -> None:
    scored = [{"kind": "script"}, {"kind": "script", "reward_range": [0.0, 60.0]}]
    rows = [row("a"), *(row("b", spec=SPEC | {"task": SPEC["task"] | {"goal": goal}}) for goal in scored)]
    assert report_of(HEAD, rows).versions["reward range"] == ("0 to 1", "0 to 60", "not stated by the task")


@pytest.mark.parametrize(("tasks", "points"), [(1, 100), (2, 98), (50, 20), (99, 14)])
def test_few_tasks_name_the_difference_that_is_chance_at_their_number(tasks: int, points: int) -> None:
    notes = report_of(HEAD, [row(f"t{n}") for n in range(tasks)]).notes
    said = f"{tasks} scored tasks once each: differences below about {points} points are chance"
    assert said in notes


def test_two_agents_of_one_run_have_a_headline_each_and_none_together(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("a__b-1"), row("a__b-1", replica=1), row("a__b-1", 0.0, agent="claude-code"), row("b", agent="oracle")]
    report = report_of(HEAD, rows)
    assert (report.headline.pass_at, report.headline.rate, report.headline.cost_per_solved_usd) == ({}, None, None)
    assert (report.headline.solved, report.headline.scored) == (2, 3)
    assert [(part.name, set(part.pass_at)) for part in report.by["agent"]] == [
        ("claude-code m", {1}),
        ("mini-swe-agent m", {1, 2}),
    ]
    assert [part.name for part in report.by["repository"]] == ["claude-code m: a/b", "mini-swe-agent m: a/b"]
    assert any(note.startswith("claude-code m: 1 scored tasks once each") for note in report.notes)
    command._print_report(report, None)
    out, page = capsys.readouterr().out, html_page(report)
    assert out.index("claude-code m: 0.0 %") < out.index("mini-swe-agent m: 100.0 %") < out.index("oracle")
    assert "66.7" not in out + page, "no rate of both"
    assert "claude-code m 0.0 %, mini-swe-agent m 100.0 %</title>" in page
    of_one = [row(f"t{n}") for n in range(98)]
    with pytest.raises(ReportRefused, match="lost 1 of 1 tasks of claude-code m, more than 2%"):
        require_headline(report_of(HEAD, [*of_one, replace(lost("x"), agent="claude-code")]))


def test_runs_on_other_images_or_limits_are_compared_only_when_asked() -> None:
    first = [row("a"), row("b", 0.0)]
    second = [replace(one, environment={"image_id": "sha256:other", "agent_version": "2"}) for one in first]
    with pytest.raises(ReportRefused, match=r"image: sha256:a and sha256:other.*--allow image"):
        compare(first, second)
    assert compare(first, second, allow=["image"]).tasks == 2
    versions = [replace(one, environment={"image_id": "sha256:a", "agent_version": "3"}) for one in first]
    with pytest.raises(ReportRefused, match="--allow agent"):
        compare(first, versions)


def test_runs_with_other_prompts_are_compared_only_when_asked() -> None:
    first, spec = [row("a")], SPEC | {"agent_args": {"append_system_prompt": "Think twice."}}
    [told] = report_of(HEAD, first).versions["prompt"]
    assert told.startswith("texts of tasks sha256:")
    assert report_of(HEAD, [row("a", spec=spec)]).versions["prompt"][0].startswith("append_system_prompt sha256:")
    for other in (spec, SPEC | {"task": SPEC["task"] | {"description": "d, and be quick"}}):
        with pytest.raises(ReportRefused, match=r"prompt: .*sha256:.*--allow prompt"):
            compare(first, [row("a", spec=other)])
        assert "prompt" in compare(first, [row("a", spec=other)], allow=["prompt"]).differs


def test_runs_with_other_tests_of_the_same_tasks_are_compared_only_when_asked() -> None:
    other = SPEC | {"task": SPEC["task"] | {"goal": SPEC["task"]["goal"] | {"command": "sh /tests/easier.sh"}}}
    with pytest.raises(ReportRefused, match=r"tests: of tasks sha256:.*--allow tests"):
        compare([row("a")], [row("a", spec=other)])
    assert compare([row("a")], [row("a", spec=other), row("b", spec=other)], allow=["tests"]).tasks == 1


def test_a_run_of_several_agents_is_not_compared() -> None:
    several = [row("a"), row("a", 0.0, agent="claude-code"), row("a", agent="oracle")]
    for pair, which in (((several, [row("a")]), "first"), (([row("a")], several), "second")):
        with pytest.raises(ReportRefused, match=f"found claude-code, mini-swe-agent in the {which}"):
            compare(*pair, allow=["agent"])


def test_runs_of_other_graders_are_compared_only_when_asked() -> None:
    first = [row("a"), row("b")]
    second = [row("a", verdict={"reward": 1.0, "counts": True, "grader": "own 2"}), lost("b")]
    with pytest.raises(ReportRefused, match=r"grader: own and own 2; .*--allow grader"):
        compare(first, second)
    assert compare(first, second, allow=["grader"]).differs["grader"] == (("own",), ("own 2",))
    other = row("b", verdict={"reward": 1.0, "counts": True, "grader": "own 2"})
    assert compare([row("a"), other], [row("a"), lost("b")]).tasks == 1, "what only one was graded by is not compared"
    with pytest.raises(ReportRefused, match="found none: the first has no score of a model; `megaflow report RUN`"):
        compare([replace(row("a"), scripted=True)], first)


def sized(rows: list[ReportRow], factor: float) -> list[ReportRow]:
    """As in a run with this `--kill-at`: the second task is killed twice, and held up."""
    spec = TaskSpec.model_validate(SPEC)
    environment = spec.task.environment
    resources = environment.resources.sized(factor, environment.resources)
    changed = spec.task.model_copy(update={"environment": environment.model_copy(update={"resources": resources})})
    dumped = spec.model_copy(update={"task": changed}).model_dump(mode="json")
    killed = {"killed": {"agent": 1, "grading": 0}, "services": {"db": {"limit_bytes": 1, "killed": {"agent": 1}}}}
    met = {"memory": {"limit_bytes": 1, **killed}, "cpu": {"limit": 2.0, "throttled_s": {"agent": 1.5}}}
    return [
        replace(one, spec=dumped, environment=one.environment | (met if number == 1 else {}))
        for number, one in enumerate(rows)
    ]


def test_runs_of_other_sizes_are_compared_only_when_asked_and_both_sizes_are_named() -> None:
    first = sized([row("a"), row("b", 0.0, end_reason="agent_timeout")], 1)
    second = sized([row("a"), row("b")], 3)
    named = r"resources: 2 cpus, 2048 MiB guaranteed; kill at 2 cpus, 2048 MiB and .*kill at 6 cpus, 6144 MiB"
    with pytest.raises(ReportRefused, match=f"{named}; .*--allow resources"):
        compare(first, second)
    assert compare(first, second, allow=["resources"]).tasks == 2
    part = report_of(HEAD, first).headline
    assert (part.memory_kills, part.throttled_s, part.out_of_time) == (2, 1.5, 1)
    unknown = report_of(HEAD, [row("a")]).headline
    assert (unknown.memory_kills, unknown.throttled_s, unknown.out_of_time) == (None, None, 0)


def test_a_sweep_compares_each_run_with_the_first_by_agent_and_task() -> None:
    first = [row(f"t{n}", float(n % 2), agent=agent) for n in range(10) for agent in ("oracle", "nop")]
    second = [replace(one, verdict=one.verdict | {"reward": 1.0}) for one in first]
    base, line = sweep_line("r1", "1x", first), sweep_line("r2", "3x", second, first)
    assert (base.difference, base.figures.name, base.figures.solved) == (None, "1x", 10)
    assert (line.tasks, line.figures.solved) == (20, 20)
    assert line.difference is not None
    assert (line.difference.value, line.difference.low > 0) == (0.5, True)
    assert sweep_line("r2", "3x", [lost("t1")], first).difference is None, "nothing that both have scored"


def test_with_replicas_a_comparison_counts_each_task_once(capsys: pytest.CaptureFixture[str]) -> None:
    def run(solved: int, other: int) -> list[ReportRow]:
        counts = (("a", solved), ("b", other), ("same", 2))
        return [row(name, float(n < count), replica=n) for name, count in counts for n in range(5)]

    found = compare(run(3, 0), run(2, 1))
    command._print_comparison(found, "one", "two")
    out = capsys.readouterr().out
    assert "p = 1 (each task once, solved where more than half of its replicas are)" in out
    assert "solved 1 that the other did not: a\n" in out
    assert (found.only_first, found.only_second) == (("a",), ())
    command._print_comparison(compare([row("a")], [row("a", 0.0)]), "one", "two")
    out = capsys.readouterr().out
    assert "solved 1 that the other did not: a\n" in out
    assert "more" not in out


def test_failures_are_grouped_by_what_they_have_in_common() -> None:
    rows = [lost(f"t{n}", message=f"no image 4{n} at 0x{n:x}ff\nmore {n}") for n in range(5)]
    broke = row("b", 0.0, verdict={"reward": 0.0, "counts": True, "detail": "broke grading: no reward"})
    groups = diagnose([*rows, broke, row("fine")])
    assert [(one.count, one.error) for one in groups] == [(5, "ImageUnavailable"), (1, "broke grading")]
    assert groups[0].line == "no image 40 at 0x0ff"
    assert len(groups[0].examples) == 3


@pytest.mark.parametrize(
    ("key", "groups"),
    [
        ("suspect", [["conftest-hook"] * 5, ["start-up-file"] * 3]),
        (
            "suspect",
            [
                ["hooks of the test runner in conftest.py", "hooks of the test runner in tests/a/conftest.py"],
                ["files that could change the judgement: /a/b", "files that could change the judgement: /a/b, /c"],
            ],
        ),
        (
            "detail",
            [
                [
                    "broke grading: expected a number in '/logs/a/reward.txt' of 0123456789abcdef; found 'x' at 3",
                    "broke grading: expected a number in '/logs/b c/reward.txt' of fedcba9876543210; found nothing",
                ],
                [
                    "broke grading: expected a folder at /logs/verifier",
                    "broke grading: expected a folder at app/results/9; found a link",
                ],
                ["broke grading: expected a number of tests"],
            ],
        ),
    ],
)
def test_verdicts_are_grouped_by_their_rule_and_by_what_was_expected(key: str, groups: list[list[str]]) -> None:
    rows = [row("t", 0.0, verdict={"reward": 0.0, "counts": True, key: one}) for group in groups for one in group]
    found = diagnose([*rows, row("wrong", 0.0)])
    assert [(one.count, one.line) for one in found] == [(len(group), group[0]) for group in groups]
    error = {"suspect": "suspect", "detail": "broke grading"}[key]
    assert {(one.error, one.phase) for one in found} == {(error, "graded")}


def test_the_page_escapes_what_runs_and_tasks_are_called() -> None:
    page = html_page(report_of(HEAD, [row("<script>alert(1)</script>__x-1"), row("b")]))
    assert "<script" not in page
    assert "nightly &lt;b&gt;" in page
    assert "http" not in page


def test_the_page_tells_what_the_transcript_checks_found() -> None:
    finding = TranscriptFinding(rule="later-history", step=3, excerpt="git log --all <x>")
    task = TaskFindings(task_id="t", name="a", replica=0, agent="x", reward=1.0, findings=(finding,))
    found = TranscriptReport(checked=2, without=1, rules={"later-history": 1}, tasks=(task,))
    page = html_page(report_of(HEAD, [row("a"), row("b")]), found)
    assert "2 checked by rules, findings in 1; 1 tasks have none" in page
    assert "git log --all &lt;x&gt;" in page
    assert "Transcripts" not in html_page(report_of(HEAD, [row("a")]))


def test_two_runs_of_baselines_are_not_compared_and_told_why() -> None:
    oracle = [row("a", agent="oracle")]
    with pytest.raises(ReportRefused, match="agents that ask a model; found one of oracle alone"):
        compare(oracle, oracle)
    with pytest.raises(ReportRefused, match="found one of nop, oracle alone"):
        compare([row("a")], [*oracle, row("a", agent="nop")])


# --- On a terminal --------------------------------------------------------------------------------------------------


def test_a_report_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    out = SafeConsole(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(command, "console", out)
    rows = [row(f"some-organisation__a-long-name-{n % 12}-{n}", float(n % 3 == 0)) for n in range(200)]
    suspect = row("s", 0.0, verdict={"reward": 0.0, "counts": True, "suspect": "rule"})
    command._print_report(report_of(HEAD, [*rows, suspect, lost("x"), row("o", agent="oracle")]), None)
    said = out.file.getvalue()  # type: ignore[attr-defined]
    tables = said[said.index("agents") : said.index("note:")]
    assert all(len(line) <= 80 for line in tables.splitlines())
    assert "67 solved of 201 scored, of 202 tasks" in said
    assert "not scored: 1 environment_error (ImageUnavailable)" in said
    assert "oracle" in said
    assert "and 3 more (`| cat` shows all)" in said, "of the thirteen repositories"


# --- Flaky tests ----------------------------------------------------------------------------------------------------


def ran(name: str, patch: str | None, tests: dict[str, str], **changes: Any) -> ReportRow:
    verdict = {"reward": 0.0, "counts": True, "grader": "own", "tests": tests}
    return row(name, patch_sha256=patch, verdict=verdict, **changes)


def test_tests_that_differ_between_runs_of_one_solution_are_named_beside_the_score() -> None:
    rows = [
        ran("same", "p1", {"a": "passed", "b": "failed", "c": "skipped"}),
        ran("same", "p1", {"a": "failed", "b": "failed", "c": "passed"}),
        ran("other-patch", "p1", {"a": "passed"}),
        ran("other-patch", "p2", {"a": "failed"}),
        ran("no-patch", None, {"a": "passed"}),
        ran("no-patch", None, {"a": "failed"}),
        ran("script", None, {"x": "passed"}, agent="nop"),
        ran("script", None, {"x": "missing"}, agent="nop"),
        ran("validated", "p", {}, flipped=("t::<b>",)),
    ]
    made = report_of(HEAD, rows)
    assert made.flaky == {"same": ("a",), "script": ("x",), "validated": ("t::<b>",)}
    assert any(note.startswith("3 tasks have flaky tests") for note in made.notes)
    page = html_page(made)
    assert "<td>validated</td><td>t::&lt;b&gt;</td>" in page
    assert "Flaky tests" not in html_page(report_of(HEAD, rows[2:4]))


def test_a_terminal_and_a_validation_name_flaky_tests(capsys: pytest.CaptureFixture[str]) -> None:
    command._print_report(report_of(HEAD, [ran("same", "p", {"a": one}) for one in ("passed", "failed")]), None)
    assert "flaky in same: a" in capsys.readouterr().out
    flaky = ("t::a", "t::b", "t::c", "t::d", "t::e", "t::f")
    about = {"content": "c", "dataset": "d", "task": "one", "image": "i", "reason": "flaky", "flipped": flaky}
    found = Validation(state=ValidationState.QUARANTINED, **about)
    validate._print_validations([found], [], json=False)
    assert f"one: flaky tests: {', '.join(flaky)}" in capsys.readouterr().out
