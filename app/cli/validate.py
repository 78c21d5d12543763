"""Implements `megaflow dataset validate`: finds tasks that cannot count, and images with the answer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from app.agents.attacks import ATTACKS
from app.cli.progress import follow, submit_all
from app.cli.show import Json, as_json, console, say
from app.cli.submission_options import SubmissionOptions, takes
from app.cli.tables import Table
from app.client import MegaFlow, Run
from app.errors import MegaFlowError, OptionInvalid, UnknownName
from app.evaluation import Submission, specs_of
from app.evaluation.validation import CHEAT, ValidationTrial, candidate, judged, leaking
from app.ledger import validations
from app.ledger.validations import TaskIdentity
from app.models.outcome import TaskResult
from app.models.spec import IMAGELESS, AgentTask, EnvironmentKind
from app.models.validation import Validation, ValidationState
from app.texts import short_id

if TYPE_CHECKING:
    from app.evaluation.leaks import LeakFinding

_NOT_VALID = 1
"""Exit code if a task is not valid, or an image holds the gold solution."""
_LEAK_SCAN_S = 900.0
_EACH = "each"
"""Selects every attack, each in separate attempts."""
_FOR_SCAN = {"agent": "nop", "agent_args": {}, "replicas": 1}
"""Changes to the submission for the leak scan: the simplest agent's tasks, once."""

Named = Annotated[str, typer.Argument(metavar="DATASET", help="NAME[@REVISION], NAME=PATH, a path, or `demo`.")]
_CHOOSING = ("limit", "only", "exclude", "languages", "repositories", "sample", "sample_seed")
"""Options that select entries."""


@takes(*_CHOOSING, "environment", "mode", "max_running", "user_name", agent="oracle")
def validate(
    name: Named,
    *,
    options: SubmissionOptions,
    times: Annotated[int, typer.Option(min=1, max=100, help="How often each agent runs each task.")] = 3,
    attack: Annotated[
        list[str] | None,
        typer.Option(help="Attack of `cheat`, or `each`, in separate attempts; default: all in one, none on `local`."),
    ] = None,
    leak_scan: Annotated[
        bool, typer.Option("--leak-scan/--no-leak-scan", help="Search the images for the answer.")
    ] = True,
    json: Json = False,
) -> None:
    """Find out which tasks count: oracle gets 1, nop 0, and attacks on the grading 0, each several times.

    Other tasks are quarantined with the reason, and `megaflow submit` refuses them. Exit code 1: a task is not valid.
    """
    options.replicas = times
    submission = options.submission([name], name="")
    with MegaFlow() as flow:
        outcomes, runs = validated(flow, submission, attacks=attack, leak_scan=leak_scan)
    _print_validations(outcomes, runs, json=json)
    if any(one.state is not ValidationState.VALID for one in outcomes):
        raise typer.Exit(_NOT_VALID)


def validated(
    flow: MegaFlow, asked: Submission, *, attacks: Sequence[str] | None = None, leak_scan: bool = True
) -> tuple[list[Validation], list[Run]]:
    """Runs oracle, nop and cheat `asked.replicas` times each; records and returns the validations, with the runs."""
    plan = _plan(attacks, asked.environment)
    runs = submit_all(flow, [_run_of(asked, agents, arguments) for agents, arguments in plan])
    outcomes = _validated(flow, runs, plan, asked.replicas)
    if leak_scan and asked.environment not in IMAGELESS:
        outcomes = _with_leaks(flow, outcomes, asked.model_copy(update=_FOR_SCAN))
    validations.record(flow.database, outcomes)
    return outcomes, runs


def _run_of(asked: Submission, agents: str, arguments: dict[str, str]) -> Submission:
    dataset = asked.dataset.rpartition("/")[2].partition("=")[0]
    name = "-".join(["validate", dataset, *arguments.values()])[:200]
    return asked.model_copy(update={"agent": agents, "agent_args": arguments, "name": name})


def _plan(attacks: Sequence[str] | None, kind: EnvironmentKind) -> list[tuple[str, dict[str, str]]]:
    """Returns the runs to submit: their agents and agent arguments.

    Raises: SpecInvalid: an attack without isolation; UnknownName: no such attack.
    """
    if kind in IMAGELESS:
        if attacks:
            raise OptionInvalid(
                f"expected a container for attacks, found --environment {kind.value}; leave --attack out"
            )
        say(f"without isolation (--environment {kind.value}) no attack is made: only oracle and nop")
        return [("oracle,nop", {})]
    attacks = list(ATTACKS) if attacks and _EACH in attacks else attacks
    for one in attacks or ():
        if one not in ATTACKS:
            raise UnknownName.of("attack", one, list(ATTACKS))
    if not attacks:
        return [(f"oracle,nop,{CHEAT}", {})]
    return [("oracle,nop", {}), *((CHEAT, {"attack": one}) for one in dict.fromkeys(attacks))]


