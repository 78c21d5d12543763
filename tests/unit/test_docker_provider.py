"""What an instance in a container is told and shown; with an engine: tests/acceptance/test_docker_instances.py."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import pytest

from app.instances.docker import DockerInstances
from app.models.instance import InstanceRequest
from app.models.spec import Mode
from app.settings import Settings


def _request() -> InstanceRequest:
    return InstanceRequest(instance_id=uuid4(), mode=Mode.PERSISTENT)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    return monkeypatch


def test_an_instance_gets_the_way_to_stores_and_indexes_and_no_key_of_a_model(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "PIP_INDEX_URL": "https://packages.example.org/simple",
        "UV_DEFAULT_INDEX": "https://packages.example.org/simple",
        "UV_INDEX_MINE_PASSWORD": "c",
        "NPM_CONFIG_REGISTRY": "https://packages.example.org/npm/",
        "HTTPS_PROXY": "http://proxy.example.org:3128",
        "no_proxy": "example.org",
    }
    others = {
        "OPENAI_API_KEY": "d",
        "ANTHROPIC_API_KEY": "e",
        "ENGINE_KEY": "f",
        "UV_CACHE_DIR": "/somewhere",
        "PATH": "/usr/bin",
    }
    for name, value in {**wanted, **others}.items():
        bare.setenv(name, value)
    found = DockerInstances(Settings(home=tmp_path))._environment(_request())
    assert wanted.items() <= found.items()
    assert not others.keys() & found.keys()
    assert not {"d", "e", "f"} & set(found.values())


def test_an_instance_sees_the_folders_of_agents_that_are_not_ours(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    shared = dict(DockerInstances(Settings(home=tmp_path / "h", agent_manifests=(mine / "agent.toml",)))._shared())
    assert shared[mine] == "ro"
    assert shared[tmp_path / "h" / "tools"] == "rw"
    from_git = Settings(home=tmp_path / "h", swe_agent_source="https://git.example.org/swe-agent@v1")
    assert "ro" not in dict(DockerInstances(from_git)._shared()).values()
