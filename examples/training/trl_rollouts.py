"""`rollout_func` of TRL's GRPOTrainer: attempts of MegaFlow in place of answers.

    rollouts = Rollouts(flow, tasks, "mini-swe-agent", "policy", publish, replicas=16)
    GRPOTrainer(model, reward, GRPOConfig(num_generations=16, importance_sampling_level="sequence", …),
                Dataset.from_dict({"prompt": [task.name for task in tasks]}), rollout_func=rollouts).train()
    rollouts.finish(trainer)

`bench/training/with_trl.py` trains a small policy so, with a server for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trl import GRPOTrainer

from app.experience.adapters import trl
from app.experience.hand_out import Batch, Experience
from megaflow import AgentTask, MegaFlow, ModelChoice


class Rollouts:
    """Runs the tasks that a step's prompts name, and gives what became of them."""

    def __init__(
        self,
        flow: MegaFlow,
        tasks: Sequence[AgentTask],
        agent: str,
        policy: str,
        publish: Callable[[str], None],
        **options: Any,
    ) -> None:
        """publish: has the engine of `policy` answer with the trainer's weights as this version, and makes it live.
        options: of `MegaFlow.enqueue_many`; `replicas` as many as generations.
        """
        self._flow, self._agent, self._policy, self._publish, self._options = flow, agent, policy, publish, options
        self._tasks = {task.name: task for task in tasks}
        self._handed: Experience | None = None
        self._batches: list[Batch] = []
        self.version = "v0"
        self.steps: list[dict[str, Any]] = []

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        self.finish(trainer)
        names = list(dict.fromkeys(prompts))
        run = self._flow.enqueue_many(
            [self._tasks[name] for name in names],
            agent=self._agent,
            model=ModelChoice(name=self._policy),
            purpose="training",
            **self._options,
        )
        handed = self._flow.experience(run, policy=self._policy, consumer="trl", max_staleness=0)
        rows: list[dict[str, Any]] = []
        while len({row["task"] for row in rows}) < len(names):
            batch = handed.next_batch(len(names), wait_s=120)
            if batch is None:
                raise RuntimeError(f"no group was complete within 120 s: {run.status()}")
            self._batches.append(batch)
            rows += [row for group in batch.groups().values() for row in group]
        self._handed = handed
        rewards = {row["attempt_id"]: row["reward"] for row in rows}
        self.steps.append(
            {"version": self.version, "reward": sum(rewards.values()) / len(rewards), "samples": len(rows)}
        )
        return trl.rollouts(prompts, rows)

    def finish(self, trainer: GRPOTrainer) -> None:
        """Say which version came of the last step's samples."""
        version = f"v{trainer.state.global_step}"
        if self._handed is not None:
            self._handed.publish(version)
            self._publish(version)
            for batch in self._batches:
                self._handed.commit(batch, version)
            self.version, self._handed, self._batches = version, None, []
