"""Who decides alone: doubled, killed between two writes, paused past its term, replaced under load."""

from __future__ import annotations

import signal
import time

from app.models.spec import Mode
from tests.chaos.case import case
from tests.chaos.fixture import Fixture
from tests.chaos.launchers.faults import Rule
from tests.chaos.load import submit_both
from tests.chaos.work import Work


def _killed(name: str, rule: Rule, about: str) -> None:
    def act(fixture: Fixture) -> None:
        fixture.start(control=[rule])
        submit_both(fixture, 8)

    act.__doc__ = about
    case(name, within_s=120)(act)


_killed(
    "dispatcher-killed-before-commit",
    Rule("admit", "after", times=3),
    "The dispatcher dies between writing its decision and the commit, three times: the decision never was.",
)
_killed(
    "dispatcher-killed-after-commit",
    Rule("admit", "commit", times=3),
    "The dispatcher dies between the commit of its decision and the launching and publishing, three times.",
)
_killed(
    "dispatcher-killed-after-publish",
    Rule("publish", "after", times=3),
    "The dispatcher dies between publishing and noting that it has, three times: hints come twice.",
)
_killed(
    "dispatcher-killed-after-launch",
    Rule("launch", "after", times=2),
    "The dispatcher dies between launching instances and noting their handles, twice.",
)


@case("two-reconcilers-no-lock")
def two_without_lock(fixture: Fixture) -> None:
    """Two control workers whose leadership lock always says yes, while workers are killed: even two that decide at
    once decide once."""
    both = [Rule("lead", "before", do="yes")]
    kills = [Rule("phase", "after", phase="agent_ended", number=1, chance=0.5)]
    fixture.start("launcher", "control", "control-2", led=False, launcher=kills, control=both, control_2=both)
    submit_both(fixture)


@case("leader-paused-past-its-term", within_s=120)
def leader_paused(fixture: Fixture) -> None:
    """SIGSTOP to the deciding control worker, its session is ended and another takes over; then SIGCONT: the first
    one's late writes change nothing."""
    fixture.start("launcher", "control", "control-2")
    submit_both(fixture)
    fixture.acting(2)
    for name in ("control", "control-2"):
        fixture.struck(f"SIGSTOP {name}")
        fixture.programs.signal(name, signal.SIGSTOP)
        fixture.servers.end_sessions(fixture.database_name, 1.0)
        time.sleep(5)
        fixture.programs.signal(name, signal.SIGCONT)
        time.sleep(1)


@case("leader-paused-in-mid-decision", within_s=120)
def leader_paused_in_mid_decision(fixture: Fixture) -> None:
    """The dispatcher stops itself between its decision's commit and what follows from it; another takes over; it is
    woken and goes on where it was."""
    plan = [Rule("admit", "commit", do="stop", times=2)]
    fixture.start("launcher", "control", "control-2", control=plan, control_2=plan)
    submit_both(fixture, 8)
    for _ in range(2):
        time.sleep(6)
        for name in ("control", "control-2"):
            fixture.programs.signal(name, signal.SIGCONT)


@case("rolling-restart", within_s=150)
def rolling_restart(fixture: Fixture) -> None:
    """A deploy under load: control workers and launcher are restarted in good order, one after the other, twice. An
    interruption uses up no retry: tasks of one attempt's patience end graded."""
    fixture.start("launcher", "control", "control-2")
    submit_both(fixture, work=Work(seconds=2.0, max_attempts=1))
    fixture.acting(2)
    for name in ("control", "launcher", "control-2") * 2:
        fixture.struck(f"restart of {name}")
        fixture.programs.restart(name)
        time.sleep(2)


@case("submitted-while-all-is-down", within_s=60)
def submitted_while_down(fixture: Fixture) -> None:
    """Everything of ours is killed at once while tasks wait and run, more are accepted, and everything comes back."""
    fixture.start()
    submit_both(fixture, 4)
    fixture.acting(1)
    fixture.struck("all killed")
    for name in ("control", "launcher"):
        fixture.programs.kill(name, kept=False)
    fixture.submit(6, mode=Mode.EPHEMERAL, name="later")
    time.sleep(2)
    fixture.programs.start("launcher")
    fixture.programs.start("control")
