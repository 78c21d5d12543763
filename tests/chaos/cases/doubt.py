"""Commit applied, and the client was told that it was not: on every path that writes."""

from __future__ import annotations

from contextlib import suppress

from app.errors import DatabaseUnavailable
from app.models.spec import Mode
from tests.chaos.case import case
from tests.chaos.fixture import Fixture
from tests.chaos.launchers import faults
from tests.chaos.launchers.faults import Rule
from tests.chaos.load import submit_both
from tests.chaos.work import Work

_OF_WORKERS = ("claim", "renew", "phase", "finish", "teardown", "ready")
_OF_CONTROL = ("admit", "request", "launched", "mark_published", "reclaim")
_WORK = Work(seconds=1.5)


def _in_doubt(point: str, program: str, times: int) -> None:
    def act(fixture: Fixture) -> None:
        rule = Rule(point, "commit", do="error", times=times)
        plans = {program: [rule]}
        fixture.start(launcher=plans.get("launcher", []), control=plans.get("control", []))
        submit_both(fixture, 4, _WORK)
        if point == "reclaim":
            fixture.acting(1)

    act.__doc__ = f"The commit of `{point}` is applied, and its writer is told that the connection was lost."
    case(f"doubt-{point}")(act)


for _point in _OF_WORKERS:
    _in_doubt(_point, "launcher", times=6)
for _point in _OF_CONTROL:
    _in_doubt(_point, "control", times=4)


@case("doubt-fail")
def doubt_fail(fixture: Fixture) -> None:
    """An attempt's failure is recorded and its writer told that it was not: one retry is used up, not two."""
    missing = Work(seconds=0, max_attempts=2, image="chaos/none")  # a local environment can run no image
    fixture.start(launcher=[Rule("fail", "commit", do="error", times=4)])
    allowed = frozenset({("failed", "environment_error")})
    fixture.submit(3, mode=Mode.EPHEMERAL, work=missing, name="e", allowed=allowed)
    fixture.submit(3, mode=Mode.PERSISTENT, work=missing, name="p", allowed=allowed)
    fixture.wait(60)
    for row in fixture.rows("SELECT name, attempts FROM tasks WHERE attempts <> 2"):
        fixture.wrong.append(f"{row.name} has {row.attempts} attempts; expected 2")


@case("doubt-exited")
def doubt_exited(fixture: Fixture) -> None:
    """The launcher reports an instance's end, it is recorded, and the launcher is told that it was not; at the same
    time workers are killed."""
    kill = Rule("phase", "after", phase="agent_ended", number=1)
    fixture.start(launcher=[Rule("exited", "commit", do="error", times=10), kill])
    fixture.submit(5, mode=Mode.EPHEMERAL, work=Work(seconds=0.3), name="e", exclusive=True)


@case("doubt-enqueue", short=True)
def doubt_enqueue(fixture: Fixture) -> None:
    """An enqueue with an idempotency key is applied and its producer told that it was not; it asks again, twice, and
    holds one run."""
    fixture.start()
    with faults.installed([Rule("accept", "commit", do="error", times=2)], fixture.faults_folder):
        for _ in range(2):
            with suppress(DatabaseUnavailable):
                fixture.submit(10, mode=Mode.EPHEMERAL, key="once")
        fixture.submit(10, mode=Mode.EPHEMERAL, key="once")


@case("doubt-everything", within_s=150)
def doubt_everything(fixture: Fixture) -> None:
    """One in eight commits of every write path at once, of workers, launcher and control, is applied and reported as
    failed."""
    points = [Rule(point, "commit", do="error", chance=0.12) for point in (*_OF_WORKERS, "fail", "exited", "give_back")]
    control = [Rule(point, "commit", do="error", chance=0.12) for point in (*_OF_CONTROL, "exited")]
    fixture.start(launcher=points, control=control)
    fixture.submit(30, mode=Mode.EPHEMERAL, work=Work(max_attempts=20), name="e")
    fixture.submit(30, mode=Mode.PERSISTENT, work=Work(max_attempts=20), name="p")
