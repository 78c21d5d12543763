"""Makes a step's run: which tasks of the pool, which agent framework for each group. The same seed makes the same."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from uuid import UUID

from app.agents.external import known_agents
from app.errors import SpecInvalid
from app.evaluation import Submission, tasks_of
from app.ledger.accept import NewRun
from app.ledger.database import Database
from app.ledger.experience import ExperienceRun
from app.models.kinds import Purpose
from app.settings import Settings
from app.submission import size_of, specs_for
from app.training.config import TrainConfig, TrainerKind


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's run, with its pool and mixture."""

    run: NewRun
    pool: int  # tasks that the datasets have
    mixture: Counter[str]  # groups by framework


def key_of(config: TrainConfig, step: int) -> str:
    """Returns the idempotency key of a step's run, by which a restarted loop finds it."""
    return f"train:{config.name}:step-{step}"


def plan_step(config: TrainConfig, step: int, settings: Settings, database: Database) -> StepPlan:
    """Draws a step's tasks and frameworks. Raises: as `app.evaluation.prepare`; SpecInvalid: the pool is too small."""
    draw = {"sample": config.groups, "sample_seed": random.Random(f"{config.seed}/{step}/tasks").getrandbits(48)}
    submission = Submission(
        dataset=",".join(config.datasets),
        agent=next(iter(config.frameworks)),
        selection=config.selection.model_copy(update=draw),
        environment=config.environment,
    )
    tasks, provenance = tasks_of(submission, settings, database, config.selections)
    if len(tasks) < config.groups:
        raise SpecInvalid(
            f"expected a pool of at least {config.groups} tasks, one for each group of a step; found {len(tasks)};"
            " name more datasets, or fewer `groups`"
        )
    agents = frameworks_of(config, step)
    agents_known = known_agents(settings)
    specs = [
        spec
        for agent in config.frameworks
        for spec in specs_for(
            [task for task, assigned in zip(tasks, agents, strict=True) if assigned == agent],
            agent=agent,
            mode=config.mode,
            model=config.model,
            agents=agents_known,
            resource_class=config.resource_class,
            overrides=config.overrides,
            limits=config.limits,
            rewards=config.rewards,
            size=size_of(settings),
        )
    ]
    run = NewRun(
        specs=specs,
        replicas=config.replicas,
        groups=config.rules,
        name=f"{config.name}-step-{step}",
        user_name=config.user_name,
        purpose=Purpose.TRAINING,
        idempotency_key=key_of(config, step),
        max_running=config.max_running,
        provenance=provenance | {"training": config.name, "step": step},
    )
    return StepPlan(run, provenance["tasks"], Counter(agents))


def experience_of(config: TrainConfig, run_id: UUID) -> ExperienceRun:
    """Returns how the groups of a step's run are closed and handed out."""
    scripted = config.trainer.kind is TrainerKind.NONE  # also with a scale; scripts have no versions
    bound = None if scripted else config.max_staleness
    return ExperienceRun(
        run_id,
        config.policy,
        quorum=config.quorum,
        drop_equal=config.drop_equal,
        allow_scripted=scripted,
        max_staleness=bound,
    )


def frameworks_of(config: TrainConfig, step: int) -> list[str]:
    """Draws the framework of each group: in proportion to the weights, to within one group, in random order."""
    chance = random.Random(f"{config.seed}/{step}/frameworks")
    names, bounds = list(config.frameworks), list(accumulate(config.frameworks.values()))
    first = chance.random()
    places = [(number + first) / config.groups * bounds[-1] for number in range(config.groups)]
    frameworks = [names[min(bisect_right(bounds, place), len(names) - 1)] for place in places]
    chance.shuffle(frameworks)
    return frameworks
