"""Defines settings of simulated instances, a line of text: durations of boot and work, fault rates."""

from __future__ import annotations

import math
import random
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, model_validator

from app.errors import SpecInvalid
from app.models.spec import Wire

_FORMS = "constant:5, uniform:1,10, exponential:30 (mean), lognormal:60,0.5 (median, sigma) or any_of:30,45,600"
_NUMBERS = {"constant": 1, "uniform": 2, "exponential": 1, "lognormal": 2}


class Distribution(Wire):
    """Distribution of a duration in seconds. Written as a string: `lognormal:60,0.5`."""

    kind: Literal["constant", "uniform", "exponential", "lognormal", "any_of"]
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Distribution:
        """Parses a text. Raises: ValueError: unknown form, or numbers that no duration can have."""
        kind, _, rest = text.strip().partition(":")
        try:
            numbers = tuple(float(part) for part in rest.split(","))
        except ValueError:
            numbers = ()
        if (_NUMBERS.get(kind) != len(numbers) and kind != "any_of") or not numbers:
            raise ValueError(f"expected a distribution of seconds like {_FORMS}; found {text!r}")
        _check(kind, numbers, text)
        return cls(kind=kind, numbers=numbers)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(f'{number:g}' for number in self.numbers)}"

    def draw(self, dice: random.Random) -> float:
        """Draws a duration in seconds."""
        first, last = self.numbers[0], self.numbers[-1]
        match self.kind:
            case "constant":
                return first
            case "uniform":
                return dice.uniform(first, last)
            case "exponential":
                return dice.expovariate(1.0 / first)
            case "lognormal":
                return dice.lognormvariate(math.log(first), last)
            case "any_of":
                return dice.choice(self.numbers)

    @property
    def mean_s(self) -> float:
        """The mean, in seconds."""
        first, last = self.numbers[0], self.numbers[-1]
        match self.kind:
            case "constant" | "exponential":
                return first
            case "uniform":
                return (first + last) / 2
            case "lognormal":
                return first * math.exp(last**2 / 2)
            case "any_of":
                return sum(self.numbers) / len(self.numbers)


def _check(kind: str, numbers: tuple[float, ...], text: str) -> None:
    first, last = numbers[0], numbers[-1]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError(f"expected finite seconds >= 0 in {text!r}; try {_FORMS}")
    if kind == "uniform" and first > last:
        raise ValueError(f"expected the smaller bound first, found {text!r}; try uniform:{last:g},{first:g}")
    if kind in ("exponential", "lognormal") and first == 0:
        raise ValueError(f"expected a {kind} above 0 s, found {text!r}; try constant:0")


def _from_text(value: Any) -> Any:
    return Distribution.parse(value) if isinstance(value, str) else value


Seconds = Annotated[Distribution, BeforeValidator(_from_text), PlainSerializer(str)]
Chance = Annotated[float, Field(ge=0.0, le=1.0)]


def _constant(seconds: float) -> Distribution:
    return Distribution(kind="constant", numbers=(seconds,))


class Simulation(Wire):
    """Behaviour of simulated instances. Every `Chance` is between 0 and 1."""

    seed: int = 0  # of all random numbers: the same seed gives the same times and faults, in the order of requests
    boot_s: Seconds = _constant(0.0)  # from the launch until its worker accepts messages
    run_s: Seconds = _constant(1.0)
    """Time from the claim until the attempt is graded and stored; if a download or start is set, only the agent's."""
    pull_s: Seconds = _constant(0.0)  # image download, alone on the instance's link; attempts share the link
    registry_links: float = Field(default=0.0, ge=0)  # links that the registry serves at full speed; 0: unlimited
    together: int = Field(default=0, ge=0)  # the first downloads wait for this many: claims are not time-scaled
    cached: Chance = 0.0  # attempts whose image is present: no download, no unpacking
    unpack_s: Seconds = _constant(0.0)  # from the download's end to the image
    start_s: Seconds = _constant(0.0)  # from the image to the environment
    grade_s: Seconds = _constant(0.0)  # from the agent's end to the outcome, if one of these times is set
    solved: Chance = 0.5  # graded attempts that get reward 1; the others get 0
    model_calls: tuple[str, ...] = ()  # keys in the artifact store: each graded attempt gets one as its calls

    # Fates of an attempt, at most one:
    crash: Chance = 0.0
    """The instance dies during the attempt, with everything on it; the provider reports it."""
    vanish: Chance = 0.0
    """The instance disappears during the attempt without a report: only the lease or the provider's list shows it."""
    freeze: Chance = 0.0
    """The instance stops for `freeze_s`, without lease renewal but still listed, then continues normally."""
    infrastructure: Chance = 0.0
    """The attempt's environment fails."""
    interrupted: Chance = 0.0
    """The instance must stop (spot, deployment) and gives all its work back."""
    hang: Chance = 0.0
    """The attempt renews its lease forever and never ends; only its deadline ends it."""
    poison: str = ""
    """Prefix of task names that crash every instance that takes them; empty: none."""
    freeze_s: Seconds = _constant(60.0)

    # Fates of an instance before it works:
    boot_failure: Chance = 0.0
    """The instance dies when it should become ready."""
    never_registers: Chance = 0.0
    """The instance never finishes booting."""

    # Faults of the provider:
    launch_s: Seconds = _constant(0.0)
    """Response time of a launch. If it exceeds the client's patience, the reply is lost."""
    launch_throttled: Chance = 0.0
    """A single requested instance is not created."""
    no_capacity: Chance = 0.0
    """A launch is refused as a whole."""
    reply_lost: Chance = 0.0
    """The instances are created, but the connection breaks before the reply."""
    terminate_fails: Chance = 0.0
    """An instance is not terminated when requested."""

    @model_validator(mode="after")
    def _one_fate(self) -> Simulation:
        for names in (FATES, ("boot_failure", "never_registers")):
            chances = [getattr(self, name) for name in names]
            if sum(chances) > 1.0 + 1e-9:
                raise ValueError(f"expected at most 1 as the sum of {', '.join(names)}; found {sum(chances):g}")
        return self

    @classmethod
    def of(cls, **values: Any) -> Simulation:
        """Builds the settings. Raises: SpecInvalid: an invalid chance or distribution, or an unknown name."""
        try:
            return cls(**values)
        except ValidationError as error:
            faults = (
                f"{'.'.join(map(str, one['loc']))}: {one['msg']}, found {one['input']!r}" for one in error.errors()
            )
            raise SpecInvalid("; ".join(faults)) from error


FATES = ("crash", "vanish", "freeze", "infrastructure", "interrupted", "hang")
"""Names of the chances that exclude each other."""
CHANCES = (
    *FATES,
    *("boot_failure", "never_registers", "launch_throttled", "no_capacity", "reply_lost", "terminate_fails"),
)
"""Names of all faults."""
