"""Checks a submission without a worker, for the API, the CLI and schedules."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from app.agents import catalogue
from app.agents.replay import recorded_run
from app.compose_file.file import read_project
from app.errors import ArtifactMissing, LimitInvalid, OptionInvalid, SpecInvalid, explained
from app.host import archives
from app.ledger import model_replicas, validations
from app.ledger.accept import NewRun
from app.ledger.database import Database
from app.ledger.model_replicas import ANY, ModelReplica, Registered, check_variable, plain_url
from app.models.addresses import forbidden_url
from app.models.endings import BLAME, Blame, EndReason
from app.models.engines import TRAITS
from app.models.kinds import Purpose
from app.models.overrides import EnvironmentOverrides, LimitOverrides
from app.models.spec import (
    IMAGELESS,
    NOT_SUBMITTED,
    REPLAY_MODEL,
    AgentArgs,
    AgentTask,
    Bundle,
    Compose,
    EnvironmentKind,
    Mode,
    ModelChoice,
    Network,
    Resources,
    Reuse,
    RewardRules,
    Sampling,
    ScriptGoal,
    TaskSpec,
)
from app.models.validation import VALIDATORS, content_of
from app.settings import Settings


def size_of(settings: Settings) -> Resources:
    """Returns the size of a task whose dataset states none."""
    return Resources(cpus=settings.task_cpus, memory_bytes=settings.task_memory_bytes)


def specs_for(
    tasks: Iterable[AgentTask],
    *,
    agent: str,
    mode: Mode | str,
    model: ModelChoice | str | None,
    agents: Mapping[str, catalogue.Traits],
    resource_class: str = "standard",
    overrides: EnvironmentOverrides | None = None,
    limits: LimitOverrides | None = None,
    agent_args: Mapping[str, str] | None = None,
    rewards: Mapping[str, float] | None = None,
    record_diffs: bool = False,
    size: Resources | None = None,
) -> list[TaskSpec]:
    """Returns specs of tasks, with agent, model and options. agents: all known (`app.agents.external.known_agents`).

    overrides: override what the tasks state of their environments; limits: their limits. agent_args: for the agent's
    adapter, by key. rewards: by end reason of the attempts. size: for tasks that state none.

    Raises: SpecInvalid, UnknownName: none of them is used.
    """
    traits = catalogue.traits(agent, agents)
    chosen = ModelChoice(name=model) if isinstance(model, str) else model
    if chosen is not None:
        _check_model(chosen)
    if traits.needs_recording:
        recorded_run(chosen.name if chosen else "")
    if traits.needs_model and chosen is None:
        raise OptionInvalid(
            f"agent {agent!r} needs a model, found none; expected its name, or {REPLAY_MODEL!r} for scripted answers,"
            " which are free and never scored as a model's; nothing was submitted"
        )
    try:
        run_mode = Mode(mode)
    except ValueError:
        raise OptionInvalid(f"unknown mode {mode!r}; known: {', '.join(Mode)}") from None
    environment_overrides = overrides or EnvironmentOverrides()
    if environment_overrides.network is Network.NONE and traits.tools and traits.needs_model:
        raise OptionInvalid(
            f"agent {agent!r} runs inside the environment, where it needs the way to its model; expected the network"
            " 'model-only', 'allowlist' or 'open' for it, found 'none'"
        )
    bounds, own_size = limits or LimitOverrides(), size or Resources()
    alike: dict[str, Any] = {
        "agent": agent,
        "model": chosen if traits.needs_model or traits.needs_recording else None,
        "mode": run_mode,
        "resource_class": resource_class,
        "agent_args": _arguments(agent, traits, agent_args or {}),
        "rewards": _rewards(rewards or {}),
        "record_diffs": record_diffs,
    }
    sized = (environment_overrides.sized(task, own_size) for task in tasks)
    checked = (_possible(bounds.applied_to(environment_overrides.applied_to(task)), agent, traits) for task in sized)
    return [TaskSpec(task=task, **alike) for task in checked]


def _rewards(given: Mapping[str, float]) -> dict[str, float]:
    """Returns the rewards, sorted. Raises: SpecInvalid: an end reason that is not a result, or no finite number."""
    known = [NOT_SUBMITTED, *(reason.value for reason in EndReason if BLAME[reason] is Blame.RESULT)]
    for name in given:
        if name not in known:
            raise OptionInvalid(f"rewards: expected one of {', '.join(known)}; found {name!r}; nothing was submitted")
    try:
        return dict(sorted(TypeAdapter(RewardRules).validate_python(dict(given)).items()))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise OptionInvalid(f"rewards: {first['loc'][0]}: {explained(first)}; nothing was submitted") from error


def _arguments(agent: str, traits: catalogue.Traits, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the arguments, sorted: their order must not change a spec's digest. Raises: SpecInvalid."""
    try:
        arguments = TypeAdapter(AgentArgs).validate_python(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise OptionInvalid(
            f"agent argument {str(first['loc'][0])[:80]!r}: {explained(first)}; nothing was submitted"
        ) from error
    catalogue.check_arguments(agent, traits, arguments)
    return dict(sorted(arguments.items()))


def refuse_unanswered(specs: Iterable[TaskSpec], settings: Settings, database: Database) -> None:
    """Refuses specs whose model no inference server serves, or whose URL and key were not registered together.

    The model's own `base_url`, the setting MEGAFLOW_MODEL_BASE_URL, a route (`megaflow models add`) or a name of the
    replay engine selects a server.

    Raises: SpecInvalid: names the model and what to try; DatabaseUnavailable.
    """
    models = {spec.model for spec in specs if spec.model is not None and spec.agent != "replay"}
    if all(model.replay and model.base_url is None and not model.side_models for model in models):
        return
    with database.begin() as connection:
        rows = model_replicas.listed(connection)
    registered = Registered.of(settings, rows)
    for model in models:
        url = model.base_url or settings.model_base_url
        if url is not None and not (model.replay and model.base_url is None):
            if (why := registered.refusal(model, url)) is not None:
                raise OptionInvalid(f"model {model.name!r}: {why}; nothing was submitted")
        elif url is None:
            _refuse_without_route(model, {row.model for row in rows})
        _refuse_without_ids(model, rows)


def for_purpose(new: NewRun, database: Database) -> NewRun:
    """Adds token ids to the model calls of specs: always for training, for synthesis where servers give them.

    Raises: DatabaseUnavailable.
    """
    if new.purpose == Purpose.EVALUATION:
        return new
    with database.begin() as connection:
        rows = model_replicas.listed(connection)
    strict = new.purpose == Purpose.TRAINING
    return replace(
        new,
        specs=[
            _with_ids(spec, spec.model) if spec.model and (strict or _gives_ids(spec.model, rows)) else spec
            for spec in new.specs
        ],
    )


def _gives_ids(model: ModelChoice, rows: Sequence[ModelReplica]) -> bool:
    """Whether all inference servers that may get its calls may give token ids."""
    answering = _answering(model, rows)
    return (model.replay or bool(answering)) and not any(TRAITS[row.engine].no_ids for row in answering)


def _answering(model: ModelChoice, rows: Sequence[ModelReplica]) -> list[ModelReplica]:
    """Returns the inference servers that may get a model's calls."""
    own = [row for row in rows if row.model == model.name]
    return own or [row for row in rows if row.model == ANY and not model.replay]


def _with_ids(spec: TaskSpec, model: ModelChoice) -> TaskSpec:
    sampling = (model.sampling or Sampling()).model_copy(update={"token_ids": True})
    return spec.model_copy(update={"model": model.model_copy(update={"sampling": sampling})})


def _refuse_without_ids(model: ModelChoice, rows: Sequence[ModelReplica]) -> None:
    """Raises: SpecInvalid: token ids are needed, but a server that may get the calls is known to give none."""
    if model.sampling is None or not model.sampling.token_ids:
        return
    for row in _answering(model, rows):
        if why := TRAITS[row.engine].no_ids:
            raise OptionInvalid(
                f"model {model.name!r}: {row.url}: {why}; expected vLLM or SGLang for training; nothing was submitted"
            )


_NAMED = 5
"""Maximum quarantined tasks named in an error."""


def refuse_quarantined(specs: Sequence[TaskSpec], database: Database) -> None:
    """Refuses tasks whose newest validation put them in quarantine, except for the agents that validate.

    Raises: SpecInvalid: names the tasks with their reasons; DatabaseUnavailable.
    """
    specs = [spec for spec in specs if spec.agent not in VALIDATORS]
    if not specs:
        return
    tasks = {spec.task.name: spec.task for spec in specs}
    own_names = {name: name.partition("/")[2] or name for name in tasks}  # in a pool the dataset's name may be a prefix
    with database.begin() as connection:
        known = validations.quarantined(connection, sorted({*own_names, *own_names.values()}))
    if not known:
        return
    names = {one.task for one in known.values()}
    wrong = [
        f"{name} ({known[content].reason})"
        for name, task in tasks.items()
        if names & {name, own_names[name]} and (content := content_of(task.model_dump(mode="json"))) in known
    ]
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise SpecInvalid(
            f"expected no quarantined task, found {len(wrong)}: {'; '.join(wrong[:_NAMED])}{more}; leave them out"
            " (--exclude NAME), ask for them (--include-quarantined), or repair them and `megaflow dataset validate`"
            " again; nothing was submitted"
        )


def _refuse_without_route(model: ModelChoice, routes: set[str]) -> None:
    """Raises: SpecInvalid: the model, or a side model, has no route."""
    names = [name for name in (model.name, *model.side_models) if not (name == model.name and model.replay)]
    if ANY in routes or not (unknown := [name for name in names if name not in routes]):
        return
    raise OptionInvalid(
        f"model {unknown[0]!r}: expected an endpoint (--base-url, or the setting MEGAFLOW_MODEL_BASE_URL) or a route,"
        f" found none; routes: {', '.join(sorted(routes)) or 'none'}; try --base-url URL or `megaflow models add"
        f" {unknown[0]} URL`, or --model {REPLAY_MODEL} for scripted answers, which are never scored as a model's;"
        " nothing was submitted"
    )


def _check_model(model: ModelChoice) -> None:
    """Raises: SpecInvalid: wrong URL, or wrong variable of the key. The error shows neither: they may be secrets."""
    if model.base_url is not None:
        try:
            plain_url(model.base_url)
        except LimitInvalid:
            raise OptionInvalid(
                "model.base_url: expected a base URL such as http://engine.example.org:8000/v1, without user, password"
                " and query, found something else; a key is named by `api_key_env`"
            ) from None
        if (why := forbidden_url(model.base_url)) is not None:
            raise OptionInvalid(f"model.base_url: expected a model server, found {why}: models are never called there")
    if model.api_key_env is not None:
        try:
            check_variable(model.api_key_env)
        except LimitInvalid as error:
            raise OptionInvalid(f"model.api_key_env: {error}") from None


def _possible(task: AgentTask, agent: str, traits: catalogue.Traits) -> AgentTask:
    """Returns the task with the agent's tools. Raises: SpecInvalid: this agent cannot do the task."""
    if traits.needs_solution and task.solution is None:
        raise SpecInvalid(f"agent {agent!r} replays gold solutions; task {task.name!r} has none")
    _refuse_impossible(task, agent, traits)
    return _with_tools(task, agent, traits.tools) if traits.tools else task


def _refuse_impossible(task: AgentTask, agent: str, traits: catalogue.Traits) -> None:
    """Raises: SpecInvalid: the environment's kind cannot provide this, or this agent cannot work in it."""
    environment = task.environment
    where = f"task {task.name!r}: expected"
    if traits.needs_isolation and environment.kind in IMAGELESS:
        raise SpecInvalid(
            f"{where} a container for agent {agent!r}, which attacks the shell and the interpreter that it finds; found"
            f" the kind {environment.kind.value!r}, which is this host; use the kind 'docker'; nothing was submitted"
        )
    if environment.kind is EnvironmentKind.OCI and Network.OPEN in (environment.network, environment.grading.network):
        raise SpecInvalid(f"{where} another network than 'open' for the kind 'oci'; use the kind 'docker'")
    if environment.reuse is not Reuse.SHARED_READONLY:
        return
    actual = "found 'shared-readonly'"
    if environment.kind is EnvironmentKind.KUBERNETES:
        raise SpecInvalid(f"{where} `reuse` 'fresh' or 'recycled' for the kind 'kubernetes', {actual}")
    if traits.writes:
        raise SpecInvalid(
            f"{where} `reuse` 'fresh' or 'recycled' with agent {agent!r}, which changes files, {actual}, whose root is"
            " read-only"
        )
    if environment.kind in IMAGELESS:
        raise SpecInvalid(
            f"{where} `reuse` 'fresh' or 'recycled' for the kind {environment.kind.value!r}, {actual}: nothing there is"
            " read-only; use the kind 'docker'"
        )


def refuse_wrong_projects(tasks: Iterable[AgentTask], fetch: Callable[[Bundle], bytes]) -> None:
    """Reads the compose files of tasks that were made by hand; datasets' readers have checked theirs.

    fetch: returns the tar of a stored folder. Raises: SpecInvalid: names the task, and every refused place;
        ArtifactStoreUnavailable.
    """
    services: dict[Compose, frozenset[str]] = {}
    for task in tasks:
        goal, compose = task.goal, task.environment.compose
        judging = (
            {goal.service, *(one.service for one in goal.also)} - {None} if isinstance(goal, ScriptGoal) else set()
        )
        if compose is None:
            if judging:
                shown = ", ".join(sorted(map(repr, judging)))
                raise SpecInvalid(
                    f"task {task.name!r}: expected a compose file with the services that judge; found {shown}"
                )
            continue
        try:
            if compose not in services:
                services[compose] = _services(compose, fetch)
        except (SpecInvalid, ArtifactMissing) as error:
            raise SpecInvalid(f"task {task.name!r}: {error}") from error
        if wrong := judging - services[compose]:
            known, shown = ", ".join(sorted(services[compose])), ", ".join(sorted(map(repr, wrong)))
            raise SpecInvalid(f"task {task.name!r}: expected services to judge in among {known}; found {shown}")


def _services(asked: Compose, fetch: Callable[[Bundle], bytes]) -> frozenset[str]:
    with tempfile.TemporaryDirectory(prefix="megaflow-submission-") as passing:
        archives.unpack(fetch(asked.context), Path(passing))
        return frozenset(read_project(Path(passing), asked.file, asked.service).services)


def _with_tools(task: AgentTask, agent: str, tools: tuple[str, ...]) -> AgentTask:
    """Adds to the task what an agent inside needs: its framework, and network access to its model."""
    environment = task.environment
    network = Network.MODEL_ONLY if environment.network is Network.NONE else environment.network
    return task.model_copy(update={"environment": environment.model_copy(update={"tools": tools, "network": network})})
