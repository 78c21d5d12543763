"""The reference trainer, in an environment of its own with torch (`make test-extra`)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.extra
@pytest.mark.timeout(1800)
def test_the_trainer_keeps_what_it_promises() -> None:
    subprocess.run(["sh", "scripts/train-environment"], cwd=ROOT, check=True, timeout=1500)
    command = [".venv-train/bin/python", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/training/trainer_checks.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout
