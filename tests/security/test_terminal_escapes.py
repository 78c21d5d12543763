"""What a task wrote reaches the terminal as text: `show`, `logs`, `status` and errors carry nothing that steers it."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest

from app.cli import runs, show
from app.cli.tables import SafeConsole
from app.models.outcome import AttemptRecord, Failure, TaskResult, Verdict
from app.models.spec import Mode
from app.models.states import AttemptState, TaskState
from tests.building import new_id

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[red]gone[/red]\x00\r"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    out = io.StringIO()
    console = SafeConsole(file=out, width=80, force_terminal=True, color_system=None)
    for module in (show, runs):
        monkeypatch.setattr(module, "console", console)
    return out


def a_result(*, failed: bool) -> TaskResult:
    attempt = AttemptRecord(
        id=new_id(),
        number=1,
        state=AttemptState.ERROR if failed else AttemptState.FINISHED,
        mode=Mode.PERSISTENT,
        instance=HOSTILE,
        environment={"image": HOSTILE, "network": "none"},
        failure=Failure(error="EnvironmentFailed", message=HOSTILE) if failed else None,
        phases={"accepted": datetime.now(UTC)},  # type: ignore[dict-item]
    )
    verdict = Verdict(reward=0.0, counts=True, detail=HOSTILE, tests={HOSTILE: "failed"})  # type: ignore[dict-item]
    return TaskResult(
        task_id=new_id(),
        run_id=new_id(),
        name=HOSTILE,
        agent=HOSTILE,
        model=HOSTILE,
        mode=Mode.PERSISTENT,
        state=TaskState.FAILED if failed else TaskState.SUCCEEDED,
        verdict=None if failed else verdict,
        attempts=(attempt,),
    )


@pytest.mark.parametrize("failed", [True, False])
def test_nothing_of_a_task_steers_the_terminal(terminal: io.StringIO, failed: bool) -> None:
    result = a_result(failed=failed)
    show.console.print(show.results_table([result]))
    show.console.print(runs.outcome(result), style="bold")
    if result.verdict is not None:
        runs._print_verdict(result)
    for attempt in result.attempts:
        runs._print_attempt(attempt)
    said = terminal.getvalue()
    assert "[red]gone[/red]" in said, "it is shown, as text"
    assert said.replace("\n", "").isprintable()


def test_a_title_that_nobody_ends_hides_nothing_of_the_next_lines(terminal: io.StringIO) -> None:
    show.console.print("\x1b]0;owned\x07one\n\x1b]0;owned\ntwo :warning:", soft_wrap=True)
    assert terminal.getvalue().split("\n")[:3] == ["one", "", "two :warning:"]
