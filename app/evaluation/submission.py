"""Turns a submission (a dataset and its options) into task specs, for `megaflow submit` and schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import Field

from app.agents import catalogue
from app.agents.external import known_agents
from app.agents.installation import Installer
from app.artifacts import open_store
from app.artifacts.bundles import pack, store_bundle
from app.datasets.base import Reading
from app.datasets.selection import Pool, Selection, choose
from app.datasets.source import arguments_of, open_dataset, parsed
from app.errors import DatasetInvalid, SpecInvalid
from app.evaluation.dataset_filter import derived_from
from app.evaluation.report import BASELINES
from app.grading.resident_libraries import GradingLibraries
from app.ledger import results
from app.ledger.accept import NewRun
from app.ledger.database import Database
from app.models.groups import MOST_REPLICAS, GroupRules
from app.models.kinds import Purpose
from app.models.overrides import EnvironmentOverrides, LimitOverrides
from app.models.spec import (
    MOST_PRIORITY,
    MOST_WAIT_S,
    AgentArgs,
    AgentTask,
    EnvironmentKind,
    LabelText,
    Mode,
    ModelChoice,
    RewardRules,
    TaskSpec,
    Wire,
    plain_text,
)
from app.settings import Settings
from app.submission import size_of, specs_for

ALL = "all"
"""Every agent with a model, external ones too. SWE-agent only where its checkout is set, as no package index has it."""


class Submission(Wire):
    """Options that `megaflow submit` and a schedule have in common."""

    dataset: str  # one, or several separated by commas: a pool
    agent: str
    mode: Mode = Mode.AUTO
    model: ModelChoice | None = None
    replicas: int = Field(default=1, ge=1, le=MOST_REPLICAS)
    most_replicas: int | None = None  # this and the next two are for training runs: see `GroupRules`
    quorum: int | None = None
    hedge_after: str | None = None
    selection: Selection = Selection()  # which of its tasks
    environment: EnvironmentKind = EnvironmentKind.DOCKER
    user_name: LabelText = Field(default="default", min_length=1)
    priority: int = Field(default=0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    name: LabelText = ""
    resource_class: str = "standard"
    deadline_s: float | None = Field(default=None, gt=0, le=MOST_WAIT_S)  # from the submission on, for the whole run
    delay_s: float = Field(default=0.0, ge=0, le=MOST_WAIT_S)  # nothing runs earlier
    budget_usd: float | None = Field(default=None, gt=0)  # of model calls, the whole run
    overrides: EnvironmentOverrides = EnvironmentOverrides()  # override the tasks' values
    limits: LimitOverrides = LimitOverrides()  # override the tasks' values
    agent_args: AgentArgs = {}
    rewards: RewardRules = {}  # by end reason
    max_running: int | None = Field(default=None, ge=1)  # attempts of the run at once
    record_diffs: bool = False  # keep the repository's diff after each step
    include_quarantined: bool = False  # also tasks that a validation put in quarantine
    purpose: Purpose = Purpose.EVALUATION

    @property
    def groups(self) -> GroupRules:
        return GroupRules(self.quorum, self.hedge_after, self.most_replicas)

    def scheduled(self) -> dict[str, Any]:
        """Returns the form that a schedule stores: absolute paths, for another process. Raises: DatasetInvalid."""
        options = self.model_dump(mode="json", exclude={"dataset"}, exclude_defaults=True)
        return {"dataset": ",".join(map(_absolute, arguments_of(self.dataset))), "submission": options}


@dataclass(frozen=True, slots=True)
class Prepared:
    """Specs of a submission. `provenance`: their origin, stored with the run."""

    specs: list[TaskSpec]
    provenance: dict[str, Any]


def _absolute(dataset: str) -> str:
    argument = parsed(dataset)
    if argument.path is None or dataset == "demo":
        return dataset
    name, equals, _ = dataset.partition("=")
    return (f"{name}=" if equals and argument.name else "") + str(argument.path.absolute())


def specs_of(submission: Submission, settings: Settings, database: Database | None = None) -> list[TaskSpec]:
    """Returns a spec of every task. Raises: as `prepare`."""
    return prepare(submission, settings, database).specs


def prepare(submission: Submission, settings: Settings, database: Database | None = None) -> Prepared:
    """Reads the datasets, selects tasks, and makes a spec of each.

    database: the ledger; only needed for a selection by the pass rates of a run.

    Raises: DatasetInvalid, DatasetUnavailable, DependencyMissing, UnknownName, SpecInvalid, SettingsInvalid: then
        nothing was submitted; ArtifactStoreUnavailable.
    """
    submission.groups.check(submission.replicas, submission.purpose)
    known = known_agents(settings)
    names = _agents(submission.agent, known, settings)
    tasks, provenance = tasks_of(submission, settings, database)
    specs = [
        spec
        for name in names
        for spec in specs_for(
            tasks,
            agent=name,
            mode=submission.mode,
            model=submission.model,
            agents=known,
            resource_class=submission.resource_class,
            overrides=submission.overrides,
            limits=submission.limits,
            agent_args=submission.agent_args,
            rewards=submission.rewards,
            record_diffs=submission.record_diffs,
            size=size_of(settings),
        )
    ]
    return Prepared(specs, provenance)


def _agents(asked: str, known: Mapping[str, catalogue.Traits], settings: Settings) -> list[str]:
    """Returns the agents: one, several separated by commas, or all with a model that this installation can run.

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


