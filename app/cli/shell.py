"""Implements `megaflow shell`: a terminal in a task's environment, as an attempt has it. Needs no running stack."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from app import evaluation
from app.agents import tool_folder
from app.artifacts import open_store
from app.artifacts.bundles import fetch_bundle
from app.cli import terminal
from app.cli.orderly import ending_in_order, ignore
from app.cli.show import say
from app.compose_file.plan import planned
from app.datasets.selection import Selection
from app.environments import provider_for
from app.environments.contract import Environment, Tags
from app.errors import OptionInvalid, UnknownName
from app.evaluation import Submission
from app.live_shell import COMMAND
from app.models.shell import Shell
from app.models.spec import IMAGELESS, REPLAY_MODEL, AgentTask, Bundle, EnvironmentKind, ModelChoice, Network
from app.settings import Settings, load
from app.stack.home import prepare
from app.workers.services import agent_options

Fetch = Callable[[Bundle], bytes]
_HOURS_S = 3600.0
_SWEPT_AFTER_S = 60.0
_OUT_OF_TIME = 124
"""Exit code of a timeout, the same as that of the command `timeout`."""


def shell(
    task: Annotated[str, typer.Argument(help="A task's folder or another dataset of one task, or DATASET:TASK.")],
    command: Annotated[
        str | None, typer.Option(help="Run this command and exit with its code; default: a shell in this terminal.")
    ] = None,
    service: Annotated[
        str | None, typer.Option(help="Container to use, of several; default: the one of the agent.")
    ] = None,
    agent: Annotated[str, typer.Option(help="Give the environment this agent's tools and network.")] = "nop",
    environment: Annotated[EnvironmentKind, typer.Option(help="`local` has no isolation.")] = EnvironmentKind.DOCKER,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until it ends by itself.")] = 4 * _HOURS_S,
) -> None:
    """Open a terminal in a task's environment. It is made as for an attempt, and destroyed at the end."""
    if command is None and not terminal.is_there():
        raise typer.BadParameter("expected a terminal, found input that is none; give --command")
    settings = load()
    prepare(settings)
    with ending_in_order(*terminal.ENDS):
        chosen, fetch = _read(task, agent, environment, settings)
        if service is not None:
            _check_service(chosen, fetch, service, settings)
        if command is None:
            say(f"preparing {_about(chosen)}")
        with standing(chosen, fetch, settings, timeout) as inside:
            code = _terminal(inside, service, timeout) if command is None else _ran(inside, service, command, timeout)
    raise typer.Exit(code)


def _read(asked: str, agent: str, kind: EnvironmentKind, settings: Settings) -> tuple[AgentTask, Fetch]:
    """Returns the task as it would be submitted, and what fetches the folders of its environment. Stores nothing.

    Raises: DatasetInvalid, UnknownName, SpecInvalid.
    """
    dataset, only = _parts(asked)
    with tempfile.TemporaryDirectory(prefix="megaflow-shell-") as folder:
        passing = settings.model_copy(update={"artifacts_url": f"file://{folder}"})
        submission = Submission(
            dataset=dataset,
            agent=agent,
            model=ModelChoice(name=REPLAY_MODEL),
            selection=Selection(only=only),
            environment=kind,
        )
        specs = evaluation.specs_of(submission, passing)
        if len(specs) != 1:
            names = sorted({spec.task.name for spec in specs})
            raise OptionInvalid(
                f"expected one task and one agent; found {len(specs)} in {dataset!r}: name one as {dataset}:TASK,"
                f" of {', '.join(names[:20])}"
            )
        task, store = specs[0].task, open_store(passing.artifacts())
        sources = (task.environment.build, task.environment.compose)
        contexts = {one.context.sha256: fetch_bundle(store, one.context) for one in sources if one is not None}
        return task, lambda bundle: contexts[bundle.sha256]


def _parts(asked: str) -> tuple[str, tuple[str, ...]]:
    """Splits DATASET:TASK into the dataset and the name of its task, if there is one."""
    if ":" not in asked or Path(asked).expanduser().exists():
        return asked, ()
    dataset, _, name = asked.rpartition(":")
    return dataset, (name,)


def _check_service(task: AgentTask, fetch: Fetch, service: str, settings: Settings) -> None:
    """Raises: UnknownName: the task has no such service. Makes nothing."""
    if task.environment.compose is None:
        raise UnknownName(f"task {task.name!r} has one container, and no service {service!r}; leave --service out")
    plan = planned(task.environment, fetch, settings.home / "cache" / "contexts")
    if service not in plan.project.services:
        raise UnknownName.of("service", service, list(plan.project.services))


def _about(task: AgentTask) -> str:
    """Describes the environment for the person in the shell."""
    spec = task.environment
    if spec.kind in IMAGELESS:
        return f"{task.name}: {spec.label}, no isolation"
    about = f"{task.name}: {spec.label}, network {spec.network.value}, {spec.resources.cpus:g} CPU"
    memory = f", {spec.resources.memory_bytes >> 20} MiB"
    return about + memory + ("; no model answers here" if spec.network is Network.MODEL_ONLY else "")


@contextmanager
def standing(task: AgentTask, fetch: Fetch, settings: Settings, timeout_s: float) -> Iterator[Environment]:
    """Makes an environment without an attempt. If this process is killed, the sweeper removes it at its deadline.

    Raises: StationError: it cannot be made or removed.
    """
    spec, limit_s = task.environment, task.limits.environment_timeout_s
    provider = provider_for(spec.kind, settings, fetch, tools=lambda name: tool_folder(name, agent_options(settings)))
    provider.prepare_image(spec, timeout_s=limit_s)
    deadline = time.time() + limit_s + timeout_s + _SWEPT_AFTER_S
    environment = provider.create(
        spec, Tags.without_attempt(settings.installation, uuid.uuid4(), deadline), timeout_s=limit_s
    )
    try:
        yield environment
    finally:
        ignore(*terminal.ENDS)
        environment.destroy()


def _terminal(environment: Environment, service: str | None, timeout_s: float) -> int:
    """Runs a shell on this terminal; returns its exit code. Raises: EnvironmentFailed."""
    inside: Shell = environment
    if service is not None and environment.services:
        inside = environment.service(service)
    until = time.monotonic() + timeout_s
    rows, columns = terminal.size()
    variables = {"TERM": os.environ.get("TERM", "xterm")}
    stream = inside.stream(COMMAND, env=variables, tty=True, rows=rows, columns=columns)
    try:
        code = terminal.lend(stream, until=until)
    finally:
        stream.close()
    if code is None and time.monotonic() >= until:
        say(f"its {timeout_s:g} s are over")
        return _OUT_OF_TIME
    return 1 if code is None else code


def _ran(environment: Environment, service: str | None, command: str, timeout_s: float) -> int:
    """Runs the command and copies its output to this process's; returns its exit code. Raises: EnvironmentFailed."""
    if service is not None and environment.services:
        result = environment.run_in(service, command, timeout_s=timeout_s)
    else:
        result = environment.run(command, timeout_s=timeout_s)
    for content, to in ((result.stdout, sys.stdout.buffer), (result.stderr, sys.stderr.buffer)):
        to.write(content)
        to.flush()
    if result.timed_out:
        say(f"the command did not end within {timeout_s:g} s")
    if result.truncated:
        say("of its output the middle was left out: have it write a file")
    return _OUT_OF_TIME if result.exit_code is None else result.exit_code
