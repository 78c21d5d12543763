"""Implements `megaflow train`: runs the training loop of a file, or prints what it would do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from app.cli.progress import display, lines
from app.cli.show import Json, answer, console, errors, say
from app.client import MegaFlow
from app.errors import MegaFlowError
from app.ledger import training
from app.ledger.results import Progress
from app.ledger.training import StepFigures
from app.models.spec import REPLAY_MODEL
from app.stack.home import prepare
from app.texts import counted, short_id
from app.training.config import CLIPS, TrainConfig, TrainerKind, checked_config, read_config
from app.training.loop import FinishedStep, TrainingLoop
from app.training.steps import key_of, plan_step
from app.training.trainers import engines_of, folder_of, require_torch

_INTERRUPTED = 130
_INVALID = 65


def train(
    config: Annotated[Path, typer.Argument(help="YAML file: see docs/howto/training.md.")],
    dataset: Annotated[
        list[str] | None, typer.Option("--dataset", "-d", help="Dataset; overrides the file's; may be repeated.")
    ] = None,
    scale: Annotated[
        str | None, typer.Option(help="Rehearse with this share of the groups, e.g. 1/64, on scripted answers.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print and check the plan; run nothing.")] = False,
    json: Json = False,
) -> None:
    """Train a policy. Each step has a run, its groups, the trainer, the next version and the commit.

    Started again, it continues at the last committed step.
    """
    loop_config = read_config(config)
    given = {"scale": scale, "datasets": dataset}
    changes = {name: value for name, value in given.items() if value is not None}
    values = loop_config.model_dump(mode="json") | changes
    values["selections"] = {name: one for name, one in values["selections"].items() if name in values["datasets"]}
    loop_config = checked_config(values, str(config)).effective()
    with MegaFlow() as flow:
        if dry_run:
            problems = _tried(flow, loop_config, json=json)
            raise typer.Exit(_INVALID if problems else 0)
        prepare(flow.settings)
        try:
            with display() as show:
                view = _TrainView(loop_config, show, json=json)
                steps = TrainingLoop(flow, loop_config, view, beside=config.parent.absolute()).run()
            view.last()
        except KeyboardInterrupt:
            say("interrupted: the runs that were accepted go on; start the same command again to go on")
            raise typer.Exit(_INTERRUPTED) from None
    text = f"{loop_config.name}: {counted(len(steps), 'step')}, the last version is {steps[-1].version or 'none'}"
    answer(steps, text, json=json)


_HEAD = " step   reward   solved  stale   waste   tokens/s  attempts  version"
_ROWS = 10


class _TrainView:
    """Shows the newest steps as a table, and the current step below it; the table is not printed with `json`."""

    def __init__(self, config: TrainConfig, show: Callable[[list[str]], None], *, json: bool) -> None:
        self._config, self._show, self._json = config, show, json
        self._rows: list[str] = []
        self._begun: dict[int, float] = {}

    def progress(self, step: int, what: str, now: Progress | None, so_far: StepFigures | None = None) -> None:
        begun = self._begun.setdefault(step, time.monotonic())
        title = f"{self._config.name}, step {step} of {self._config.steps}: {what}"
        under_way = [title, *(lines(now, time.monotonic() - begun) if now else [])]
        if errors.is_terminal:
            row = [_row(step, so_far, "so far")] if so_far else []
            self._show([_HEAD, *self._rows[-_ROWS:], *row, *under_way])
        else:
            pairs = zip(_HEAD.split()[1:], _cells(so_far), strict=False) if so_far else ()
            self._show([*under_way, *([", ".join(f"{name} {cell}" for name, cell in pairs)] if so_far else [])])

    def done(self, result: FinishedStep) -> None:
        self._rows.append(_row(result.step, result.figures, result.version or "none"))
        if not errors.is_terminal and not self._json:
            console.print(self._rows[-1] if len(self._rows) > 1 else f"{_HEAD}\n{self._rows[-1]}", soft_wrap=True)

    def trouble(self, text: str) -> None:
        say(text)

    def last(self) -> None:
        """Prints the table on a terminal; elsewhere it was printed line by line."""
        if errors.is_terminal and not self._json:
            console.print("\n".join([_HEAD, *self._rows]), soft_wrap=True)


def _row(step: int, of: StepFigures, version: str) -> str:
    reward, solved, stale, waste, speed = _cells(of)
    return f"{step:>5}  {reward:>7}  {solved:>7}  {stale:>5}  {waste:>6}  {speed:>9}  {of.attempts:>8}  {version}"


def _cells(of: StepFigures) -> tuple[str, ...]:
    """Returns reward, solved, stale, waste and tokens/s."""
    reward = "-" if of.reward is None else f"{of.reward:+.3f}"
    solved = "-" if of.solved is None else f"{100 * of.solved:.0f} %"
    stale = "-" if of.staleness is None else str(of.staleness)
    speed = f"{of.tokens / of.seconds:,.0f}" if of.seconds > 0 else "-"
    return reward, solved, stale, f"{100 * of.waste:.1f} %", speed


def _tried(flow: MegaFlow, config: TrainConfig, *, json: bool) -> list[str]:
    """Prints the plan and its problems; returns the problems."""
    plan, problems = list(_plan(flow, config)), []
    for check in (_draw, _engines, _trainer, _place):
        try:
            plan.append(check(flow, config))
        except MegaFlowError as error:
            problems.append(str(error))
    output = [*plan, *(f"problem: {one}" for one in problems), f"nothing was run; {counted(len(problems), 'problem')}"]
    answer({"plan": plan, "problems": problems}, "\n".join(output), json=json)
    return problems


def _plan(flow: MegaFlow, config: TrainConfig) -> Iterator[str]:
    total = config.rollouts * config.steps
    yield (
        f"{config.name}: {counted(config.steps, 'step')} of {config.groups} groups × {config.replicas} replicas ="
        f" {config.rollouts:,} rollouts a step, {total:,} in all, seed {config.seed}"
    )
    weights = sum(config.frameworks.values())
    shares = ", ".join(f"{name} {100 * weight / weights:.0f} %" for name, weight in config.frameworks.items())
    yield f"frameworks: {shares}"
    if "swe-agent" in config.frameworks and flow.settings.swe_agent_source is None:
        yield "without a checkout here (MEGAFLOW_SWE_AGENT_SOURCE): swe-agent fails where workers have none either"
    rules = config.model_dump(include={"most_replicas", "quorum", "hedge_after", "max_staleness"}, exclude_none=True)
    yield f"groups: {', '.join(f'{name} {value}' for name, value in rules.items()) or 'complete with all replicas'}"
    limits = config.limits.model_dump(exclude_none=True) | config.sampling.model_dump(exclude_none=True)
    yield f"limits and sampling: {', '.join(f'{name} {value:,}' for name, value in limits.items()) or 'the tasks own'}"
    yield f"rewards by end: {', '.join(f'{end} {reward:g}' for end, reward in config.rewards.items()) or 'none'}"
    how = config.trainer
    if how.kind is TrainerKind.GSPO:
        low, high = CLIPS[how.preset]
        yield (
            f"trainer: gspo of {how.model}, preset {how.preset} (clip {low:g} below, {high:g} above), learning rate"
            f" {how.learning_rate:g}, minibatch {how.minibatch}, {counted(how.epochs, 'epoch')}"
        )
    else:
        yield f"trainer: {how.kind.value}"


def _draw(flow: MegaFlow, config: TrainConfig) -> str:
    plan = plan_step(config, 0, flow.settings, flow.database)
    flow.try_out(plan.run)
    mixture = ", ".join(f"{name} {count}" for name, count in plan.mixture.items())
    return f"pool: {plan.pool:,} tasks of {', '.join(config.datasets)}; the first step has groups of {mixture}"


def _engines(flow: MegaFlow, config: TrainConfig) -> str:
    if config.model.name == REPLAY_MODEL:
        return "endpoint: the replay engine; a rehearsal trains nothing"
    warnings = flow.check_model(config.model)
    replicas = [] if config.trainer.kind is TrainerKind.NONE else engines_of(config, flow.database)
    engines = "; ".join(f"{one.url} ({one.engine.value or 'not known'}, {one.state})" for one in replicas)
    return "; ".join([f"endpoint of {config.policy}: {engines or 'any'}", *warnings])


def _trainer(flow: MegaFlow, config: TrainConfig) -> str:
    if config.trainer.kind is not TrainerKind.GSPO:
        return "checkpoints: none here"
    require_torch()
    return f"checkpoints: {folder_of(config, flow.settings)}"


def _place(flow: MegaFlow, config: TrainConfig) -> str:
    """Returns the step at which a started loop would go on."""
    for step in range(config.steps):
        run_id = training.run_of(flow.database, config.user_name, key_of(config, step))
        if run_id is None or training.committed_version(flow.database, run_id) is None:
            begun = f", run {short_id(run_id)}" if run_id else ""
            return f"would go on at step {step}{begun}"
    return f"all {config.steps} steps are committed"
