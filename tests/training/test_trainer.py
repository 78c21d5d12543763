"""The reference trainer, in an environment of its own with torch (`make test-extra`)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.extra
@pytest.mark.timeout(3600)
def test_the_trainer_keeps_what_it_promises() -> None:
    for home, checks, passed in (
        ("train", "trainer_checks.py", 10),
        ("train", "loop_checks.py", 2),
        ("verl", "verl_checks.py", 11),
        ("verl", "causal_checks.py", 1),
    ):
        subprocess.run(["sh", "scripts/train-environment", home], cwd=ROOT, check=True, timeout=1500)
        options = ("-q", "-n", "0", "-p", "no:cacheprovider", "--timeout=1500")
        command = [f".venv-{home}/bin/python", "-m", "pytest", *options]
        done = subprocess.run(
            [*command, f"tests/training/{checks}"], cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{passed} passed" in done.stdout


@pytest.mark.extra
@pytest.mark.docker
@pytest.mark.timeout(3600)
def test_trl_trains_through_the_gateway_and_the_hand_out() -> None:
    subprocess.run(["sh", "scripts/train-environment", "trl"], cwd=ROOT, check=True, timeout=1800)
    command = [".venv-trl/bin/python", "-m", "bench.training.with_trl", "--steps", "12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"version"')]
    assert [step["version"] for step in steps] == [f"v{2 * number}" for number in range(12)]
    rewards = [step["reward"] for step in steps]  # of 32 attempts each: one step may be off by 0.2
    assert mean(rewards[-6:]) > mean(rewards[:3]) + 0.1, rewards
