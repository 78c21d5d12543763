"""What a case is: a function that breaks something, whose docstring says what, and what must hold all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.fixture import Fixture

Act = Callable[[Fixture], None]


@dataclass(frozen=True)
class Case:
    """`within_s`: how long the tasks may take to end after `act` has returned. `settings`: changes of this case's."""

    name: str
    about: str
    act: Act
    within_s: float = 90.0
    least_faults: int = 1
    short: bool = False  # also in `make test`
    settings: Mapping[str, Any] = field(default_factory=dict)
    relays: tuple[str, ...] = ()  # redis, postgres: reached through a relay that can go bad


REGISTRY: dict[str, Case] = {}


def case(name: str, **options: Any) -> Callable[[Act], Act]:
    """Register the function as a case. Options: the fields of `Case`."""

    def register(act: Act) -> Act:
        if name in REGISTRY:
            raise ValueError(f"two cases are called {name!r}")
        about = " ".join((act.__doc__ or "").split())
        assert about, f"case {name!r} does not say what it breaks"
        REGISTRY[name] = Case(name, about, act, **options)
        return act

    return register
