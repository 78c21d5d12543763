"""Turns a submission (a dataset and its options) into task specs, for `megaflow submit` and schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import Field

from app.agents import catalogue
from app.agents.external import known_agents
from app.agents.installation import Installer
from app.artifacts import open_store
from app.artifacts.bundles import store_bundle
from app.datasets import load
from app.datasets.base import Reading
from app.errors import SpecInvalid
from app.grading.library import GradingLibraries
from app.ledger.accept import NewRun
from app.models.overrides import EnvironmentOverrides, LimitOverrides
from app.models.spec import (
    MOST_PRIORITY,
    MOST_WAIT_S,
    AgentArgs,
    AgentTask,
    Bundle,
    EnvironmentKind,
    LabelText,
    Mode,
    ModelChoice,
    TaskSpec,
    Wire,
)
from app.settings import Settings
from app.submission import specs_for

ALL = "all"
"""Every agent with a model, external ones too: SWE-agent only where its checkout is named, because no index has it."""


class Submission(Wire):
    """What `megaflow submit` and a schedule have in common."""

    dataset: str
    agent: str
    mode: Mode = Mode.AUTO
    model: ModelChoice | None = None
    replicas: int = Field(default=1, ge=1, le=10_000)
    limit: int | None = Field(default=None, ge=1)
    environment: EnvironmentKind = EnvironmentKind.DOCKER
    user_name: LabelText = Field(default="default", min_length=1)
    priority: int = Field(default=0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    name: LabelText = ""
    only: tuple[str, ...] = ()  # names of tasks, or patterns of them; empty: all
    exclude: tuple[str, ...] = ()  # the same: not these
    resource_class: str = "standard"
    deadline_s: float | None = Field(default=None, gt=0, le=MOST_WAIT_S)  # from the submission on, for the whole run
    delay_s: float = Field(default=0.0, ge=0, le=MOST_WAIT_S)  # nothing runs before
    budget_usd: float | None = Field(default=None, gt=0)  # of model calls, the whole run
    overrides: EnvironmentOverrides = EnvironmentOverrides()  # go before what the tasks say
    limits: LimitOverrides = LimitOverrides()  # the same
    agent_args: AgentArgs = {}
    max_running: int | None = Field(default=None, ge=1)  # attempts of the run at once


def specs_of(submission: Submission, settings: Settings) -> list[TaskSpec]:
    """Read the dataset and make a spec of every task.

    Raises: DatasetInvalid, UnknownName, SpecInvalid, SettingsInvalid: then nothing was submitted;
        ArtifactStoreUnavailable.
    """
    known = known_agents(settings)
    names = _agents(submission.agent, known, settings)
    tasks = _tasks(submission, settings)
    return [
        spec
        for name in names
        for spec in specs_for(
            tasks,
            agent=name,
            mode=submission.mode,
            model=submission.model,
            known=known,
            resource_class=submission.resource_class,
            overrides=submission.overrides,
            limits=submission.limits,
            agent_args=submission.agent_args,
        )
    ]


def _agents(asked: str, known: Mapping[str, catalogue.Traits], settings: Settings) -> list[str]:
    """The agents meant: one, several with commas between, or all with a model that this installation can have.

    Raises: UnknownName.
    """
    if asked == ALL:
        return [
            name
            for name, traits in known.items()
            if traits.needs_model and (name != "swe-agent" or settings.swe_agent_source is not None)
        ]
    names = [name.strip() for name in asked.split(",") if name.strip()]
    for name in names:
        catalogue.traits(name, known)
    return list(dict.fromkeys(names)) or [asked]


def _tasks(submission: Submission, settings: Settings) -> list[AgentTask]:
    store = open_store(settings.artifacts(), endpoint_url=settings.s3_endpoint_url)

    def pack(folder: Path) -> Bundle:
        return store_bundle(store, folder)

    with closing(grading_libraries(settings)) as libraries:  # started by the first row that needs one
        reading = Reading(pack=pack, kind=submission.environment, describe=libraries.describe)
        tasks = load(submission.dataset, reading)
    names = {task.name for task in tasks}
    wanted = _matching(submission.only, names, submission.dataset) if submission.only else names
    wanted -= _matching(submission.exclude, names, submission.dataset)
    if not wanted:
        raise SpecInvalid(f"dataset {submission.dataset!r}: expected at least one task, found that all are excluded")
    return [task for task in tasks if task.name in wanted][: submission.limit]


def grading_libraries(settings: Settings) -> GradingLibraries:
    """The grading libraries of datasets on this host, for `Reading.describe`; installed when first asked.

    The caller closes them.
    """
    return GradingLibraries(Installer(settings.tools, ready=settings.ready_tools).library)


def _matching(patterns: Sequence[str], names: set[str], dataset: str) -> set[str]:
    """The names that fit a pattern (`*`, `?`, `[…]`) or are one. Raises: SpecInvalid: a pattern that none fits."""
    found: set[str] = set()
    for pattern in patterns:
        fitting = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not fitting:
            raise SpecInvalid(f"dataset {dataset!r} has no task {pattern!r}; it has {sorted(names)[:20]}")
        found |= fitting
    return found


def demo_tasks(settings: Settings, kind: EnvironmentKind) -> list[AgentTask]:
    """The demo dataset's tasks."""
    return _tasks(Submission(dataset="demo", agent="nop", environment=kind), settings)


def new_run(submission: Submission, specs: list[TaskSpec], idempotency_key: str | None) -> NewRun:
    """What to accept for the submission; its times count from now."""
    return NewRun(
        specs=specs,
        replicas=submission.replicas,
        name=submission.name or f"{Path(submission.dataset).stem}-{submission.agent}",
        user_name=submission.user_name,
        priority=submission.priority,
        idempotency_key=idempotency_key,
        available_at=_after(submission.delay_s) if submission.delay_s else None,
        deadline_at=_after(submission.deadline_s) if submission.deadline_s else None,
        budget_usd=submission.budget_usd,
        max_running=submission.max_running,
    )


def _after(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)
