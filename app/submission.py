"""What a producer asks for, checked as far as it can be without a worker, for the API, the CLI and schedules alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from app.agents import catalogue
from app.agents.recorded import recorded_run
from app.errors import LimitInvalid, SpecInvalid
from app.ledger.model_replicas import check_variable, plain_url
from app.models.spec import AgentTask, EnvironmentKind, Mode, ModelChoice, Network, TaskSpec


def specs_for(
    tasks: Iterable[AgentTask],
    *,
    agent: str,
    mode: Mode | str,
    model: ModelChoice | str | None,
    known: Mapping[str, catalogue.Traits],
    resource_class: str = "standard",
) -> list[TaskSpec]:
    """The tasks with who does them and how. known: the agents that there are (`app.agents.external.known_agents`).

    Raises: SpecInvalid, UnknownName: none of them is used.
    """
    traits = catalogue.traits(agent, known)
    chosen = ModelChoice(name=model) if isinstance(model, str) else model
    if chosen is not None:
        _check_model(chosen)
    if traits.needs_recording:
        recorded_run(chosen.name if chosen else "")
    if traits.needs_model and chosen is None:
        raise SpecInvalid(f"agent {agent!r} needs a model; expected its name, or 'replay' for the replay engine")
    try:
        wanted = Mode(mode)
    except ValueError:
        raise SpecInvalid(f"unknown mode {mode!r}; known: {', '.join(Mode)}") from None
    return [_spec(task, agent, wanted, chosen, traits, resource_class) for task in tasks]


def _check_model(model: ModelChoice) -> None:
    """Raises: SpecInvalid: its URL or the name of its key's variable; neither is shown, they may be secrets."""
    if model.base_url is not None:
        try:
            plain_url(model.base_url)
        except LimitInvalid:
            raise SpecInvalid(
                "model.base_url: expected a base URL such as http://engine.example.org:8000/v1, without user, password"
                " and query, found something else; a key is named by `api_key_env`"
            ) from None
    if model.api_key_env is not None:
        try:
            check_variable(model.api_key_env)
        except LimitInvalid as error:
            raise SpecInvalid(f"model.api_key_env: {error}") from None


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
        task=_with_tools(task, agent, traits.tools) if traits.tools else task,
        agent=agent,
        model=model if traits.needs_model or traits.needs_recording else None,
        mode=mode,
        resource_class=resource_class,
    )


def _with_tools(task: AgentTask, agent: str, tools: tuple[str, ...]) -> AgentTask:
    """The task with what an agent needs that acts inside: its framework, and the way to its model."""
    environment = task.environment
    if environment.kind is EnvironmentKind.MEMORY:
        raise SpecInvalid(
            f"agent {agent!r} runs inside the environment; task {task.name!r} has the kind 'memory';"
            " expected 'docker', 'oci' or 'local'"
        )
    network = Network.MODEL_ONLY if environment.network is Network.NONE else environment.network
    return task.model_copy(update={"environment": environment.model_copy(update={"tools": tools, "network": network})})
