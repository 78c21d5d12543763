"""What a producer asks for, checked as far as it can be without a worker, for the API, the CLI and schedules alike."""

from __future__ import annotations

from collections.abc import Iterable

from app.agents import catalogue
from app.errors import SpecInvalid
from app.models.spec import AgentTask, Mode, ModelChoice, TaskSpec


def specs_for(
    tasks: Iterable[AgentTask],
    *,
    agent: str,
    mode: Mode | str,
    model: ModelChoice | str | None,
    resource_class: str = "standard",
) -> list[TaskSpec]:
    """The tasks with who does them and how.

    Raises: SpecInvalid, UnknownName: none of them is used.
    """
    traits = catalogue.traits(agent)
    chosen = ModelChoice(name=model) if isinstance(model, str) else model
    if traits.needs_model and chosen is None:
        raise SpecInvalid(f"agent {agent!r} needs a model; expected its name, or 'replay' for the replay engine")
    try:
        wanted = Mode(mode)
    except ValueError:
        raise SpecInvalid(f"unknown mode {mode!r}; known: {', '.join(Mode)}") from None
    return [_spec(task, agent, wanted, chosen, traits, resource_class) for task in tasks]


def _spec(
    task: AgentTask,
    agent: str,
    mode: Mode,
    model: ModelChoice | None,
    traits: catalogue.Traits,
    resource_class: str,
) -> TaskSpec:
    if traits.needs_solution and task.solution is None:
        raise SpecInvalid(f"agent {agent!r} replays gold solutions; task {task.name!r} has none")
    return TaskSpec(
        task=task,
        agent=agent,
        model=model if traits.needs_model else None,
        mode=mode,
        resource_class=resource_class,
    )
