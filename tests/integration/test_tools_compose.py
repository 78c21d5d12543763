"""Tools in an environment of several containers: the main service sees them, the others do not."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.environments.runtimes.compose.provider import ComposeProvider
from app.environments.tools import tool_inside
from app.models.spec import EnvironmentKind
from app.settings import Settings
from tests.integration.test_compose_environment import STORED, spec_of, tags_of

pytestmark = pytest.mark.docker

PROJECT = """
services:
  main: {image: BASE, command: [sleep, "600"]}
  beside: {image: BASE, command: [sleep, "600"]}
"""


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    (tmp_path / "toy-1").mkdir()
    (tmp_path / "toy-1" / "words").write_text("seen\n")
    return tmp_path / "toy-1"


@pytest.fixture
def provider(tmp_path: Path, docker_engine: str, tool: Path) -> Iterator[ComposeProvider]:
    settings = Settings(home=tmp_path / "home", installation=f"test-{uuid.uuid4().hex[:8]}")
    made = ComposeProvider(settings, fetch_bundle=lambda bundle: STORED[bundle.sha256], tools=lambda name: tool)
    yield made
    made.sweep(installation=settings.installation)


def test_the_main_service_sees_a_tool_also_after_a_reset(provider: ComposeProvider, base_image_tag: str) -> None:
    spec = spec_of(PROJECT.replace("BASE", base_image_tag), tools=("toy",))
    environment = provider.create(spec, tags_of(provider._settings.installation), timeout_s=90)
    place = tool_inside(EnvironmentKind.DOCKER, "toy", Path("/elsewhere"))
    try:
        for _ in range(2):
            assert environment.run(f"cat {place}/words", timeout_s=30).text() == "seen\n"
            assert not environment.run(f"touch {place}/more", timeout_s=30).ok
            assert not environment.service("beside").run(f"test -e {place}", timeout_s=30).ok
            proof = environment.reset()
            assert proof.clean, proof
    finally:
        environment.destroy()
