"""`megaflow images …` as a person uses it: a real engine, a real registry, a real ledger."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from structlog.testing import capture_logs
from typer.testing import CliRunner

from app.artifacts import open_store
from app.artifacts.bundles import fetch_bundle, store_bundle
from app.cli import images
from app.errors import SettingsInvalid, UnknownName
from app.host.engine import Engine
from app.images.compose_images import Parts
from app.images.metadata import ImageMetadata
from app.images.task_images import Images
from app.ledger import accept
from app.ledger.accept import NewRun
from app.ledger.database import Database
from app.models.spec import Compose, EnvironmentSpec, Mode, TaskSpec
from app.settings import Settings
from tests.building import a_task
from tests.integration import test_images
from tests.services import MakeSettings

pytestmark = pytest.mark.docker

registry = test_images.registry


@pytest.fixture
def settings(make_settings: MakeSettings, base_image_tag: str) -> Settings:
    return make_settings()


class Commands:
    """Runs `megaflow images …` in this process."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.use(settings)
        self._cli = typer.Typer()
        images.register(self._cli)

    def use(self, settings: Settings) -> None:
        self._monkeypatch.setattr("app.client.load", lambda: settings)

    def __call__(self, *arguments: object) -> Result:
        with capture_logs():  # which `main` keeps off standard output
            result = CliRunner().invoke(self._cli, ["images", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def json(self, *arguments: object) -> Any:
        return json.loads(self(*arguments, "--json").stdout)


@pytest.fixture
def run(settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(settings, monkeypatch)


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
    run: Commands, settings: Settings, registry: str, tmp_path: Path, database_url: str
) -> None:
    to = f"{registry}/set-{uuid.uuid4().hex[:8]}"
    folder = dataset(tmp_path / "set", GOOD, BAD, GOOD)
    first = run("sync", folder, "--to", to, "--json")
    assert first.exit_code == 1
    said = json.loads(first.stdout)
    assert (said["built"], said["failed"], said["present"]) == (2, 1, 0)
    assert [done["error"] for done in said["images"] if done["outcome"] == "failed"] == ["ImageBuildFailed"]
    again = run("sync", folder, "--to", to, "--task", "task-0", "--task", "task-2")
    assert again.exit_code == 0, again.output
    assert "2 present" in again.stdout
    synced = [done["target"] for done in said["images"] if done["outcome"] == "built"]

    age(settings)
    listed = {line["image"]: line for line in run.json("list")}
    assert len(listed) == 2
    assert all(line["stays"] is None and line["needed_at"] is None for line in listed.values())
    gone = run.json("evict", *listed)
    assert sorted(gone["evicted"]) == sorted(listed)
    assert run.json("list") == []

    enqueue(settings, *synced)
    for one in synced:
        Images(settings, fetch_bundle=lambda _: b"").ensure(EnvironmentSpec(image=one), timeout_s=60)
    [near, far] = run.json("list")
    assert (near["image"], near["needed_at"], near["waiting"]) == (synced[0], 1, 1)
    assert far["needed_at"] == 2
    age(settings)
    low = settings.model_copy(update={"image_disk_high": 1.5, "image_disk_low": 1.5})
    run.use(low)
    assert run.json("evict", "--dry-run") == {"evicted": [], "would_evict": [synced[1], synced[0]], "in_use": []}
    assert "evicted" in run("evict").stdout
    assert run.json("list") == []


def age(settings: Settings) -> None:
    """Two minutes pass: what was just used may go."""
    for file in ImageMetadata(settings)._folder.glob("*.json"):
        os.utime(file, (time.time() - 120, time.time() - 120))


def enqueue(settings: Settings, *wanted: str | EnvironmentSpec) -> None:
    """Tasks that need these, by reference or as a whole."""
    database = Database(settings.database())
    environments = [EnvironmentSpec(image=one) if isinstance(one, str) else one for one in wanted]
    specs = [
        TaskSpec(
            task=a_task(f"t-{n}").model_copy(update={"environment": environment}), agent="nop", mode=Mode.EPHEMERAL
        )
        for n, environment in enumerate(environments)
    ]
    accept.accept(database, NewRun(specs=specs), settings)
    database.close()


def test_a_project_of_several_containers_is_shown_image_by_image(
    run: Commands, settings: Settings, engine: Engine, base_image_tag: str, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good / "web", bad):
        folder.mkdir(parents=True)
    services = f"{{main: {{image: '{base_image_tag}'}}, web: {{build: ./web}}, twin: {{build: ./web}}}}"
    (good / "docker-compose.yaml").write_text(f"services: {services}")
    (good / "web" / "Dockerfile").write_text(GOOD)
    (good / "web" / "nonce").write_text(uuid.uuid4().hex)
    (bad / "docker-compose.yaml").write_text("services: {}")
    store = open_store(settings.artifacts(), endpoint_url=None)
    contexts = [store_bundle(store, folder) for folder in (good, bad)]
    enqueue(settings, *(EnvironmentSpec(compose=Compose(context=context)) for context in contexts), base_image_tag)

    parts = Parts(settings, fetch_bundle=lambda bundle: fetch_bundle(store, bundle))
    images = Images(settings, fetch_bundle=parts.fetch)
    for part in parts.of(EnvironmentSpec(compose=Compose(context=contexts[0]))):
        images.ensure(part, timeout_s=60)
    [shown] = [line for line in run.json("list") if line["image"].startswith("megaflow/task:")]
    assert (shown["needed_at"], shown["waiting"]) == (1, 1)


def test_what_a_container_uses_is_not_evicted_by_name_and_the_exit_code_says_so(
    run: Commands, settings: Settings, engine: Engine, registry: str, tmp_path: Path
) -> None:
    run("sync", dataset(tmp_path / "set", GOOD), "--to", f"{registry}/set-{uuid.uuid4().hex[:8]}")
    [line] = run.json("list")
    container = engine.api.create_container(line["image"], command=["/nothing"])["Id"]
    try:
        stayed = run("evict", line["id"])
        assert (stayed.exit_code, stayed.stdout.split(":")[0]) == (1, "in use, stays")
        assert run.json("list")[0]["stays"] == "in use"
    finally:
        engine.remove(container)
    assert run("evict", line["id"]).exit_code == 0


def test_pages_for_people_say_what_matters(run: Commands, settings: Settings) -> None:
    page = run().stdout
    assert "images go above 90% until 80%" in " ".join(page.split())
    assert "last used" in page
    assert settings.base_image in run("list", "--all").stdout


def test_what_builds_said_is_listed_and_shown(run: Commands, registry: str, tmp_path: Path) -> None:
    assert run("log").stdout == ""
    run("sync", dataset(tmp_path / "set", GOOD, BAD), "--to", f"{registry}/set-{uuid.uuid4().hex[:8]}", "--jobs", 1)
    [bad, good] = run("log").stdout.split()
    assert "COPY nonce /nonce" in run("log", good.partition(".")[0]).stdout
    assert "ImageBuildFailed" in run("log", bad).stdout
    with pytest.raises(UnknownName, match="build log 'no-such-build'"):
        run("log", "no-such-build")


def test_wrong_input_is_told(run: Commands, tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match="--to"):
        run("sync", dataset(tmp_path / "set", GOOD))
    with pytest.raises(UnknownName, match="no-such-image"):
        run("evict", "no-such-image")


def test_without_a_ledger_the_images_are_shown_all_the_same(run: Commands, settings: Settings, tmp_path: Path) -> None:
    run.use(
        settings.model_copy(update={"database_url": type(settings.database_url)(f"postgresql:///x?host={tmp_path}")})
    )  # type: ignore[misc]
    shown = run("list", "--all")
    assert "the queue is not known" in shown.output
    assert settings.base_image in shown.output
