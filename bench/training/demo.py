"""The loop shown: a small policy learns by real tasks in containers, through the gateway and the experience store.

    make train-demo        (some ten minutes; writes results/training.json and training.png)

A task is a folder with four programs; one of them opens a box. The policy begins by knowing the form of a command, not
which is right. Each step: 2 tasks × 16 replicas by an agent that calls the policy through the gateway; what the gateway
recorded becomes samples, is leased, trained on (GSPO), published as the next version and committed. Reward 1: the right
program was run and the work submitted; 0: submitted without; -0.5: not submitted. The control is trained on shuffled
rewards. This shows that the loop works, and nothing about reasoning.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from rich.console import Console

from app import evaluation
from app.client import MegaFlow, Run
from app.errors import MegaFlowError
from app.evaluation import Submission
from app.experience.hand_out import Experience
from app.ledger import experience, model_replicas
from app.ledger.model_replicas import NewReplica
from app.model_service.training.trainer import Trainer, TrainOptions, load_weights
from app.models.model_calls import Dialect
from app.models.spec import AgentTask, EnvironmentKind, Mode, ModelChoice
from app.settings import Settings
from app.stack import base_image, lifecycle, tools
from bench.record import RESULTS
from bench.system import free_port
from bench.training import plot
from bench.training.engine import NAME
from bench.training.policy import COMMANDS, TinyPolicy, warm_start

TASKS, REPLICAS = 2, 16
STEPS = 10
SEEDS = 5
GOAL = 0.9
RIGHT = "./c"
REWARDS = {"not_submitted": -0.5}
OPTIONS = TrainOptions(learning_rate=2e-4, minibatch=16, epochs=2, clip_low=3e-4, clip_high=4e-4)

_AGENT = Path(__file__).parents[2] / "examples" / "agent" / "agent.toml"
_PROGRAM = "#!/bin/sh\n{}\n"
_TEST = """mkdir -p /logs/verifier
if [ -e /box/opened ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
_TASK_TOML = """version = "1.0"
[agent]
timeout_sec = 60
[verifier]
timeout_sec = 30
[environment]
cpus = 1
memory_mb = 256
allow_internet = false
"""
console = Console(stderr=True)


@dataclass
class Step:
    """What one step came to: means over its attempts."""

    step: int
    version: str
    reward: float
    solved: float
    submitted: float
    attempts: int
    samples: int
    staleness: int
    clipped: float
    gap: float
    rollout_s: float
    train_s: float


@dataclass
class Seed:
    """One policy's way."""

    seed: int
    shuffled: bool
    steps: list[Step] = field(default_factory=list)

    @property
    def reached_at(self) -> int | None:
        """The first step whose reward is at the goal."""
        return next((one.step for one in self.steps if one.reward >= GOAL), None)


# --- The tasks ------------------------------------------------------------------------------------------------------


def write_tasks(folder: Path) -> None:
    """Task folders; a Dockerfile with the programs, of which one opens the box."""
    for number in range(TASKS):
        task = folder / f"box-{number}"
        for part in ("environment", "tests", "solution"):
            (task / part).mkdir(parents=True)
        (task / "task.toml").write_text(_TASK_TOML)
        (task / "instruction.md").write_text(f"box {number}")
        lines = ["ARG BASE_IMAGE", "FROM ${BASE_IMAGE}", "WORKDIR /box"]
        for command in COMMANDS:
            name = command.removeprefix("./")
            work = "touch /box/opened\necho open" if command == RIGHT else "echo closed"
            (task / "environment" / name).write_text(_PROGRAM.format(work))
            (task / "environment" / name).chmod(0o755)
            lines.append(f"COPY {name} /box/{name}")
        (task / "environment" / "Dockerfile").write_text("\n".join(lines) + "\n")
        (task / "tests" / "test.sh").write_text(_TEST)
        (task / "solution" / "solve.sh").write_text(f"cd /box && {RIGHT}\n")


# --- The engine -----------------------------------------------------------------------------------------------------


class EngineProcess:
    """The policy's server; weights are given to it by a file."""

    def __init__(self, weights: Path, port: int, seed: int, log: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "bench.training.engine",
            str(weights),
            "--port",
            str(port),
            "--seed",
            str(seed),
        ]
        self._log = log.open("ab")
        self._process = subprocess.Popen(  # noqa: S603
            command, stdout=self._log, stderr=self._log
        )
        self._url = f"http://127.0.0.1:{port}"
        self.base_url = f"{self._url}/v1"
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{self._url}/v1/models", timeout=2).close()
                return
            except OSError:
                if self._process.poll() is not None:
                    break
                time.sleep(0.1)
        raise RuntimeError(f"the engine did not start; its log is {log}")

    def update(self, weights: Path, version: str) -> None:
        body = json.dumps({"model_path": str(weights), "weight_version": version}).encode()
        request = urllib.request.Request(
            f"{self._url}/update_weights_from_disk", body, {"content-type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=30).close()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._log.close()


# --- The loop -------------------------------------------------------------------------------------------------------


class Loop:
    """One policy from its warm start on: rollouts, samples, a step of the trainer, the next version."""

    def __init__(self, flow: MegaFlow, tasks: Sequence[AgentTask], home: Path, port: int, seed: Seed) -> None:
        self._flow, self._tasks, self._home, self._seed = flow, tasks, home, seed
        self._policy_name = f"{NAME}-{seed.seed}{'-shuffled' if seed.shuffled else ''}"
        torch.manual_seed(seed.seed)
        model = TinyPolicy()
        warm_start(model, seed.seed)
        self._trainer = Trainer(model, TrainOptions(**{**asdict(OPTIONS), "seed": seed.seed}))
        home.mkdir()
        weights = home / "v0.safetensors"
        self._trainer.save(weights)
        self._engine = EngineProcess(weights, port, seed.seed, home / "engine.log")
        self._shuffle = random.Random(seed.seed)
        self._version = "v0"
        experience.publish(flow.database, self._policy_name, "v0")
        experience.settle(flow.database, self._policy_name, "v0")
        replica = NewReplica(
            self._policy_name,
            self._engine.base_url,
            upstream_model=NAME,
            policy_version="v0",
            dialects=(Dialect.CHAT,),
        )
        model_replicas.add(flow.database, replica)

    def step(self, number: int) -> Step:
        begun = time.monotonic()
        run = self._flow.enqueue_many(
            self._tasks,
            agent="sketch",
            model=ModelChoice(name=self._policy_name),
            mode=Mode.PERSISTENT,
            replicas=REPLICAS,
            name=f"{self._policy_name} step {number}",
            purpose="training",
            rewards=REWARDS,
        )
        handed = self._flow.experience(run, policy=self._policy_name, consumer="trainer", max_staleness=0)
        groups, batches = self._groups(handed, run)
        rolled_out = time.monotonic()
        rows = [row for group in groups.values() for row in group]
        rewards = {row["attempt_id"]: (row["reward"], row["end_reason"]) for row in rows}
        staleness = max(self._age(row) for row in rows)
        report = self._trainer.step(self._shuffled(groups) if self._seed.shuffled else groups)
        self._publish(f"v{number + 1}")
        for batch in batches:
            handed.commit(batch, self._version)
        found = list(rewards.values())
        return Step(
            step=number,
            version=self._version,
            reward=sum(reward for reward, _ in found) / len(found),
            solved=sum(reward >= 1 for reward, _ in found) / len(found),
            submitted=sum(reason == "submitted" for _, reason in found) / len(found),
            attempts=len(found),
            samples=report.samples,
            staleness=staleness,
            clipped=report.clipped,
            gap=report.gap,
            rollout_s=rolled_out - begun,
            train_s=time.monotonic() - rolled_out,
        )

    def _groups(self, handed: Experience, run: Run) -> tuple[dict[str, Sequence[Mapping[str, Any]]], list[Any]]:
        groups: dict[str, Sequence[Mapping[str, Any]]] = {}
        batches = []
        while len(groups) < TASKS:
            batch = handed.next_batch(TASKS, wait_s=120)
            if batch is None:
                raise RuntimeError(f"no group of {run.id} was complete within 120 s: {run.status()}")
            batches.append(batch)
            groups.update(batch.groups())
        return groups, batches

    def _age(self, row: Mapping[str, Any]) -> int:
        live = int(self._version[1:])
        return max(live - int(span["version"][1:]) for span in row["versions"])

    def _shuffled(self, groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Sequence[Mapping[str, Any]]]:
        found: dict[str, Sequence[Mapping[str, Any]]] = {}
        for name, rows in groups.items():
            rewards = [row["reward"] for row in rows]
            self._shuffle.shuffle(rewards)
            found[name] = [{**row, "reward": reward} for row, reward in zip(rows, rewards, strict=True)]
        return found

    def _publish(self, version: str) -> None:
        """The next version goes live when the engine has loaded what was saved."""
        weights = self._home / f"{version}.safetensors"
        self._trainer.save(weights)
        load_weights(TinyPolicy(), weights)  # what was written can be read
        experience.publish(self._flow.database, self._policy_name, version)
        self._engine.update(weights, version)
        experience.settle(self._flow.database, self._policy_name, version)
        model_replicas.swap(self._flow.database, self._policy_name, policy_version=version)
        self._version = version

    def close(self) -> None:
        self._engine.stop()


@contextmanager
def stack(say: Callable[[str], None]) -> Iterator[tuple[Settings, Path]]:
    with tempfile.TemporaryDirectory(prefix="mft-") as folder:
        ports = [free_port() for _ in range(4)]
        settings = Settings(
            web_port=ports[3],
            home=Path(folder) / "h",
            installation=f"train-{uuid4().hex[:8]}",
            flower_port=ports[0],
            replay_port=ports[1],
            gateway_port=ports[2],
            persistent_slots=16,
            host_cpu_most=0.0,  # its figures are of all slots
            persistent_instances=1,
            agent_manifests=(_AGENT,),
        )
        try:
            lifecycle.up(settings, say)
            tools.ensure_tools(settings, may_install=True, report=say)
            base_image.ensure_base_image(settings, report=say)
            yield settings, Path(folder)
        finally:
            lifecycle.down(settings, say, purge=True)


def main() -> int:
    """Train all seeds and the control, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[{time.monotonic() - begun:4.0f} s] {line}", markup=False, highlight=False)

    seeds = [*(Seed(number, shuffled=False) for number in range(asked.seeds)), Seed(0, shuffled=True)]
    try:
        with stack(say) as (settings, folder), MegaFlow(settings) as flow:
            write_tasks(folder / "tasks")
            submission = Submission(dataset=str(folder / "tasks"), agent="nop", environment=EnvironmentKind.OCI)
            tasks = [spec.task for spec in evaluation.specs_of(submission, settings)]
            for seed in seeds:
                _train(flow, tasks, folder / f"policy-{seed.seed}-{seed.shuffled}", seed, asked.steps, say)
    except (MegaFlowError, RuntimeError) as error:
        console.print(f"train-demo: {error}", markup=False)
        return getattr(error, "exit_code", 1)
    asked.out.mkdir(exist_ok=True, parents=True)
    (asked.out / "training.json").write_text(json.dumps([asdict(seed) for seed in seeds], indent=1) + "\n")
    plot.training(seeds, asked.out / "training.png")
    reached = [seed.reached_at for seed in seeds if not seed.shuffled]
    count = sum(at is not None for at in reached)
    say(f"reward {GOAL} was reached by {count} of {len(reached)} seeds, at steps {reached}")
    say(f"the control ended at reward {seeds[-1].steps[-1].reward:.2f}; written: {asked.out / 'training.png'}")
    return 0 if count >= len(reached) - 1 else 1


def _train(
    flow: MegaFlow, tasks: Sequence[AgentTask], home: Path, seed: Seed, steps: int, say: Callable[[str], None]
) -> None:
    loop = Loop(flow, tasks, home, free_port(), seed)
    try:
        for number in range(steps):
            found = loop.step(number)
            seed.steps.append(found)
            name = "control" if seed.shuffled else f"seed {seed.seed}"
            say(
                f"{name} step {number}: reward {found.reward:+.2f}, solved {found.solved:.2f}, submitted "
                f"{found.submitted:.2f}, {found.attempts} attempts in {found.rollout_s:.1f} s, "
                f"trained in {found.train_s:.1f} s"
            )
    finally:
        loop.close()


if __name__ == "__main__":
    sys.exit(main())
