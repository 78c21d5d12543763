"""`megaflow agents`: what there is, and installing it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog
import typer
from typer.testing import CliRunner

from app.cli import agents
from app.errors import MegaFlowError
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


def test_a_wrong_manifest_is_named(tmp_path: Path, megaflow: Run) -> None:
    (tmp_path / "broken.toml").write_text("name = 3")
    done = megaflow("list")
    assert done.returncode == 78
    assert "broken.toml" in done.stderr