@contextmanager
def reading_of(
    settings: Settings, kind: EnvironmentKind = EnvironmentKind.DOCKER, *, store: bool = True
) -> Iterator[Reading]:
    """Provides the reading of datasets for the block. The first row that needs a grading library starts it.

    store: put folders into the artifact store; False: only look at a dataset.
    """
    cache = settings.home / "cache" / "datasets"
    opened = open_store(settings.artifacts(), endpoint_url=settings.s3_endpoint_url) if store else None
    with closing(GradingLibraries(Installer(settings.tools, ready=settings.ready_tools).install_library)) as libraries:
        yield Reading(
            pack=lambda folder: store_bundle(opened, folder) if opened else pack(folder)[0],
            kind=kind,
            cache=cache,
            describe=libraries.describe,
        )


def tasks_of(
    submission: Submission,
    settings: Settings,
    database: Database | None = None,
    own: Mapping[str, Selection] = MappingProxyType({}),
) -> tuple[list[AgentTask], dict[str, Any]]:
    """Returns the chosen tasks and their provenance. own: selections by dataset for the pool. Raises: as `prepare`."""
    selection = submission.selection
    rates = _rates(selection, database)
    try:
        with reading_of(settings, submission.environment) as reading:
            arguments = arguments_of(submission.dataset)
            pool = Pool([open_dataset(one, reading) for one in arguments], [own.get(one) for one in arguments])
            entries = pool.entries()
            chosen = choose(entries, selection, submission.dataset, rates)
            tasks = list(pool.tasks(chosen))
            origins = [dataset.origin() for dataset in pool.datasets]
    except OSError as error:
        raise DatasetInvalid(f"dataset {submission.dataset!r}: expected to read it; found {error}") from error
    provenance = {
        "datasets": [
            {**asdict(origin), "argument": plain_text(origin.argument), **derived_from(origin)} for origin in origins
        ],
        "selection": selection.conditions(),
        **({"selections": {name: one.conditions() for name, one in own.items()}} if own else {}),
        "tasks": len(entries),
        "chosen": len(tasks),
    }
    return tasks, provenance


def _rates(selection: Selection, database: Database | None) -> dict[str, float] | None:
    """Returns the pass rates for a condition. Raises: UnknownName, DatabaseUnavailable; SpecInvalid: no ledger."""
    if selection.pass_rate_from is None:
        return None
    if database is None:
        raise SpecInvalid(f"expected a ledger to read the pass rates of run {selection.pass_rate_from!r}; found none")
    return results.pass_rates(database, results.find(database, "runs", selection.pass_rate_from), BASELINES)


def demo_tasks(settings: Settings, kind: EnvironmentKind) -> list[AgentTask]:
    """Returns the demo dataset's tasks."""
    return tasks_of(Submission(dataset="demo", agent="nop", environment=kind), settings)[0]


def run_of(
    submission: Submission, settings: Settings, database: Database | None = None, idempotency_key: str | None = None
) -> NewRun:
    """Returns the run to accept for the submission; its times count from now. Raises: as `prepare`."""
    prepared = prepare(submission, settings, database)
    return NewRun(
        specs=prepared.specs,
        replicas=submission.replicas,
        groups=submission.groups,
        name=submission.name or f"{_label(submission.dataset)}-{submission.agent}",
        user_name=submission.user_name,
        purpose=submission.purpose,
        priority=submission.priority,
        idempotency_key=idempotency_key,
        available_at=_after(submission.delay_s) if submission.delay_s else None,
        deadline_at=_after(submission.deadline_s) if submission.deadline_s else None,
        budget_usd=submission.budget_usd,
        max_running=submission.max_running,
        include_quarantined=submission.include_quarantined,
        provenance=prepared.provenance,
    )


def _label(dataset: str) -> str:
    """Names a run without a name: `swe-gym`, `rows`, `swe-gym+rows`."""
    return "+".join(Path(one.rpartition("=")[2]).stem for one in arguments_of(dataset))


def _after(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)
