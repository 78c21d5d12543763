"""Workers killed, stopped, starved, told to leave: at every step of an attempt."""

from __future__ import annotations

import os
import signal
import time

import psutil

from app.models.outcome import Phase
from app.models.spec import Mode
from tests.chaos.case import case
from tests.chaos.fixture import Fixture
from tests.chaos.launchers.faults import Rule
from tests.chaos.work import Work

_PHASES = (
    Phase.IMAGE_READY,
    Phase.ENVIRONMENT_READY,
    Phase.AGENT_STARTED,
    Phase.AGENT_ENDED,
    Phase.GRADED,
    Phase.STORED,
)
_LEASE_S = 3.0
_SLOW = Work(seconds=2.0)


def _steps() -> dict[str, Rule]:
    """A SIGKILL to the worker of every task's first attempt, by the step after which it comes."""
    first = {"number": 1, "do": "kill"}
    phases = {f"phase-{phase.value}": Rule("phase", "after", phase=phase.value, **first) for phase in _PHASES}  # type: ignore[arg-type]
    return {
        "taken": Rule("take", "before", do="kill", times=7),
        "claimed": Rule("claim", "after", **first),  # type: ignore[arg-type]
        "claim-committed": Rule("claim", "commit", **first),  # type: ignore[arg-type]
        **phases,
        "before-result": Rule("finish", "before", **first),  # type: ignore[arg-type]
        "after-result": Rule("finish", "commit", **first),  # type: ignore[arg-type]
        "before-teardown": Rule("teardown", "before", **first),  # type: ignore[arg-type]
    }


def _kill_at(step: str, rule: Rule) -> None:
    def act(fixture: Fixture) -> None:
        fixture.start("launcher", "control", launcher=[rule])
        fixture.submit(4, mode=Mode.EPHEMERAL, work=Work(seconds=0.3), name="e", exclusive=True)
        fixture.submit(3, mode=Mode.PERSISTENT, work=Work(max_attempts=15), name="p")

    act.__doc__ = f"SIGKILL to the worker at the step `{step}` of every first attempt, in both modes."
    case(f"kill-{step}", short=step == "before-result")(act)


for _step, _rule in _steps().items():
    _kill_at(_step, _rule)


@case("stopped-for-two-leases", within_s=60)
def stopped_for_two_leases(fixture: Fixture) -> None:
    """SIGSTOP to workers of both modes for two leases, then SIGCONT: the work is done elsewhere meanwhile, and what
    the woken ones still write is refused."""
    fixture.start()
    fixture.submit(3, mode=Mode.EPHEMERAL, work=_SLOW, name="e")
    fixture.submit(3, mode=Mode.PERSISTENT, work=_SLOW, name="p")
    pids = {row.pid for row in fixture.acting(4)}
    fixture.struck("SIGSTOP")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * _LEASE_S)
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)


@case("stopped-before-result", within_s=60)
def stopped_before_result(fixture: Fixture) -> None:
    """A worker stops itself right before it writes its result and is woken two leases later: the result of a lost
    attempt is refused."""
    fixture.start(launcher=[Rule("finish", "before", do="stop", number=1)])
    fixture.submit(3, mode=Mode.EPHEMERAL, name="e")
    _wake_the_stopped(fixture, 3)


def _wake_the_stopped(fixture: Fixture, count: int) -> None:
    """Wait until so many workers have stopped themselves, then two leases more, and wake them."""
    give_up = time.monotonic() + 60
    stopped: list[psutil.Process] = []
    while len(stopped) < count and time.monotonic() < give_up:
        children = psutil.Process(fixture.programs.pids["launcher"]).children()
        stopped = [child for child in children if child.status() == psutil.STATUS_STOPPED]
        time.sleep(0.1)
    time.sleep(2 * _LEASE_S)
    for child in stopped:
        child.resume()


def _leaving(name: str, about: str, *signals: signal.Signals) -> None:
    def act(fixture: Fixture) -> None:
        fixture.start()
        fixture.submit(4, mode=Mode.EPHEMERAL, work=Work(seconds=3, max_attempts=2), name="e", exclusive=True)
        fixture.submit(3, mode=Mode.PERSISTENT, work=Work(seconds=3, max_attempts=2), name="p", exclusive=True)
        pids = {row.pid for row in fixture.acting(5)}
        fixture.struck(name)
        for number in signals:
            for pid in pids:
                if psutil.pid_exists(pid):
                    os.kill(pid, number)
            time.sleep(0.3)

    act.__doc__ = about
    case(name)(act)


