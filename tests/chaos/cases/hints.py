"""Hints doubled, late, lost, in another order. The broker may do all of it; so does the launcher here."""

from __future__ import annotations

from app.models.spec import Mode
from tests.chaos.case import case
from tests.chaos.fixture import Fixture
from tests.chaos.launchers.faults import Rule
from tests.chaos.work import Work


def _hints(name: str, about: str, *rules: Rule) -> None:
    def act(fixture: Fixture) -> None:
        fixture.start(control=list(rules))
        for round_ in range(3):
            fixture.submit(5, mode=Mode.EPHEMERAL, work=Work(seconds=0.5), name=f"e{round_}", exclusive=True)
            fixture.submit(5, mode=Mode.PERSISTENT, work=Work(seconds=0.5), name=f"p{round_}", exclusive=True)

    act.__doc__ = about
    case(name, within_s=120)(act)


_hints("hints-lost", "Half of all batches of hints never reach the broker.", Rule("publish", do="lose", chance=0.5))
_hints(
    "hints-reordered",
    "Hints come in another order, some twice, some late.",
    Rule("publish", do="shuffle", chance=0.5),
    Rule("publish", do="late", seconds=3.0, chance=0.5),
    Rule("publish", do="double", chance=0.5),
)
