"""The agent that attacks its own grading. A task that gives it a reward can be bought, and is not worth counting.

Source: the `/cheat` trials that Terminal-Bench 3 runs for each of its tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from app.agents.attacks import ATTACKS, TOGETHER, Attack, AttackKind
from app.agents.base import AgentJob, AgentReport
from app.errors import OptionInvalid
from app.models.endings import EndReason
from app.models.shell import CancelToken, CommandResult, Shell

_ATTACK_S = 60.0
_KEPT = 2000
"""Characters of what one attack printed."""


class CheatAgent:
    """Makes the attacks of `app.agents.attacks`: all that fit together, or the one that `attack` names."""

    name: ClassVar[str] = "cheat"
    version: ClassVar[str] = "3"
    needs_model: ClassVar[bool] = False
    needs_solution: ClassVar[bool] = False

    def check(self) -> None:
        """Always there."""

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        chosen, log = chosen_attacks(job.arguments.get("attack")), job.scratch / "agent.log"
        done = 0
        with log.open("w") as file:
            for attack in _in_order(chosen):
                if cancel.is_set():
                    return AgentReport(EndReason.CANCELLED, log=log, steps=done)
                file.write(_line(attack, _attacked(attack, shell, job.workdir)))
                done += 1
        return AgentReport(EndReason.SUBMITTED, detail=f"made {done} attacks", log=log, steps=done)


def chosen_attacks(name: str | None) -> tuple[Attack, ...]:
    """The attack of that name; None: all that fit together. Raises: SpecInvalid: no such attack."""
    if name is None:
        return tuple(ATTACKS[one] for one in TOGETHER)
    if name not in ATTACKS:
        raise OptionInvalid(f"agent argument 'attack': expected one of {', '.join(ATTACKS)}; found {name[:80]!r}")
    return (ATTACKS[name],)


def _in_order(attacks: Sequence[Attack]) -> Iterator[Attack]:
    """Files of the repository first: attacks on the container may leave no interpreter that works."""
    yield from sorted(attacks, key=lambda one: one.kind is AttackKind.CONTAINER)


def _attacked(attack: Attack, shell: Shell, workdir: str) -> CommandResult:
    return shell.run(attack.script, cwd=workdir, timeout_s=_ATTACK_S, stdin=b"")


def _line(attack: Attack, result: CommandResult) -> str:
    end = "no end in time" if result.timed_out else f"exit code {result.exit_code}"
    words = result.text().strip()[-_KEPT:]
    return f"{attack.name}: {end}{f': {words}' if words else ''}\n"
