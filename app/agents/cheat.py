"""The agent that attacks its own grading. A task that gives it a reward can be bought, and is not worth counting.

Source: the `/cheat` trials that Terminal-Bench 3 runs for each of its tasks.
"""

from __future__ import annotations

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

    name = "cheat"
    version = "3"
    needs_model = False
    needs_solution = False

    def check(self) -> None:
        """Always there."""

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        name, log, done = job.arguments.get("attack"), job.scratch / "agent.log", 0
        if name is not None and name not in ATTACKS:
            found = f"expected one of {', '.join(ATTACKS)}; found {str(name)[:80]!r}"
            raise OptionInvalid(f"agent argument 'attack': {found}")
        chosen = [ATTACKS[one] for one in (TOGETHER if name is None else (name,))]
        chosen.sort(key=lambda one: one.kind is AttackKind.CONTAINER)  # which may leave no interpreter that works
        with log.open("w") as file:
            for attack in chosen:
                if cancel.is_set():
                    return AgentReport(EndReason.CANCELLED, log=log, steps=done)
                result = shell.run(attack.script, cwd=job.workdir, timeout_s=_ATTACK_S, stdin=b"")
                file.write(_line(attack, result))
                done += 1
        return AgentReport(EndReason.SUBMITTED, detail=f"made {done} attacks", log=log, steps=done)


def _line(attack: Attack, result: CommandResult) -> str:
    end = "no end in time" if result.timed_out else f"exit code {result.exit_code}"
    words = result.text().strip()[-_KEPT:]
    return f"{attack.name}: {end}{f': {words}' if words else ''}\n"
