"""Commands about recurring evaluations: `megaflow schedule add | list | remove`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import submission_options as options
from app.cli.later import later
from app.cli.show import as_json, console
from app.cli.tables import Table
from app.models.overrides import LimitOverrides
from app.models.spec import EnvironmentKind, Mode
from app.scheduling.calendar import Misfire, check_cron

if TYPE_CHECKING:
    from app.client import MegaFlow
    from app.ledger import schedules
else:
    MegaFlow = later("app.client", "MegaFlow")
    schedules = later("app.ledger.schedules")

schedule = typer.Typer(help="Recurring evaluations, kept in PostgreSQL and started by beat.", no_args_is_help=True)


def register(cli: typer.Typer) -> None:
    cli.add_typer(schedule, name="schedule")


@schedule.command()
def add(
    name: Annotated[str, typer.Argument(help="A name of its own.")],
    cron: Annotated[str, typer.Argument(help="Five fields, UTC, e.g. '0 3 * * *'.")],
    dataset: Annotated[str, typer.Argument(help="As for submit; read anew at every firing, by the control worker.")],
    agent: options.AgentOption,
    agent_arg: options.AgentArgOption = None,
    mode: options.ModeOption = Mode.AUTO,
    model: options.ModelOption = None,
    base_url: options.BaseUrlOption = None,
    api_key_env: options.ApiKeyEnvOption = None,
    side_model: options.SideModelOption = None,
    no_check: options.NoCheckOption = False,
    temperature: options.TemperatureOption = None,
    top_p: options.TopPOption = None,
    max_tokens: options.MaxTokensOption = None,
    seed: options.SeedOption = None,
    replicas: options.ReplicasOption = 1,
    concurrency: options.ConcurrencyOption = None,
    limit: options.LimitOption = None,
    task: options.TaskOption = None,
    exclude: options.ExcludeOption = None,
    environment: options.EnvironmentOption = EnvironmentKind.DOCKER,
    network: options.NetworkOption = None,
    allow_host: options.AllowHostOption = None,
    reuse: options.ReuseOption = None,
    setup: options.SetupOption = None,
    disk: options.DiskOption = None,
    max_steps: options.MaxStepsOption = None,
    agent_timeout: options.AgentTimeoutOption = None,
    command_timeout: options.CommandTimeoutOption = None,
    turn_tokens: options.TurnTokensOption = None,
    context_tokens: options.ContextTokensOption = None,
    task_budget: options.TaskBudgetOption = None,
    max_attempts: options.MaxAttemptsOption = None,
    user: options.UserOption = "default",
    priority: options.PriorityOption = 0,
    resource_class: options.ClassOption = "standard",
    deadline: options.DeadlineOption = None,
    budget: options.BudgetOption = None,
    misfire: Annotated[
        Misfire, typer.Option(help="Missed due times: skip them, or run the latest once.")
    ] = Misfire.SKIP,
) -> None:
    """Add a schedule. Each due time fires exactly once, however many beats run."""
    from app.workers import evaluations
    from app.workers.evaluations import Submission

    due_at = check_cron(cron, datetime.now(UTC))
    sampling = options.sampling_of(temperature, top_p, max_tokens, seed)
    chosen = options.model_of(model, base_url, api_key_env, sampling, side_model)
    submission = Submission(
        dataset=dataset,
        agent=agent,
        mode=mode,
        model=chosen,
        replicas=replicas,
        limit=limit,
        only=tuple(task or ()),
        exclude=tuple(exclude or ()),
        environment=environment,
        user_name=user,
        priority=priority,
        name=name,
        resource_class=resource_class,
        deadline_s=deadline,
        budget_usd=budget,
        max_running=concurrency,
        agent_args=options.arguments_of(agent_arg),
        overrides=options.overrides_of(network, allow_host, reuse, setup, disk),
        limits=options.limits_of(
            max_steps, agent_timeout, command_timeout, turn_tokens, context_tokens, task_budget, max_attempts
        ),
    )
    with MegaFlow() as flow:
        # What could never run is refused now.
        tasks = evaluations.trial(submission, flow.settings, flow.database, check=options.check_of(flow, no_check))
        # What nobody asked for is left out, so that an older release reads it, too.
        unsaid = {"limits"} if submission.limits == LimitOverrides() else set[str]()
        unsaid |= {name for name in ("agent_args", "max_running") if not getattr(submission, name)}
        kept = submission.model_dump(mode="json", exclude={"dataset", *unsaid})
        schedules.add(flow.database, name=name, cron=cron, dataset=dataset, submission=kept, misfire=misfire)
    console.print(f"schedule {name!r}: {len(tasks)} tasks, next at {due_at:%Y-%m-%d %H:%M} UTC")


@schedule.command(name="list")
def list_(json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List schedules with their next and last due times."""
    now = datetime.now(UTC)
    with MegaFlow() as flow:
        rows, fires = schedules.all_of(flow.database), schedules.last_fires(flow.database)
    found = [
        {
            "name": row.name,
            "cron": row.cron,
            "dataset": row.dataset,
            "agent": row.submission["agent"],
            "misfire": row.misfire,
            "next": f"{check_cron(row.cron, now):%Y-%m-%d %H:%M}",
            "last": str(fires[row.id][0]) if row.id in fires else None,
            "last_run": fires[row.id][1] if row.id in fires else None,
            "last_failure": fires[row.id][2] if row.id in fires else None,
        }
        for row in rows
    ]
    if json:
        as_json(found)
        return
    columns = ("name", "cron", "dataset", "agent", "misfire", "next", "last", "last_run", "last_failure")
    table = Table(*columns)
    for line in found:
        table.add_row(*(str(line[column] or "-") for column in columns))
    console.print(table)


@schedule.command()
def remove(name: Annotated[str, typer.Argument()]) -> None:
    """Remove a schedule. Its runs stay."""
    with MegaFlow() as flow:
        schedules.remove(flow.database, name)
    console.print(f"schedule {name!r} removed")
