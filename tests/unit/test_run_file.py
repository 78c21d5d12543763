"""A run described by a file: its keys are the options of `submit`, and the command line goes before it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from app.cli import cli
from app.cli.run_file import ConfigOption
from app.cli.submission_options import SubmissionOptions, takes_options
from app.errors import MegaFlowError

FILE = """
dataset: demo
agent: mini-swe-agent
model: replay:demo
max-steps: 30
agent_timeout: 90
replicas: 4
task: ["*merge*", order-ledger]
exclude: x
network: model-only
wait: true
"""


@takes_options
def _told(
    dataset: str,
    *,
    options: SubmissionOptions,
    wait: Annotated[bool, typer.Option("--wait")] = False,
    config: ConfigOption = None,
) -> None:
    """Prints what `submit` would get."""
    typer.echo(json.dumps({"dataset": dataset, "wait": wait, **asdict(options)}))


def told(*arguments: str) -> dict[str, Any]:
    """The options of a command of the same kind, as it gets them."""
    own = typer.Typer()
    own.command()(_told)
    done = CliRunner().invoke(own, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return path


def refused(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(MegaFlowError) as found:
        CliRunner().invoke(cli, ["submit", "-c", str(path)], catch_exceptions=False)
    assert found.value.exit_code == 64
    return str(found.value)


def test_a_file_stands_for_the_options(run_yaml: Path) -> None:
    found = told("-c", str(run_yaml))
    assert found["max_steps"] == 30
    assert found["agent_timeout_s"] == 90.0
    assert found["only"] == ["*merge*", "order-ledger"]
    assert found["exclude"] == ["x"]
    assert found["wait"] is True


def test_the_command_line_goes_before_the_file(run_yaml: Path) -> None:
    found = told("rows.jsonl", "-c", str(run_yaml), "-k", "2", "-m", "other", "--task", "one")
    assert (found["dataset"], found["replicas"], found["model"], found["only"]) == ("rows.jsonl", 2, "other", ["one"])
    assert found["agent"] == "mini-swe-agent"


def test_every_option_of_the_command_is_a_key(tmp_path: Path) -> None:
    top: Any = typer.main.get_command(cli)
    options = {p.opts[0].removeprefix("--") for p in top.load("submit").params if p.opts[0].startswith("--")}
    apart = {"config", "dry-run", "json"}
    assert apart < options
    for key in options - apart:
        message = refused(tmp_path / "run.yaml", f"{key}: {{}}")
        assert message.startswith(f"{tmp_path / 'run.yaml'}: {key}: expected")


def test_a_misspelt_key_is_refused_with_the_one_that_was_meant(tmp_path: Path) -> None:
    message = refused(tmp_path / "run.yaml", "dataset: demo\nmax_step: 3")
    assert "unknown option 'max-step'; did you mean max-steps?" in message


@pytest.mark.parametrize("key", ["config", "print-config", "dry-run", "help", "some-nonsense"])
def test_what_is_no_option_of_a_run_is_refused(tmp_path: Path, key: str) -> None:
    assert f"unknown option {key!r}" in refused(tmp_path / "run.yaml", f"{key}: true")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- demo", "expected a mapping of options"),
        ("a: [", "expected a YAML file"),
        ("wait: please", "wait: expected true or false, found 'please'"),
        ("model: yes", "model: expected a value, found True"),
        ("agent: [a, b]", "agent: expected one value"),
        ("model:", "model: expected one value, found None"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(tmp_path / "run.yaml", text)


def test_a_value_of_the_wrong_kind_is_the_options_own_error(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("dataset: demo\nagent: nop\nmax-steps: many")
    done = CliRunner().invoke(cli, ["submit", "-c", str(path)])
    assert done.exit_code == 2  # `main` makes it 64
    assert "--max-steps" in done.output
