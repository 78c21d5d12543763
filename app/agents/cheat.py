"""Defines the agent that attacks its own grading. If a task gives it a reward, the task's rewards prove nothing.

Source: the `/cheat` trials that Terminal-Bench 3 runs for each of its tasks.
"""

from __future__ import annotations

from app.agents.attacks import ATTACKS, TOGETHER, Attack, AttackKind
from app.agents.base import Agent, AgentJob, AgentReport
from app.errors import OptionInvalid
from app.models.endings import EndReason
from app.models.shell import CancelToken, CommandResult, Shell

_ATTACK_S = 60.0
_KEPT = 2000
"""Maximum characters of one attack's output in the log."""


class CheatAgent(Agent):
    """Runs the attacks of `app.agents.attacks`: all that work together, or the one named by `attack`."""

    name = "cheat"
    version = "3"

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        name, log, done_count = job.arguments.get("attack"), job.scratch / "agent.log", 0
        if name is not None and name not in ATTACKS:
            problem = f"expected one of {', '.join(ATTACKS)}; found {str(name)[:80]!r}"
            raise OptionInvalid(f"agent argument 'attack': {problem}")
        chosen = [ATTACKS[one] for one in (TOGETHER if name is None else (name,))]
        chosen.sort(key=lambda one: one.kind is AttackKind.CONTAINER)  # these may leave no working interpreter
        with log.open("w") as file:
            for attack in chosen:
                if cancel.is_set():
                    return AgentReport(EndReason.CANCELLED, log=log, steps=done_count)
                result = shell.run(attack.script, cwd=job.workdir, timeout_s=_ATTACK_S, stdin=b"")
                file.write(_line(attack, result))
                done_count += 1
        return AgentReport(EndReason.SUBMITTED, detail=f"made {done_count} attacks", log=log, steps=done_count)


def _line(attack: Attack, result: CommandResult) -> str:
    end = "no end in time" if result.timed_out else f"exit code {result.exit_code}"
    words = result.text().strip()[-_KEPT:]
    return f"{attack.name}: {end}{f': {words}' if words else ''}\n"
