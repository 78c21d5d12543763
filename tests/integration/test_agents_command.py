"""`megaflow agents`: what there is, and installing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import AgentUnavailable, SettingsInvalid, UnknownName
from app.settings import Settings
from tests.contract.agents.example import EXAMPLE
from tests.integration.command import CommandLine

BROKEN = """
protocol = "megaflow-agent/1"
name = "broken"
version = "1"
argv = ["sh", "-c", "echo I give up >&2; exit 3"]
"""
INSTALLED = """
protocol = "megaflow-agent/1"
name = "installed"
version = "7"
argv = ["sh", "{tool}/run"]
install = ["sh", "-c", "echo run >> installs.txt; cp run \\"$1\\"/run", "sh", "{tool}"]
"""


@pytest.fixture
def manifests(tmp_path: Path) -> list[Path]:
    for name, content in (("broken", BROKEN), ("installed", INSTALLED)):
        (tmp_path / f"{name}.toml").write_text(content)
    (tmp_path / "run").write_text('echo "$(pwd)"\n')
    return [EXAMPLE, tmp_path / "broken.toml", tmp_path / "installed.toml"]


@pytest.fixture
def settings(tmp_path: Path, manifests: list[Path]) -> Settings:
    return Settings(home=tmp_path / "home", agent_manifests=tuple(manifests))


def test_all_agents_are_listed_and_nothing_is_installed_by_that(tmp_path: Path, megaflow: CommandLine) -> None:
    found = {one["name"]: one for one in megaflow.json("agents", "list")}
    assert {"oracle", "nop", "replay", "mini-swe-agent", "claude-code", "qwen-code", "openhands", "swe-agent"} < set(
        found
    )
    assert (found["oracle"]["installed"], found["mini-swe-agent"]["installed"]) == (None, False)
    assert (found["mini-swe-agent"]["runs"], found["claude-code"]["runs"]) == ("outside", "inside")
    assert (found["claude-code"]["dialect"], found["mini-swe-agent"]["dialect"]) == ("messages", "chat")
    assert (found["sketch"]["installed"], found["installed"]["installed"]) == (True, False)
    assert not (tmp_path / "home" / "tools").exists()
    shown = megaflow("agents")
    assert "mini-swe-agent" in shown
    assert "sketch" in shown


def test_what_is_named_is_installed_once_and_listed_as_such(tmp_path: Path, megaflow: CommandLine) -> None:
    first = megaflow.json("agents", "install", "installed")
    assert (first[0]["agent"], first[0]["version"]) == ("installed", "7")
    folder = Path(first[0]["folder"])
    assert (folder / "run").is_file()
    assert megaflow.json("agents", "install", "installed")[0]["folder"] == str(folder)
    assert (tmp_path / "installs.txt").read_text() == "run\n"
    found = {one["name"]: one for one in megaflow.json("agents", "list")}
    assert found["installed"]["installed"]


def test_what_cannot_be_installed_is_told_and_the_rest_is_done(tmp_path: Path, megaflow: CommandLine) -> None:
    (tmp_path / "run").unlink()
    with pytest.raises(AgentUnavailable, match="not installed: installed"):
        megaflow("agents", "install", "installed", "sketch")
    assert "No such file" in megaflow.last.stderr
    assert "sketch 1:" in megaflow.last.stderr


def test_a_wrong_name_is_refused_before_anything_is_installed(tmp_path: Path, megaflow: CommandLine) -> None:
    with pytest.raises(UnknownName, match="unknown framework 'nobody'; known: "):
        megaflow("agents", "install", "installed", "nobody")
    assert not (tmp_path / "installs.txt").exists()


def test_a_wrong_manifest_is_named(tmp_path: Path, megaflow: CommandLine) -> None:
    (tmp_path / "broken.toml").write_text("name = 3")
    with pytest.raises(SettingsInvalid, match=r"broken\.toml"):
        megaflow("agents", "list")
