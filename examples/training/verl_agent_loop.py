"""An agent loop for verl: each of its rollouts is an attempt of MegaFlow.

verl repeats a row `rollout.n` times, and this makes a run of one attempt for each. A row's `extra_info` has the task as
JSON (`AgentTask.model_dump`) under `task`. In verl's configuration: `rollout.agent.default_agent_loop=megaflow`, and as
`rollout.agent.agent_loop_config_path` a file with `- {name: megaflow, _target_: verl_agent_loop.MegaFlowAgentLoop}`.
verl's engine stands behind the name `policy` (`megaflow models add`); its versions are called `v` and the global step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from app.experience.adapters import verl
from megaflow import AgentTask, MegaFlow, ModelChoice

AGENT, POLICY = "mini-swe-agent", "policy"


class MegaFlowAgentLoop(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        sample = await asyncio.to_thread(rollout, AgentTask.model_validate(row["extra_info"]["task"]), sampling_params)
        return AgentLoopOutput(**verl.agent_loop_output(sample))


def rollout(task: AgentTask, sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first sample of an attempt."""
    with MegaFlow() as flow:
        model = ModelChoice(name=POLICY, sampling={"temperature": sampling.get("temperature", 1.0)})
        run = flow.enqueue_many([task], agent=AGENT, model=model, purpose="training")
        experience = flow.experience(run, policy=POLICY, consumer="verl", lease_s=86_400)
        while (batch := experience.next_batch(1, wait_s=60)) is None:
            if not experience.groups_left:
                raise RuntimeError(f"no sample of {task.name}: {run.status()}")
        (rows,) = batch.groups().values()
        return rows[0]
