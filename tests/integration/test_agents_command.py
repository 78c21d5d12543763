"""`megaflow agents`: what there is, installing it, trying it out."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest

from app.agents.external import read
from app.agents.external.framework import ExternalFramework
from app.agents.installation import Installer
from app.cli.agent_trial import TrialFindings, Where, _environment
from app.environments.sweeper import Sweeper
from app.errors import AgentUnavailable, MegaFlowError, SettingsInvalid, UnknownName
from app.models.spec import EnvironmentKind
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
check = ["test", "-f", "{tool}/run"]
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
    assert found["sketch"]["size_bytes"] > 0
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


def test_an_agent_that_works_is_found_to(tmp_path: Path, megaflow: CommandLine) -> None:
    found = megaflow.json("agents", "check", "sketch")
    assert (found["ok"], found["solved"], found["end_reason"], found["turns"]) == (True, True, "submitted", 3)
    assert set(found["times_s"]) == {"install", "environment", "work"}
    assert found["left"] == []
    assert "works" in megaflow("agents", "check", "sketch")


def test_an_agent_that_does_not_work_is_found_not_to_with_the_reason(tmp_path: Path, megaflow: CommandLine) -> None:
    done = megaflow.run("agents", "check", "broken")
    assert done.exit_code == 1
    assert "does not work" in done.stdout
    assert "agent_error" in done.stdout
    assert "I give up" in done.stdout


def test_what_needs_no_check_and_what_cannot_be_says_so(tmp_path: Path, megaflow: CommandLine) -> None:
    assert megaflow.run("agents", "check", "oracle").exit_code == 0
    with pytest.raises(UnknownName):
        megaflow("agents", "check", "nobody")
    with pytest.raises(MegaFlowError, match="unknown kind of environment 'cloud'"):
        megaflow("agents", "check", "sketch", "--in", "cloud")
    no_source = megaflow.run("agents", "check", "swe-agent")
    assert no_source.exit_code == 1
    assert "MEGAFLOW_SWE_AGENT_SOURCE" in no_source.stdout


def test_a_wrong_manifest_is_named(tmp_path: Path, megaflow: CommandLine) -> None:
    (tmp_path / "broken.toml").write_text("name = 3")
    with pytest.raises(SettingsInvalid, match=r"broken\.toml"):
        megaflow("agents", "list")


@pytest.mark.docker
def test_a_running_stacks_sweeper_lets_a_trial_be(tmp_path: Path, base_image_tag: str) -> None:
    settings = Settings(home=tmp_path / "home", installation=f"test-{uuid.uuid4().hex[:8]}", container_runtime="docker")
    framework = ExternalFramework(read(EXAMPLE), Installer(tmp_path / "tools"))
    where, found = Where(EnvironmentKind.DOCKER, base_image_tag), TrialFindings("sketch", "1")
    with _environment(framework, settings, where, tmp_path, found) as environment:
        time.sleep(3.5)  # older than what a sweeper takes for just made
        assert Sweeper(settings).sweep(live_instances=set()).removed == 0
        assert environment.run("true", timeout_s=30).ok
