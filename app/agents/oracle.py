"""Defines agents that apply the gold solution, or nothing: proof that a task is solvable and that grading works.

Source: Harbor's oracle agent, which replays the gold solution.
"""

from __future__ import annotations

from app.agents.base import Agent, AgentJob, AgentReport
from app.errors import AgentFailed, RowBroken
from app.models.endings import EndReason
from app.models.shell import CancelToken, CommandResult, Shell
from app.models.spec import PatchSolution, ScriptSolution, Solution

# Strict on purpose: a gold patch that needs fuzz belongs to another commit. Without the ceiling, git would use a
# repository further up for a working folder that has none, and silently apply nothing.
_APPLY = (
    'scratch=$(mktemp -d) || exit 99; trap \'rm -rf "$scratch"\' EXIT; cat >"$scratch/patch"; '
    'printf "[safe]\\n\\tdirectory = *\\n[core]\\n\\tautocrlf = false\\n" >"$scratch/config"; '
    'export GIT_CONFIG_GLOBAL="$scratch/config" GIT_CONFIG_NOSYSTEM=1; '
    'export GIT_CEILING_DIRECTORIES="$(dirname "$(pwd -P)")"; '
    'git apply -v {how}"$scratch/patch"'
)
_NO_SOLUTION = "expected a task with a solution; found none; leave this task out, or run another agent"


class OracleAgent(Agent):
    """Applies the gold patch, or runs the gold script. Every task must give it reward 1."""

    name = "oracle"
    version = "1"
    needs_solution = True

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        if job.solution is None:
            raise AgentFailed(f"oracle on {job.task_name}: {_NO_SOLUTION}")
        if cancel.is_set():
            return AgentReport(EndReason.CANCELLED, steps=0)
        result = _carry_out(job, job.solution, shell)
        log = job.scratch / "agent.log"
        log.write_bytes(result.stdout + result.stderr)
        return _report(job, result, cancel, AgentReport(EndReason.SUBMITTED, log=log, steps=1))


class NopAgent(Agent):
    """Submits at once. Every task must give it reward 0; otherwise its tests do not test the task."""

    name = "nop"
    version = "1"

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        log = job.scratch / "agent.log"
        log.write_text("nop: did nothing\n")
        return AgentReport(EndReason.SUBMITTED, detail="did nothing", log=log, steps=0)


def _carry_out(job: AgentJob, solution: Solution, shell: Shell) -> CommandResult:
    timeout_s = job.limits.agent_timeout_s
    match solution:
        case PatchSolution():
            # git rejects a patch without its last newline, and rows lose theirs.
            patch = solution.patch.encode()
            patch = patch if patch.endswith(b"\n") else patch + b"\n"
            how = "-R " if solution.reverse else ""
            return shell.run(_APPLY.replace("{how}", how), cwd=job.workdir, timeout_s=timeout_s, stdin=patch)
        case ScriptSolution():
            if job.solution_files is None:
                raise AgentFailed(f"oracle on {job.task_name}: {_NO_SOLUTION}")
            shell.put_tree(job.solution_files, solution.path)
            return shell.run(solution.command, cwd=job.workdir, timeout_s=timeout_s)


def _report(job: AgentJob, result: CommandResult, cancel: CancelToken, done: AgentReport) -> AgentReport:
    if result.ok:
        return done
    words = result.text().strip()[-800:]
    if cancel.is_set():
        return AgentReport(EndReason.CANCELLED, log=done.log, steps=done.steps)
    if result.timed_out:
        detail = f"the solution did not end within {job.limits.agent_timeout_s:g} s: {words}"
        return AgentReport(EndReason.AGENT_TIMEOUT, detail=detail, log=done.log, steps=done.steps)
    if isinstance(job.solution, PatchSolution):
        raise RowBroken(
            f"{job.task_name}: expected its gold patch to apply to the image's repository; it does not: {words};"
            " the row or its image is broken, leave it out"
        )
    detail = f"the solution failed with exit code {result.exit_code}: {words}"
    return AgentReport(EndReason.AGENT_ERROR, detail=detail, log=done.log, steps=done.steps)
