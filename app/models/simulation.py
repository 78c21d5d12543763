"""Settings of simulated instances: how long they boot and work, how often they fail. One line of text."""

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
    """How a duration in seconds is spread. Written as a string: `lognormal:60,0.5`."""

    kind: Literal["constant", "uniform", "exponential", "lognormal", "any_of"]
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Distribution:
        """Raises: ValueError: no known form, or numbers that no duration can have."""
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
        """One duration, in seconds."""
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
    """Simulated instances' behaviour. Every `Chance` is between 0 and 1."""

    seed: int = 0  # of every random number: the same times and faults are drawn again, in the order of requests
    boot_s: Seconds = _constant(0.0)  # from the launch until its worker listens
    run_s: Seconds = _constant(1.0)
    """From the claim until the attempt is graded and stored; with a download or a start, the agent's time alone."""
    pull_s: Seconds = _constant(0.0)  # its image's download, alone on its instance's link, which attempts share
    registry_links: float = Field(default=0.0, ge=0)  # at full speed, all that the registry serves; 0: any number
    together: int = Field(default=0, ge=0)  # downloads begin when so many wait: time is scaled, claims are not
    cached: Chance = 0.0  # attempts whose image is there: neither download nor unpacking
    unpack_s: Seconds = _constant(0.0)  # from the download's end to the image
    start_s: Seconds = _constant(0.0)  # from the image to the environment
    grade_s: Seconds = _constant(0.0)  # from the agent's end to the outcome, where one of these is given
    solved: Chance = 0.5  # graded attempts that get reward 1; the others get 0
    model_calls: tuple[str, ...] = ()  # keys in the artifact store: a graded attempt has one of them as its calls

    # --- What may become of an attempt: at most one of these ------------------------------------------------------
    crash: Chance = 0.0
    """Its instance dies in the middle, with everything on it; the provider sees it and says so."""
    vanish: Chance = 0.0
    """Its instance is gone in the middle without a report: only the lease, or the provider's list, tells."""
    freeze: Chance = 0.0
    """Its instance stands still for `freeze_s`, unrenewed but listed, then goes on as if nothing had been."""
    infrastructure: Chance = 0.0
    """Its environment breaks."""
    interrupted: Chance = 0.0
    """Its instance is told to stop (spot, deploy) and gives everything back."""
    hang: Chance = 0.0
    """It renews its lease for ever and never ends: only its deadline does."""
    poison: str = ""
    """A task whose name begins so crashes every instance that takes it; empty: none does."""
    freeze_s: Seconds = _constant(60.0)

    # --- What may become of an instance before it works -----------------------------------------------------------
    boot_failure: Chance = 0.0
    """It dies when it should have become ready."""
    never_registers: Chance = 0.0
    """It boots for ever."""

    # --- What the provider may do ---------------------------------------------------------------------------------
    launch_s: Seconds = _constant(0.0)
    """How long the provider takes to answer a launch. Past the client's patience, the reply is lost."""
    launch_throttled: Chance = 0.0
    """One of the instances asked for is not made."""
    no_capacity: Chance = 0.0
    """A launch is refused as a whole."""
    reply_lost: Chance = 0.0
    """The instances are made, and the connection breaks before the answer."""
    terminate_fails: Chance = 0.0
    """An instance that is to be ended is not."""

    @model_validator(mode="after")
    def _one_fate(self) -> Simulation:
        for names in (FATES, ("boot_failure", "never_registers")):
            chances = [getattr(self, name) for name in names]
            if sum(chances) > 1.0 + 1e-9:
                raise ValueError(f"expected at most 1 as the sum of {', '.join(names)}; found {sum(chances):g}")
        return self

    @classmethod
    def of(cls, **values: Any) -> Simulation:
        """Raises: SpecInvalid: a chance or a distribution that is none, or an unknown name."""
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
