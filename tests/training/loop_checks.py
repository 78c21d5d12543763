"""`megaflow train` with the reference trainer: a small policy in real containers, killed between its steps.

`test_trainer.py` runs it by pytest in .venv-train, which has torch.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

from app.client import MegaFlow
from app.ledger import model_replicas
from app.ledger.model_replicas import NewReplica
from app.model_service.training.trainer import Trainer, TrainOptions
from app.models.model_calls import Dialect
from app.settings import Settings
from app.stack.home import process_environment
from bench.system import free_port
from bench.training.demo import EngineProcess, stack, write_tasks
from bench.training.engine import NAME
from bench.training.policy import TinyPolicy

STEPS = 3


def _config(folder: Path, ahead: int) -> Path:
    given = {
        "name": "tiny",
        "policy": NAME,
        "datasets": [str(folder / "tasks")],
        "frameworks": {"sketch": 1},
        "steps": STEPS,
        "max_staleness": ahead,
        "groups": 2,
        "replicas": 8,
        "mode": "persistent",
        "rewards": {"not_submitted": -0.5},
        "trainer": {
            "kind": "gspo",
            "model": "bench.training.policy:started",
            "folder": str(folder / "checkpoints"),
            "learning_rate": 2e-4,
            "minibatch": 16,
        },
    }
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(given))
    return file


def _train(settings: Settings, file: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from app.cli import main; main()", "train", str(file)]
    environment = process_environment(settings)
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_policy_is_trained_step_after_step_through_kills_of_the_loop(ahead: int) -> None:
    torch.set_num_threads(1)
    with stack(print) as (settings, folder), MegaFlow(settings) as flow:
        write_tasks(folder / "tasks")
        Trainer(TinyPolicy(), TrainOptions()).save(folder / "other.safetensors")
        engine = EngineProcess(folder / "other.safetensors", free_port(), 0, folder / "engine.log")
        try:
            model_replicas.add(
                flow.database,
                NewReplica(NAME, engine.base_url, upstream_model=NAME, policy_version="", dialects=(Dialect.CHAT,)),
            )
            file = _config(folder, ahead)
            for checkpoint in ("step-1", "step-2"):  # killed as soon as a step's weights are there
                loop = _train(settings, file)
                while not (folder / "checkpoints" / "tiny" / checkpoint).exists():
                    assert loop.poll() is None, loop.communicate()
                    time.sleep(0.05)
                loop.send_signal(signal.SIGKILL)
                loop.communicate()
            loop = _train(settings, file)
            with suppress(subprocess.TimeoutExpired):
                loop.wait(480)
            loop.kill()
            out, err = loop.communicate()
            assert loop.returncode == 0, out + err
        finally:
            engine.stop()
        with flow.database.begin() as connection:
            rows = connection.exec_driver_sql(
                "SELECT r.name, l.version, l.state FROM experience_leases l JOIN runs r ON r.id = l.run_id"
                " WHERE l.state = 'committed' ORDER BY l.committed_at"
            ).all()
            versions = connection.exec_driver_sql("SELECT version, state FROM policy_versions ORDER BY number").all()
        assert [tuple(row) for row in rows] == [
            (f"tiny-step-{step}", f"tiny-{step + 1}", "committed") for step in range(STEPS)
        ]
        assert [tuple(row) for row in versions] == [(f"tiny-{step}", "live") for step in range(STEPS + 1)]
        stale = {line.split()[4] for line in out.splitlines()[1 : STEPS + 1]}
        assert {"0"} <= stale <= {"0", str(ahead)}, out
