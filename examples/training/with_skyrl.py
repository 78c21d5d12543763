"""A generator for SkyRL: a run of MegaFlow in place of its own rollouts.

Each row of SkyRL's dataset names a task, as its trajectories' `instance_id`. Give the generator to `BasePPOExp` by
`get_generator`, and SkyRL's engines as the policy: `megaflow models add policy URL --engine vllm`. For
SkyRL's synchronous trainer, which has trained on what it was given when it asks again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput

from app.experience.adapters import skyrl
from app.experience.hand_out import Batch, Experience
from megaflow import AgentTask, MegaFlow, ModelChoice


class MegaFlowGenerator(GeneratorInterface):
    """The tasks by name; `policy`: the model's stable name."""

    def __init__(self, flow: MegaFlow, tasks: Mapping[str, AgentTask], agent: str, policy: str) -> None:
        self._flow, self._tasks, self._agent, self._policy = flow, tasks, agent, policy
        self._handed: Experience | None = None
        self._batches: list[Batch] = []

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        ids, about = input_batch["trajectory_ids"] or [], input_batch["batch_metadata"]
        self._commit(f"v{about.global_step if about else 0}")
        rows = await asyncio.to_thread(self._rows, Counter(one.instance_id for one in ids))
        return GeneratorOutput(**skyrl.generator_output(ids, rows))

    def _rows(self, wanted: Mapping[str, int]) -> list[Mapping[str, Any]]:
        run = self._flow.enqueue_many(
            [self._tasks[name] for name in wanted],
            agent=self._agent,
            model=ModelChoice(name=self._policy),
            purpose="training",
            replicas=max(wanted.values()),
        )
        self._handed = self._flow.experience(run, policy=self._policy, consumer="skyrl", lease_s=86_400)
        rows: list[Mapping[str, Any]] = []
        while (left := self._handed.groups_left) is None or len({row["task"] for row in rows}) < left:
            if batch := self._handed.next_batch(len(wanted), wait_s=600):
                self._batches.append(batch)
                rows += [row for group in batch.groups().values() for row in group]
        return rows

    def _commit(self, version: str) -> None:
        """Say which version came of the last groups; `megaflow models publish` makes it live."""
        if self._handed is not None and self._batches:
            self._handed.publish(version)
            for batch in self._batches:
                self._handed.commit(batch, version)
        self._batches = []