_leaving(
    "sigterm-twice", "SIGTERM twice, in a row, to busy workers: still nothing is lost.", signal.SIGTERM, signal.SIGTERM
)
_leaving("sigquit", "SIGQUIT, Celery's cold shutdown, to busy workers.", signal.SIGQUIT)


@case("launcher-killed", within_s=60)
def launcher_killed(fixture: Fixture) -> None:
    """SIGKILL to the launcher under load: its instances leave with it, and the tasks run again."""
    fixture.start()
    fixture.submit(5, mode=Mode.EPHEMERAL, work=_SLOW, name="e", exclusive=True)
    fixture.submit(5, mode=Mode.PERSISTENT, work=_SLOW, name="p", exclusive=True)
    for _ in range(2):
        fixture.acting(3)
        fixture.struck("launcher SIGKILL")
        fixture.programs.kill("launcher")
        time.sleep(3)


@case("starved-renewal", within_s=60)
def starved_renewal(fixture: Fixture) -> None:
    """The renewals of a while fail although the attempts go on: a worker that cannot renew stops its own work before
    its lease lapses, so that no two agents of one task act at once."""
    fixture.start(launcher=[Rule("renew", "before", do="error", times=18)])
    fixture.submit(4, mode=Mode.EPHEMERAL, work=Work(seconds=8), name="e", exclusive=True)
    fixture.submit(2, mode=Mode.PERSISTENT, work=Work(seconds=8), name="p", exclusive=True)


@case("slow-renewal", within_s=60)
def slow_renewal(fixture: Fixture) -> None:
    """Renewals hang for longer than a lease: the worker must notice without the answer."""
    fixture.start(launcher=[Rule("renew", "before", do="sleep", seconds=5.0, times=4)])
    fixture.submit(3, mode=Mode.EPHEMERAL, work=Work(seconds=7), name="e", exclusive=True)


@case("skewed-clock", within_s=60, least_faults=0)
def skewed_clock(fixture: Fixture) -> None:
    """Workers whose clock is ten minutes ahead, or behind: leases go by the database's clock alone."""
    fixture.start(launcher=[Rule("skew", seconds=600.0)])
    fixture.submit(4, mode=Mode.EPHEMERAL, work=_SLOW, name="e", exclusive=True)
    fixture.submit(4, mode=Mode.PERSISTENT, work=_SLOW, name="p", exclusive=True)


@case("poison", within_s=90)
def poison(fixture: Fixture) -> None:
    """A task that kills its worker every time: it ends as not measured after its limit, the others do not notice."""
    fixture.start(launcher=[Rule("phase", "after", phase="agent_started", task="poison")])
    lost = frozenset({("failed", "lost")})
    fixture.submit(2, mode=Mode.EPHEMERAL, work=Work(seconds=0.3, max_attempts=3), name="poison", allowed=lost)
    fixture.submit(6, mode=Mode.EPHEMERAL, work=Work(seconds=0.3, max_attempts=1), name="good", exclusive=True)


@case("poison-in-the-pool", within_s=90)
def poison_in_the_pool(fixture: Fixture) -> None:
    """The same in a standing pool, where it takes its neighbours' worker along: they end graded all the same."""
    fixture.start(launcher=[Rule("phase", "after", phase="agent_started", task="poison")])
    lost = frozenset({("failed", "lost")})
    fixture.submit(1, mode=Mode.PERSISTENT, work=Work(seconds=0.3, max_attempts=3), name="poison", allowed=lost)
    fixture.submit(8, mode=Mode.PERSISTENT, work=Work(seconds=1.0, max_attempts=4), name="good", exclusive=True)


_APART = Work(seconds=0.3, apart=True, max_attempts=1)


def _grading(step: str, *rules: Rule, short: bool = False) -> None:
    def act(fixture: Fixture) -> None:
        fixture.start("launcher", "control", launcher=rules)
        fixture.submit(3, mode=Mode.EPHEMERAL, work=_APART, name="e", exclusive=True)
        fixture.submit(3, mode=Mode.PERSISTENT, work=_APART, name="p", exclusive=True)
        if not fixture.wait(60):
            return
        again = fixture.rows("SELECT task_id FROM attempts WHERE number > 1")
        fixture.wrong += [f"task {row.task_id}: its agent ran again" for row in again]

    act.__doc__ = f"SIGKILL to graders {step}: gradings are done again, and no agent runs twice."
    case(f"kill-grader-{step.replace(' ', '-')}", short=short, settings={"grading_slots": 1})(act)


_grading("when they have claimed", Rule("claim_grading", "after", times=2), short=True)
_grading("before a claim is answered", Rule("claim_grading", "commit", times=2))
_grading("when they have graded", Rule("phase", "after", phase=Phase.GRADED.value, times=2))
