"""A whole system of its own for the acceptance tests, driven as a user drives it: by the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from sqlalchemy import text

import app
from app.cli.json_keys import KEYS
from app.client import MegaFlow, Run
from app.datasets.source import DEMO
from app.evaluation import Submission
from app.evaluation.submission import tasks_of
from app.models.outcome import TaskResult
from app.models.spec import AgentTask, Mode
from app.settings import Settings
from app.stack import leftovers, lifecycle, supervisor
from app.stack.home import process_environment
from app.stack.programs import DEMO_SCRIPTS
from tests.contract.agents.example import EXAMPLE
from tests.forked import command
from tests.integration.inside_fixture import kept_tools
from tests.matrix.run import scripts, stand_in
from tests.services import missing, settings_in, short_folder, unset

ROOT = Path(app.__file__).parent.parent
MEGAFLOW = (sys.executable, "-c", "from app.cli import main; main()")
QUICK = {"lease_s": 9.0, "sweep_s": 2.0, "republish_s": 5.0, "retry_base_s": 0.2}


def keys_of(found: Any) -> set[str]:
    """Of an object, or of all objects in a list."""
    return set().union(*map(keys_of, found)) if isinstance(found, list) else set(found)


@dataclass
class System:
    """One running installation."""

    settings: Settings
    flow: MegaFlow

    @property
    def environment(self) -> dict[str, str]:
        """Of commands against it."""
        return process_environment(self.settings)

    def megaflow(self, *arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Run the real command line against it."""
        return command(arguments, self.environment, timeout_s=timeout_s)

    def json(self, *arguments: str, timeout_s: float = 240) -> Any:
        """The command's `--json` output; it must succeed."""
        done = self.megaflow(*arguments, "--json", timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        words = next((" ".join(arguments[:count]) for count in (2, 1) if " ".join(arguments[:count]) in KEYS), "")
        known = KEYS[words]
        assert known.startswith("by task") or keys_of(found) <= set(re.findall(r"\w+", known)), (
            f"the help of `megaflow {words}` misses keys"
        )
        return found

    def rows(self, statement: str, **values: Any) -> list[Any]:
        with self.flow.database.begin() as connection:
            return list(connection.execute(text(statement), values))

    def submit(self, **wanted: object) -> Run:
        """The demo, or what else is wanted, to the oracle on ephemeral instances."""
        values = {"dataset": "demo", "agent": "oracle", "mode": Mode.EPHEMERAL} | wanted
        return self.flow.submit(Submission.model_validate(values))

    def task_of(self, folder: Path, **environment: Any) -> AgentTask:
        """A folder's task with its environment changed."""
        ((task,), _) = tasks_of(Submission(dataset=str(folder), agent="oracle"), self.settings)
        changed = task.environment.model_dump() | environment
        return AgentTask.model_validate(task.model_dump() | {"environment": changed})

    def results(self, run_id: str, timeout: float = 120) -> list[TaskResult]:
        return self.flow.run(UUID(run_id)).results(timeout=timeout)

    def pid(self, program: str) -> int:
        """Of a process under the supervisor."""
        return next(int(state.pid) for state in supervisor.states(self.settings) if state.name == program)


@contextmanager
def bare_folder() -> Iterator[Path]:
    """A folder with a short path, while no setting of this process's environment holds."""
    with pytest.MonkeyPatch.context() as patch, short_folder() as folder:
        unset(patch)
        yield folder


@contextmanager
def up(settings: Settings) -> Iterator[MegaFlow]:
    """The system of these settings, of which nothing stays, even when not all of it came up."""
    try:
        lifecycle.up(settings, print)
        with MegaFlow(settings) as flow:
            yield flow
    finally:
        lifecycle.down(settings, print, purge=True)


@pytest.fixture(scope="module")
def worker_image(base_image_tag: str) -> str:
    """Built when the engine has none with this content."""
    build_image("worker-image", base_image_tag)
    return os.environ.get("WORKER_TAG", "megaflow/worker:latest")


def build_image(script: str, base_image_tag: str) -> None:
    """By a script of scripts/."""
    environment = os.environ | {"VENV": sys.prefix, "BASE_IMAGE": base_image_tag}
    done = subprocess.run(["sh", str(ROOT / "scripts" / script)], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        missing(f"{script}: {done.stderr.strip()[-500:]}")


def slow_task(folder: Path, seconds: int = 5) -> Path:
    """A task of the demo whose solution takes this time."""
    task = folder / "slow-report"
    shutil.copytree(DEMO / "tasks" / "access-log-report", task)
    solution = task / "solution" / "solve.sh"
    solution.write_text(solution.read_text().replace("set -eu\n", f"set -eu\nsleep {seconds}\n"))
    return task


@pytest.fixture(scope="package")
def system(base_image_tag: str) -> Iterator[System]:
    """Started once for all acceptance tests that only use it; those that break things put them right again."""
    with running(base_image_tag) as found:
        yield found


@contextmanager
def running(base_image_tag: str, **changes: Any) -> Iterator[System]:
    """A system of the block's own, with some settings changed."""
    with bare_folder() as folder:
        settings = settings_in(
            folder,
            base_image=base_image_tag,
            replay_scripts=(_slow_conversations(folder / "scripts"), scripts(folder / "matrix")),
            agent_manifests=(EXAMPLE,),
            swe_agent_source=stand_in(folder / "swe-agent"),
            model_prices=_prices(folder / "prices.yaml"),
            **QUICK,
            gateway_patience_s=20.0,
            ephemeral_idle_s=15.0,
            **changes,
        )
        kept_tools().mkdir(exist_ok=True)
        settings.home.mkdir()
        settings.tools.symlink_to(kept_tools())
        with up(settings) as flow:
            yield System(settings, flow)
        assert leftovers.processes(settings) == []


def _slow_conversations(folder: Path) -> Path:
    """The demo's conversation about a terminal task, each answer after a moment: the model `scenario-slow`."""
    folder.mkdir()
    script = yaml.safe_load((DEMO_SCRIPTS / "csv-to-jsonl.yaml").read_text())
    script["match"] = None
    for turn in script["turns"]:
        turn["delay_s"] = 2.0
    (folder / "slow.yaml").write_text(yaml.safe_dump(script))
    return folder


def _prices(file: Path) -> Path:
    """US dollars per million tokens of the model `priced`, which the replay engine plays, too."""
    file.write_text(yaml.safe_dump({"priced": {"prompt": 5.0, "completion": 20.0}}))
    return file


TASK_TOML = """\
version = "1.0"
[metadata]
[agent]
timeout_sec = {agent_s}
[verifier]
timeout_sec = {verifier_s}
[environment]
allow_internet = false
"""


@pytest.fixture
def task_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a task in the Harbor format; its solution and its test are shell."""

    def write(
        name: str = "slow-task",
        *,
        solve: str = "echo done > answer",
        test: str = "grep -q done answer && echo 1 > $OUT || echo 0 > $OUT",
        dockerfile: str = "ARG BASE_IMAGE=megaflow/base:bookworm\nFROM ${BASE_IMAGE}\nWORKDIR /app\n",
        agent_s: float = 120,
        verifier_s: float = 60,
    ) -> Path:
        folder = tmp_path / name
        files = {
            "task.toml": TASK_TOML.format(agent_s=agent_s, verifier_s=verifier_s),
            "instruction.md": f"Solve {name}.",
            "environment/Dockerfile": dockerfile,
            "solution/solve.sh": solve,
            "tests/test.sh": f'OUT="${{LOGS_DIR:-/logs}}/verifier/reward.txt"\n{test}\n',
        }
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
        return folder

    return write
