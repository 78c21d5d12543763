"""Simulated instances and attempts as data, and the random model of their faults and times."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

from app.ledger.attempts import Claim
from app.models.instance import InstanceMode, InstanceRequest
from app.models.outcome import Phase, Verdict
from app.models.simulation import FATES, Distribution, Simulation

StepKind = Literal["phase", "end", "crash", "vanish", "freeze", "infrastructure", "interrupted", "hang"]


@dataclass(slots=True)
class Step:
    """One thing that happens to an attempt, at `at` (monotonic seconds)."""

    at: float
    kind: StepKind
    phase: Phase | None = None


@dataclass(slots=True, eq=False)
class Attempt:
    """What an instance has in hand."""

    claimed: Claim
    instance: Instance
    course: list[Step]  # what will happen, the next last
    model_calls: str | None = None  # key of the artifact that it leaves when it is graded
    begun: float = 0.0  # monotonic seconds
    plan_s: dict[str, float] = field(default_factory=dict)  # from then to each phase and the end, as drawn
    over: bool = False  # its end is on the way to the ledger, or it is not ours any more


@dataclass(slots=True, eq=False)
class Instance:
    """A simulated instance. `free` slots are open, `offered` ones wait for a claim's answer."""

    request: InstanceRequest
    handle: str
    ends_at: float  # monotonic seconds: killed then, whatever it does
    free: int = 0
    offered: int = 0
    attempts: set[Attempt] = field(default_factory=set)
    missed: list[Attempt] = field(default_factory=list)  # whose next step fell due while it stood still
    draining: bool = False
    interrupted: bool = False
    frozen: bool = False
    gone: bool = False

    @property
    def id(self) -> UUID:
        return self.request.instance_id

    @property
    def ephemeral(self) -> bool:
        return self.request.mode is InstanceMode.EPHEMERAL


_PHASES = (
    (Phase.IMAGE_READY, 0.02),
    (Phase.ENVIRONMENT_READY, 0.05),
    (Phase.AGENT_STARTED, 0.06),
    (Phase.AGENT_ENDED, 0.90),
)
"""Doors on the way, and after which share of the attempt's time each is passed."""
_LAST = (Phase.GRADED, Phase.STORED)
"""Doors at the end: in a real attempt, too, they are moments apart from it."""


class RandomModel:
    """A die per question, so that another answer to one does not change the others."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._random_model: dict[str, random.Random] = {}

    def follow(self, simulation: Simulation) -> None:
        """From here on, what `simulation` says."""
        self.simulation, self._random_model = simulation, {}

    def _die(self, question: str) -> random.Random:
        if question not in self._random_model:
            self._random_model[question] = random.Random(f"{self.simulation.seed}/{question}")
        return self._random_model[question]

    def strikes(self, chance: str) -> bool:
        """Whether the fault of that name happens now."""
        odds: float = getattr(self.simulation, chance)
        return odds > 0 and self._die(chance).random() < odds

    def draw(self, duration: str) -> float:
        """The next of the durations of that name, in seconds."""
        spread: Distribution = getattr(self.simulation, duration)
        return spread.draw(self._die(duration))

    def birth(self) -> str | None:
        """What goes wrong with an instance before it works, if anything."""
        return self._one_of(("boot_failure", "never_registers"), "birth")

    def verdict(self) -> Verdict:
        solved = self._die("solved").random() < self.simulation.solved
        return Verdict(reward=1.0 if solved else 0.0, counts=True, detail="simulated")

    def model_calls(self) -> str | None:
        """Key of the calls that an attempt which begins now leaves, if any."""
        known = self.simulation.model_calls
        return self._die("model_calls").choice(known) if known else None

    def pull_s(self) -> float:
        """Seconds of a whole link that an attempt's image takes, unpacked afterwards; 0: it is there."""
        return 0.0 if self.strikes("cached") else self.draw("pull_s")

    def course(self, claimed: Claim, now: float, *, pulled: bool = False) -> list[Step]:
        """All that will happen to an attempt, the next last. One that hangs has no end. `pulled`: to be unpacked."""
        phases, run_s = self._phases(pulled)
        fate = self._one_of(FATES, "fate")
        if self.simulation.poison and claimed.spec.task.name.startswith(self.simulation.poison):
            fate = "crash"
        steps = [Step(now + after_s, "phase", phase) for phase, after_s in phases]
        if fate is not None:
            strikes_at = now + run_s * self._die("moment").random()
            steps.append(Step(strikes_at, fate))
        if fate in (None, "freeze"):
            steps += [Step(now + run_s, "phase", phase) for phase in _LAST]
            steps.append(Step(now + run_s, "end"))
        steps.reverse()  # what happens at one time stays in its order
        steps.sort(key=lambda step: step.at, reverse=True)
        return steps

    def _phases(self, pulled: bool) -> tuple[list[tuple[Phase, float]], float]:
        """The phases until the agent's end with their seconds, and the seconds of everything."""
        told = self.simulation
        run_s = self.draw("run_s")
        stages = (told.pull_s, told.unpack_s, told.start_s, told.grade_s)
        if not any(one.mean_s for one in stages):  # shares of `run_s`, then
            return [(phase, run_s * share) for phase, share in _PHASES], run_s
        image_s = self.draw("unpack_s") if pulled else 0.0
        ready_s = image_s + self.draw("start_s")
        times = (image_s, ready_s, ready_s, ready_s + run_s)
        end_s = ready_s + run_s + self.draw("grade_s")
        return [(phase, at) for (phase, _), at in zip(_PHASES, times, strict=True)], end_s

    def _one_of(self, names: tuple[str, ...], question: str) -> StepKind | None:
        """At most one of the named chances."""
        left = self._die(question).random()
        for name in names:
            left -= getattr(self.simulation, name)
            if left < 0:
                return name  # type: ignore[return-value]
        return None
