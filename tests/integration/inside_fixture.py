"""What the tests of frameworks that act inside share: a scripted model, and a container that reaches it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app.agents.framework import Framework, FrameworkBundle
from app.agents.running import FrameworkAgent
from app.environments import provider_for
from app.environments.networks.model_port import open_model_egress
from app.environments.tools import tool_inside
from app.models.endings import EndReason
from app.models.spec import EnvironmentKind, EnvironmentSpec, Limits
from app.settings import Settings
from megaflow.contract.agents.fixtures import wait_until
from megaflow.contract.agents.trial import KEY, NeverCancelled, Trial, TrialStage, write_scripts
from megaflow.contract.environments.fixture import tags_of

SEEN = "seen.txt"
ENV_SCENE = f'[{{thought: I look around, command: "env > {SEEN}; echo HOME=$HOME >> {SEEN}"}}, {{submit: true}}]'
"""The model has its command's variables written down."""


def kept_tools() -> Path:
    """Kept between test runs: hundreds of megabytes for each framework, addressed by their lock files."""
    return Path(tempfile.gettempdir()) / f"megaflow-test-tools-{os.getuid()}"


@contextmanager
def scripted_engine(folder: Path, **scenes: str) -> Iterator[str]:
    """The base URL of a replay engine with the trial's scenes and `scenes`."""
    write_scripts(folder)
    for name, turns in scenes.items():
        (folder / f"trial-{name}.yaml").write_text(f"match: null\nturns: {turns}\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    argv = [sys.executable, "-m", "app.model_service.replay", "--port", str(port), "--scripts", str(folder)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: _answers(f"http://127.0.0.1:{port}/health"))
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(20)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


@contextmanager
def container_stage(settings: Settings, image: str, bundle: FrameworkBundle, engine: str) -> Iterator[TrialStage]:
    """The trial's repository in a container without a network, with the framework and a way to the model."""
    by = settings.model_copy(update={"container_runtime": "docker"})
    provider = provider_for(EnvironmentKind.DOCKER, by, lambda _: b"", tools=lambda _: bundle.folder)
    spec = EnvironmentSpec(image=image, tools=(bundle.name,))
    environment = provider.create(spec, tags_of(settings.installation), timeout_s=120)
    try:
        inside, _ = open_model_egress(environment.forward, engine, port=0)  # it ends with the environment
        tools = {bundle.name: tool_inside(EnvironmentKind.DOCKER, bundle.name, bundle.folder)}
        stage = TrialStage(environment, engine, inside, tools)
        stage.prepare()
        yield stage
    finally:
        environment.destroy()


def look_inside(stage: TrialStage, framework: Framework, folder: Path, limits: Limits, *foreign: str) -> Trial:
    """The trial whose command writes its variables down: they are the task's own, and nothing of these is in them."""
    trial = stage.play(FrameworkAgent(framework), "look", folder, limits, NeverCancelled())
    assert trial.report.end_reason is EndReason.SUBMITTED, trial.report
    seen = stage.environment.get(f"/testbed/{SEEN}").decode()
    home = stage.environment.run("echo $HOME", timeout_s=20).stdout.decode().strip()
    assert f"HOME={home}\n" in seen
    assert [word for word in (KEY, *foreign) if word in seen] == []
    kept = [file for file in folder.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]
    assert kept == []
    return trial


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"), installation="test-inside")


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The scripted model of the module's `SCENES`."""
    with scripted_engine(tmp_path_factory.mktemp("scenes"), **request.module.SCENES) as url:
        yield url


@pytest.fixture
def stage(settings: Settings, base_image_tag: str, framework: Framework, engine: str) -> Iterator[TrialStage]:
    """For the module's `framework`."""
    with container_stage(settings, base_image_tag, framework.install(), engine) as made:
        yield made
