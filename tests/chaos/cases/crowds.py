"""Many at once, on simulated instances where real ones would be too many: storms, crowds, and bad providers."""

from __future__ import annotations

import signal
import time

from app.models.spec import Mode
from tests.chaos.case import case
from tests.chaos.fixture import GRADED, Batch, Fixture
from tests.chaos.work import Work

_SIMULATED = {
    "ephemeral_provider": "simulated",
    "persistent_provider": "simulated",
    "boot_timeout_s": 4.0,
    "ephemeral_capacity": 60,
    "persistent_slots": 20,
    "ephemeral_idle_s": 4.0,
}
_PATIENT = Work(max_attempts=20)


@case(
    "fifty-thousand-beside-ten",
    settings=_SIMULATED | {"ephemeral_capacity": 200, "lease_s": 20.0, "sweep_s": 5.0, "republish_s": 20.0},
    within_s=600,
    least_faults=0,
)
def fifty_thousand_beside_ten(fixture: Fixture) -> None:
    """A user with 50,000 tasks, then another with ten: the ten do not wait behind the fifty thousand. The giant is
    cancelled when they have ended, which must be one, quick thing too."""
    fixture.watch.every_s = 2.0
    fixture.simulate(run_s="constant:1")
    ends = GRADED | {("cancelled", "cancelled")}
    giant = fixture.submit(50_000, mode=Mode.EPHEMERAL, name="giant", user_name="giant", allowed=ends)
    time.sleep(5)
    begun = time.monotonic()
    small = fixture.submit(10, mode=Mode.EPHEMERAL, name="small", user_name="small")
    took_s = _until_ended(fixture, small, 60) - begun
    done = fixture.rows("SELECT count(*) FROM tasks WHERE user_name = 'giant' AND state = 'succeeded'")[0][0]
    fixture.notes.append(f"the ten had ended after {took_s:.1f} s; {done} of the fifty thousand had by then")
    if done > 25_000:
        fixture.wrong.append("the small user waited behind the giant")
    _cancel_all(fixture, giant)


@case("wave-with-every-fate", settings=_SIMULATED | {"ephemeral_capacity": 200}, within_s=300, least_faults=100)
def wave_with_every_fate(fixture: Fixture) -> None:
    """Two thousand attempts of both modes of which many crash, vanish without a word, stand still past their lease,
    break or are interrupted."""
    fates = {"crash": 0.05, "vanish": 0.05, "freeze": 0.05, "infrastructure": 0.1, "interrupted": 0.05}
    fixture.simulate(run_s="uniform:0.2,1.5", freeze_s="constant:7", **fates)
    fixture.submit(1000, mode=Mode.EPHEMERAL, work=_PATIENT, name="e")
    fixture.submit(1000, mode=Mode.PERSISTENT, work=_PATIENT, name="p")
    time.sleep(30)
    fixture.behave(run_s="uniform:0.2,1.5")


def _provider(name: str, about: str, *, least_faults: int = 3, **behaviour: float) -> None:
    def act(fixture: Fixture) -> None:
        fixture.simulate(run_s="uniform:0.1,0.5", **behaviour)
        fixture.submit(60, mode=Mode.EPHEMERAL, work=_PATIENT, name="e")
        fixture.submit(30, mode=Mode.PERSISTENT, work=_PATIENT, name="p")
        time.sleep(10)
        fixture.behave(run_s="uniform:0.1,0.5")

    act.__doc__ = about
    case(f"provider-{name}", settings=_SIMULATED, within_s=150, least_faults=least_faults)(act)


_provider("throttled", "Two of three instances asked for are not made, for ten seconds.", launch_throttled=0.66)
_provider("no-capacity", "Nine of ten launches are refused as a whole, for ten seconds.", no_capacity=0.9)
_LOST = "Instances are made and most answers are lost: none is paid for twice."
_provider("reply-lost", _LOST, least_faults=1, reply_lost=0.8)  # one launch asks for many instances
_provider("never-registers", "Half of the instances boot for ever.", never_registers=0.5)
_provider("boot-fails", "Half of the instances die when they should become ready.", boot_failure=0.5)
_provider("terminate-fails", "Most instances that are to be ended are not, at first.", terminate_fails=0.8, vanish=0.2)
_ALL = ("launch_throttled", "no_capacity", "reply_lost", "never_registers", "boot_failure", "terminate_fails", "vanish")
_provider("all-at-once", "All of it together.", **dict.fromkeys(_ALL, 0.2))  # type: ignore[arg-type]


@case("provider-host-killed", settings=_SIMULATED, within_s=120)
def provider_host_killed(fixture: Fixture) -> None:
    """The host of all instances is killed twice in the middle of a wave and comes back empty."""
    fixture.simulate(run_s="uniform:1,3")
    fixture.submit(200, mode=Mode.EPHEMERAL, work=_PATIENT, name="e")
    for _ in range(2):
        time.sleep(4)
        fixture.struck("simulation SIGKILL")
        fixture.programs.kill("simulation")


@case("wave-with-two-control-workers-killed", settings=_SIMULATED, within_s=150)
def wave_with_controls_killed(fixture: Fixture) -> None:
    """A thousand simulated attempts while two control workers are killed and stopped in turns."""
    fixture.simulate("control", "control-2", run_s="uniform:0.2,1.0")
    fixture.submit(600, mode=Mode.EPHEMERAL, work=_PATIENT, name="e")
    fixture.submit(400, mode=Mode.PERSISTENT, work=_PATIENT, name="p")
    for turn in range(6):
        time.sleep(2)
        name = ("control", "control-2")[turn % 2]
        fixture.struck(f"{name} broken")
        if turn % 3:
            fixture.programs.kill(name)
        else:
            fixture.programs.signal(name, signal.SIGSTOP)
            time.sleep(4)
            fixture.programs.signal(name, signal.SIGCONT)


def _until_ended(fixture: Fixture, batch: Batch, within_s: float) -> float:
    ended = "SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM tasks WHERE run_id = :run AND finished_at IS NULL)"
    fixture.eventually(ended, within_s, run=batch.run_id)
    return time.monotonic()


def _cancel_all(fixture: Fixture, batch: Batch) -> None:
    from app.ledger import tasks

    begun = time.monotonic()
    tasks.cancel(fixture.database, list(batch.task_ids))
    fixture.notes.append(f"cancelled the giant in {time.monotonic() - begun:.1f} s")
