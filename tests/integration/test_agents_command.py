"""`megaflow agents`: what there is, installing it, trying it out."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog
import typer
from typer.testing import CliRunner

from app.agents.external import read
from app.agents.external.framework import ExternalFramework
from app.agents.installation import Installer
from app.cli import agents
from app.cli.agent_trial import TrialFindings, Where, _environment
from app.environments.sweeper import Sweeper
from app.errors import MegaFlowError
from app.models.spec import EnvironmentKind
from app.settings import Settings
from tests.contract.agents.example import EXAMPLE

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


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str

    def told(self) -> Any:
        assert self.stdout, self.stderr
        return json.loads(self.stdout)


Run = Callable[..., Done]


@pytest.fixture
def megaflow(tmp_path: Path, manifests: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """The command in this process, as `main` would begin and end it."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    cli = typer.Typer()
    agents.register(cli)

    def run(*words: str) -> Done:
        settings = Settings(home=tmp_path / "home", agent_manifests=tuple(manifests))
        monkeypatch.setattr(agents, "load", lambda: settings)
        result = CliRunner().invoke(cli, ["agents", *words])
        if isinstance(result.exception, MegaFlowError):
            return Done(result.exception.exit_code, result.stdout, f"{result.stderr}{result.exception}")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(result.exit_code, result.stdout, result.stderr)

    yield run
    structlog.reset_defaults()


def test_all_agents_are_listed_and_nothing_is_installed_by_that(tmp_path: Path, megaflow: Run) -> None:
    found = {one["name"]: one for one in megaflow("list", "--json").told()}
    assert {"oracle", "nop", "replay", "mini-swe-agent", "claude-code", "qwen-code", "openhands", "swe-agent"} < set(
        found
    )
    assert (found["oracle"]["installed"], found["mini-swe-agent"]["installed"]) == (None, False)
    assert (found["mini-swe-agent"]["runs"], found["claude-code"]["runs"]) == ("outside", "inside")
    assert (found["claude-code"]["dialect"], found["mini-swe-agent"]["dialect"]) == ("messages", "chat")
    assert (found["sketch"]["installed"], found["installed"]["installed"]) == (True, False)
    assert found["sketch"]["size_bytes"] > 0
    assert not (tmp_path / "home" / "tools").exists()
    shown = megaflow().stdout
    assert "mini-swe-agent" in shown
    assert "sketch" in shown


def test_what_is_named_is_installed_once_and_listed_as_such(tmp_path: Path, megaflow: Run) -> None:
    first = megaflow("install", "installed", "--json").told()
    assert (first[0]["agent"], first[0]["version"]) == ("installed", "7")
    folder = Path(first[0]["folder"])
    assert (folder / "run").is_file()
    assert megaflow("install", "installed", "--json").told()[0]["folder"] == str(folder)
    assert (tmp_path / "installs.txt").read_text() == "run\n"
    found = {one["name"]: one for one in megaflow("list", "--json").told()}
    assert found["installed"]["installed"]


def test_what_cannot_be_installed_is_told_and_the_rest_is_done(tmp_path: Path, megaflow: Run) -> None:
    (tmp_path / "run").unlink()
    done = megaflow("install", "installed", "sketch")
    assert done.returncode == 69
    assert "No such file" in done.stderr
    assert "not installed: installed" in done.stderr
    assert "sketch 1:" in done.stderr


def test_a_wrong_name_is_refused_before_anything_is_installed(tmp_path: Path, megaflow: Run) -> None:
    done = megaflow("install", "installed", "nobody")
    assert done.returncode == 64
    assert "unknown framework 'nobody'; known: " in done.stderr
    assert not (tmp_path / "installs.txt").exists()


def test_an_agent_that_works_is_found_to(tmp_path: Path, megaflow: Run) -> None:
    done = megaflow("check", "sketch", "--json")
    assert done.returncode == 0, done.stderr
    found = done.told()
    assert (found["ok"], found["solved"], found["end_reason"], found["turns"]) == (True, True, "submitted", 3)
    assert set(found["times_s"]) == {"install", "environment", "work"}
    assert found["left"] == []
    assert "works" in megaflow("check", "sketch").stdout


def test_an_agent_that_does_not_work_is_found_not_to_with_the_reason(tmp_path: Path, megaflow: Run) -> None:
    done = megaflow("check", "broken")
    assert done.returncode == 1
    assert "does not work" in done.stdout
    assert "agent_error" in done.stdout
    assert "I give up" in done.stdout


def test_what_needs_no_check_and_what_cannot_be_says_so(tmp_path: Path, megaflow: Run) -> None:
    assert megaflow("check", "oracle").returncode == 0
    assert megaflow("check", "nobody").returncode == 64
    assert "unknown kind of environment 'cloud'" in megaflow("check", "sketch", "--in", "cloud").stderr
    no_source = megaflow("check", "swe-agent")
    assert no_source.returncode == 1
    assert "MEGAFLOW_SWE_AGENT_SOURCE" in no_source.stdout


def test_a_wrong_manifest_is_named(tmp_path: Path, megaflow: Run) -> None:
    (tmp_path / "broken.toml").write_text("name = 3")
    done = megaflow("list")
    assert done.returncode == 78
    assert "broken.toml" in done.stderr


@pytest.mark.docker
def test_a_running_stacks_sweeper_lets_a_trial_be(tmp_path: Path, base_image_tag: str) -> None:
    settings = Settings(home=tmp_path / "home", installation=f"test-{uuid.uuid4().hex[:8]}", container_runtime="docker")
    framework = ExternalFramework(read(EXAMPLE), Installer(tmp_path / "tools"))
    where, found = Where(EnvironmentKind.DOCKER, base_image_tag), TrialFindings("sketch", "1")
    with _environment(framework, settings, where, tmp_path, found) as environment:
        time.sleep(3.5)  # older than what a sweeper takes for just made
        assert Sweeper(settings).sweep(live_instances=set()).removed == 0
        assert environment.run("true", timeout_s=30).ok
