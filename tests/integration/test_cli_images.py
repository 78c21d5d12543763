"""`megaflow images …` as a person uses it: a real engine, a real registry, a real ledger."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from app.errors import SettingsInvalid, UnknownName
from app.images.task_images import Images
from app.ledger import accept
from app.ledger.accept import NewRun
from app.ledger.database import Database
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.integration.command import CommandLine
from tests.integration.test_image_upcoming import spec
from tests.integration.test_images import age

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


def test_a_dataset_is_synced_listed_and_evicted(
    megaflow: CommandLine, settings: Settings, registry: str, tmp_path: Path, database: Database
) -> None:
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
    synced = [done["target"] for done in said["images"] if done["outcome"] == "built"]

    age(settings)
    listed = {line["image"]: line for line in megaflow.json("images", "list")}
    assert len(listed) == 2
    assert all(line["stays"] is None and line["needed_at"] is None for line in listed.values())
    gone = megaflow.json("images", "evict", *listed)
    assert sorted(gone["evicted"]) == sorted(listed)
    assert megaflow.json("images", "list") == []

    accept.accept(database, NewRun([spec(EnvironmentSpec(image=image)) for image in synced]), settings)
    for one in synced:
        Images(settings, fetch_bundle=lambda _: b"").ensure(EnvironmentSpec(image=one), timeout_s=60)
    [near, far] = megaflow.json("images", "list")
    assert (near["image"], near["needed_at"], near["waiting"]) == (synced[0], 1, 1)
    assert far["needed_at"] == 2
    age(settings)
    megaflow.use(settings.model_copy(update={"image_disk_high": 1.5, "image_disk_low": 1.5}))
    assert megaflow.json("images", "evict", "--dry-run") == {
        "evicted": [],
        "would_evict": [synced[1], synced[0]],
        "in_use": [],
    }
    assert "evicted" in megaflow.run("images", "evict").stdout
    assert megaflow.json("images", "list") == []


def test_what_builds_said_is_listed_and_shown(megaflow: CommandLine, registry: str, tmp_path: Path) -> None:
    assert megaflow.run("images", "log").stdout == "no build has a log\n"
    megaflow.run(
        "images",
        "sync",
        dataset(tmp_path / "set", GOOD, BAD),
        "--to",
        f"{registry}/set-{uuid.uuid4().hex[:8]}",
        "--jobs",
        1,
    )
    [bad, good] = megaflow.run("images", "log").stdout.split()
    assert "COPY nonce /nonce" in megaflow.run("images", "log", good.partition(".")[0]).stdout
    assert "ImageBuildFailed" in megaflow.run("images", "log", bad).stdout
    with pytest.raises(UnknownName, match="build log 'no-such-build'"):
        megaflow.run("images", "log", "no-such-build")


def test_wrong_input_is_told(megaflow: CommandLine, tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match="--to"):
        megaflow.run("images", "sync", dataset(tmp_path / "set", GOOD))
    with pytest.raises(UnknownName, match="no-such-image"):
        megaflow.run("images", "evict", "no-such-image")


def test_without_a_ledger_the_images_are_shown_all_the_same(
    megaflow: CommandLine, settings: Settings, tmp_path: Path
) -> None:
    megaflow.use(
        settings.model_copy(update={"database_url": type(settings.database_url)(f"postgresql:///x?host={tmp_path}")})
    )  # type: ignore[misc]
    shown = megaflow.run("images", "list", "--all")
    assert "the queue is not known" in shown.output
    assert settings.base_image in shown.output