def _validated(
    flow: MegaFlow, runs: Sequence[Run], plan: Sequence[tuple[str, dict[str, str]]], times: int
) -> list[Validation]:
    """Records the tasks as candidates at once; returns their validations when all runs have ended."""
    known: dict[UUID, TaskIdentity] = {}
    for run in runs:
        known |= validations.identities(flow.database, run.id)
    ids = [str(run.id) for run in runs]
    tasks = {one.content: one for one in known.values()}
    validations.record(flow.database, [candidate(one, ids) for one in tasks.values()])
    names = ", ".join(short_id(run.id) for run in runs)
    say(f"{len(tasks)} tasks, {sum(len(run.handles) for run in runs)} attempts in {names}")
    attack_of = {run.id: arguments.get("attack", "") for run, (_, arguments) in zip(runs, plan, strict=True)}
    trials: dict[str, list[ValidationTrial]] = defaultdict(list)
    for result in follow(flow, list(runs)):
        trials[known[result.task_id].content].append(ValidationTrial(_label(result, attack_of[result.run_id]), result))
    agents = [
        f"{agent} {arguments.get('attack', '')}".strip() for names, arguments in plan for agent in names.split(",")
    ]
    return [
        one
        for content, task_trials in trials.items()
        for one in judged(tasks[content], task_trials, times=times, agents=agents, runs=ids)
    ]


def _label(result: TaskResult, attack: str) -> str:
    return f"{result.agent} {attack}".strip() if result.agent == CHEAT else result.agent


@contextmanager
def _scanning(flow: MegaFlow) -> Iterator[Callable[[AgentTask], list[LeakFinding]]]:
    """Yields a function that scans a task's image in a new environment on this host. Raises: as `standing`."""
    from app.artifacts.bundles import fetch_bundle
    from app.cli.orderly import ending_in_order
    from app.cli.shell import standing
    from app.evaluation.leaks import needles_of, scan
    from app.models.spec import ScriptGoal, ScriptSolution

    store = flow.store

    def scanned(task: AgentTask) -> list[LeakFinding]:
        solution = fetch_bundle(store, task.solution.files) if isinstance(task.solution, ScriptSolution) else None
        tests = fetch_bundle(store, task.goal.tests) if isinstance(task.goal, ScriptGoal) else None
        needles = needles_of(task, solution, tests)
        with standing(task, lambda bundle: fetch_bundle(store, bundle), flow.settings, _LEAK_SCAN_S) as environment:
            return scan(environment, needles)

    with ending_in_order():
        yield scanned


def _with_leaks(flow: MegaFlow, found: Sequence[Validation], asked: Submission) -> list[Validation]:
    """Adds leaks to the validations. If this host cannot make an environment, a finding records that."""
    tasks = {spec.task.name: spec.task for spec in specs_of(asked, flow.settings, flow.database)}
    scanned_tasks: list[Validation] = []
    with _scanning(flow) as scanned:
        for one in found:
            if one.state is ValidationState.CANDIDATE or not one.image_id:
                scanned_tasks.append(one)
                continue
            try:
                findings = scanned(tasks[one.task])
            except MegaFlowError as error:
                unknown = f"unknown: this host: not scanned: {' '.join(str(error).split())[:200]}"
                scanned_tasks.append(leaking(one, [unknown], gold=False))
                continue
            gold = any(finding.kind == "gold" for finding in findings)
            scanned_tasks.append(leaking(one, [str(finding) for finding in findings], gold=gold))
    return scanned_tasks


def _print_validations(found: Sequence[Validation], runs: Sequence[Run], *, json: bool) -> None:
    counts = Counter(one.state.value for one in found)
    if json:
        described: dict[str, Any] = {"runs": [run.id for run in runs], "states": counts, "tasks": found}
        as_json(described)
        return
    agents = list(dict.fromkeys(agent for one in found for agent in one.rewards))
    table = Table("task", "state", *agents, "image", "reason", right=agents, keys=2)
    for one in sorted(found, key=lambda one: (one.state is ValidationState.VALID, one.task)):
        rewards = [" ".join("-" if r is None else f"{r:g}" for r in one.rewards.get(agent, ())) for agent in agents]
        table.add_row(one.task, one.state.value, *rewards, one.image_id.removeprefix("sha256:")[:12], one.reason)
    console.print(table)
    for one in found:
        if one.flipped:
            console.print(f"{one.task}: flaky tests: {', '.join(one.flipped)}", soft_wrap=True)
        for finding in one.findings:
            console.print(f"{one.task}: {finding}", soft_wrap=True)
    say(", ".join(f"{count} {state}" for state, count in counts.items()) or "no tasks")
