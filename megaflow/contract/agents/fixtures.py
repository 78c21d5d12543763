"""Fixtures of the suite. They need the fixtures `subject` and `tools` of the suite's user."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from app.agents.base import Agent
from app.agents.framework import Framework, Placement
from app.agents.running import FrameworkAgent
from app.environments import provider_for
from app.environments.contract import Environment, EnvironmentProvider
from app.models.shell import CancelToken
from app.models.spec import Build, Bundle, EnvironmentKind, EnvironmentSpec, Limits
from app.settings import Settings
from megaflow.contract.agents.subject import Subject
from megaflow.contract.agents.trial import NeverCancelled, Trial, TrialStage, write_scripts
from megaflow.contract.environments.fixture import sweep_all, tags_of, tar_of

__all__ = ["Play", "agent", "engine_url", "environment", "framework", "play", "provider", "stage"]

Play = Callable[..., Trial]
_CONTEXT = tar_of({"setup.sh": b""})
"""A build context that needs nothing."""
LIMITS = Limits(agent_timeout_s=600, command_timeout_s=60, max_steps=6)
"""Enough for any scene that ends: an agent that still runs then does not end in bounded time."""
_LONGEST_WAIT_S = 60.0
_INSTALLATION = "agents-contract"


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Starts the replay engine with the trial's scenes, as a process; yields its URL."""
    folder = tmp_path_factory.mktemp("scenes")
    write_scripts(folder)
    port = _free_port()
    argv = [sys.executable, "-m", "app.model_service.replay", "--port", str(port), "--scripts", str(folder)]
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603
    try:
        wait_until(lambda: process.poll() is not None or _answers(f"http://127.0.0.1:{port}/health"))
        assert process.poll() is None, (folder / "engine.log").read_text()
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def framework(subject: Subject, tools: Path) -> Framework:
    """Returns the framework, and installs it if it is missing."""
    adapter = subject.make(tools)
    adapter.install()
    return adapter


@pytest.fixture(scope="module")
def agent(framework: Framework) -> Agent:
    return FrameworkAgent(framework)


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentProvider]:
    settings = Settings(home=tmp_path_factory.mktemp("home"), installation=_INSTALLATION)
    local_provider = provider_for(EnvironmentKind.LOCAL, settings, lambda bundle: _CONTEXT)
    yield local_provider
    sweep_all(settings)


@pytest.fixture
def environment(provider: EnvironmentProvider) -> Iterator[Environment]:
    bundle = Bundle(sha256=hashlib.sha256(_CONTEXT).hexdigest(), size_bytes=len(_CONTEXT))
    spec = EnvironmentSpec(kind=EnvironmentKind.LOCAL, build=Build(context=bundle))
    local_environment = provider.create(spec, tags_of(_INSTALLATION), timeout_s=60)
    yield local_environment
    local_environment.destroy()


@pytest.fixture
def stage(environment: Environment, engine_url: str, framework: Framework) -> TrialStage:
    inside = framework.placement is Placement.INSIDE
    bundle = framework.install()
    tools = {bundle.name: str(bundle.folder)} if inside else {}
    trial_stage = TrialStage(environment, engine_url, engine_url if inside else None, tools)
    trial_stage.prepare()
    return trial_stage


@pytest.fixture
def play(stage: TrialStage, agent: Agent, tmp_path: Path) -> Play:
    """Returns a function that plays one scene and returns the trial."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def played(scene: str, *, limits: Limits = LIMITS, cancel: CancelToken | None = None) -> Trial:
        return stage.play(agent, scene, scratch, limits, cancel or NeverCancelled())

    return played


def wait_until(condition: Callable[[], object], patience_s: float = _LONGEST_WAIT_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5):
            return True
    except (URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
