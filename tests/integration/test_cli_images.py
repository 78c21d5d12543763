"""`megaflow images …` as a person uses it: a real engine, a real registry, a real ledger."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from tests.integration.command import CommandLine

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("base_image_tag")]


def dataset(folder: Path, *recipes: str) -> Path:
    """A task folder in the first Terminal-Bench format for each recipe."""
    for number, recipe in enumerate(recipes):
        task = folder / f"task-{number}"
        (task / "tests").mkdir(parents=True)
        (task / "task.yaml").write_text("instruction: do it\n")
        (task / "run-tests.sh").write_text("true\n")
        (task / "Dockerfile").write_text(recipe)
        (task / "nonce").write_text(uuid.uuid4().hex)
    return folder


GOOD, BAD = "FROM scratch\nCOPY nonce /nonce\n", "FROM scratch\nCOPY missing /\n"


def test_a_dataset_is_synced(megaflow: CommandLine, registry: str, tmp_path: Path) -> None:
    to = f"{registry}/set-{uuid.uuid4().hex[:8]}"
    folder = dataset(tmp_path / "set", GOOD, BAD, GOOD)
    first = megaflow.run("images", "sync", folder, "--to", to, "--json")
    assert first.exit_code == 1
    said = json.loads(first.stdout)
    assert (said["built"], said["failed"], said["present"]) == (2, 1, 0)
    assert [done["error"] for done in said["images"] if done["outcome"] == "failed"] == ["ImageBuildFailed"]
    again = megaflow.run("images", "sync", folder, "--to", to, "--task", "task-0", "--task", "task-2")
    assert again.exit_code == 0, again.output
    assert "2 present" in again.stdout
