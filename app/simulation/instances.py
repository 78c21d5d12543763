"""Defines simulated instances and attempts as data, and the random model of their faults and times."""

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
    """Event of an attempt at `at` (monotonic seconds)."""

    at: float
    kind: StepKind
    phase: Phase | None = None


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt of an instance."""

    claimed: Claim
    instance: Instance
    course: list[Step]  # future steps, the next one last
    model_calls: str | None = None  # key of the artifact that it stores when graded
    begun: float = 0.0  # monotonic seconds
    plan_s: dict[str, float] = field(default_factory=dict)  # seconds from `begun` to each phase and the end, as drawn
    over: bool = False  # its end is being written, or another instance has it


@dataclass(slots=True, eq=False)
class Instance:
    """A simulated instance. `free` slots are open, `offered` slots wait for the result of a claim."""

    request: InstanceRequest
    handle: str
    ends_at: float  # monotonic seconds: deadline at which it is killed
    free: int = 0
    offered: int = 0
    attempts: set[Attempt] = field(default_factory=set)
    missed: list[Attempt] = field(default_factory=list)  # attempts whose next step was due while it was frozen
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
"""Phases during the attempt, each with the share of the attempt's time at which it is reached."""
_LAST = (Phase.GRADED, Phase.STORED)
"""Phases at the end: in a real attempt too, they come moments before the end."""


class RandomModel:
    """Separate random generators per question, so that a change of one does not change the others."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._random_model: dict[str, random.Random] = {}

    def follow(self, simulation: Simulation) -> None:
        """Uses the settings of `simulation` from now on."""
        self.simulation, self._random_model = simulation, {}

    def _die(self, question: str) -> random.Random:
        if question not in self._random_model:
            self._random_model[question] = random.Random(f"{self.simulation.seed}/{question}")
        return self._random_model[question]

    def strikes(self, chance: str) -> bool:
        """Whether the named fault happens now."""
        odds: float = getattr(self.simulation, chance)
        return odds > 0 and self._die(chance).random() < odds

    def draw(self, duration: str) -> float:
        """Draws the next of the named durations, in seconds."""
        spread: Distribution = getattr(self.simulation, duration)
        return spread.draw(self._die(duration))

    def birth(self) -> str | None:
        """Draws the fault of an instance before it works; None: no fault."""
        return self._one_of(("boot_failure", "never_registers"), "birth")

    def verdict(self) -> Verdict:
        solved = self._die("solved").random() < self.simulation.solved
        return Verdict(reward=1.0 if solved else 0.0, counts=True, detail="simulated")

    def model_calls(self) -> str | None:
        """Draws the key of the calls for a new attempt; None: no calls."""
        known = self.simulation.model_calls
        return self._die("model_calls").choice(known) if known else None

    def pull_s(self) -> float:
        """Draws the download seconds of an attempt's image on a full link, without unpacking; 0: it is present."""
        return 0.0 if self.strikes("cached") else self.draw("pull_s")

    def course(self, claimed: Claim, now: float, *, pulled: bool = False) -> list[Step]:
        """Draws all steps of an attempt, the next one last; no end if it hangs. `pulled`: image not yet unpacked."""
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
        steps.reverse()  # steps at the same time keep their order
        steps.sort(key=lambda step: step.at, reverse=True)
        return steps

    def _phases(self, pulled: bool) -> tuple[list[tuple[Phase, float]], float]:
        """Draws the phases until the agent's end with their seconds, and the total seconds."""
        settings = self.simulation
        run_s = self.draw("run_s")
        stages = (settings.pull_s, settings.unpack_s, settings.start_s, settings.grade_s)
        if not any(one.mean_s for one in stages):  # then use shares of `run_s`
            return [(phase, run_s * share) for phase, share in _PHASES], run_s
        image_s = self.draw("unpack_s") if pulled else 0.0
        ready_s = image_s + self.draw("start_s")
        times = (image_s, ready_s, ready_s, ready_s + run_s)
        end_s = ready_s + run_s + self.draw("grade_s")
        return [(phase, at) for (phase, _), at in zip(_PHASES, times, strict=True)], end_s

    def _one_of(self, names: tuple[str, ...], question: str) -> StepKind | None:
        """Draws at most one of the named chances."""
        left = self._die(question).random()
        for name in names:
            left -= getattr(self.simulation, name)
            if left < 0:
                return name  # type: ignore[return-value]
        return None
