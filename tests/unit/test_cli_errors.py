"""What the command says where a home, a URL or a variable is wrong: one line, the next command, the documented code."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

import app.cli
from app.datasets.source import DEMO
from app.errors import MegaFlowError
from tests.forked import megaflow

ROOT = Path(__file__).parents[2]


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize("command", [["runs"], ["status", "x"], ["cancel", "x"], ["limits"], ["audit"]], ids=" ".join)
def test_where_nothing_runs_the_next_command_is_up(tmp_path: Path, command: list[str]) -> None:
    done = megaflow(*command, MEGAFLOW_HOME=str(tmp_path / "home"))
    assert done.returncode == 69
    assert one_line(done).endswith("try `megaflow up`")


@pytest.mark.parametrize(("command", "home"), [("up", "/proc/none/home"), ("down", "file"), ("demo", "file")])
def test_a_home_that_cannot_be_made_names_its_variable(tmp_path: Path, command: str, home: str) -> None:
    (tmp_path / "file").touch()
    done = megaflow(command, MEGAFLOW_HOME=str(tmp_path / home))
    assert done.returncode == 78
    assert one_line(done).startswith("megaflow: MEGAFLOW_HOME: expected a folder that can be made and written to")


@pytest.mark.parametrize(
    ("name", "url"), [("DATABASE_URL", "mysql://user:hidden@host/db"), ("BROKER_URL", "amqp://host")]
)
def test_a_server_of_another_kind_is_refused_by_its_variable(name: str, url: str) -> None:
    done = megaflow("runs", **{f"MEGAFLOW_{name}": url})
    assert done.returncode == 78
    assert f"MEGAFLOW_{name}" in one_line(done)
    assert "hidden" not in done.stderr


def test_a_database_that_is_down_is_named() -> None:
    done = megaflow("runs", MEGAFLOW_DATABASE_URL="postgresql://nobody@127.0.0.1:1/none")
    assert done.returncode == 69
    assert "expected PostgreSQL to answer" in one_line(done)
    assert "megaflow doctor" in done.stderr


def test_a_misspelt_setting_is_recognised() -> None:
    done = megaflow("runs", MEGAFLOW_GATEWAY_PROT="1")
    assert done.returncode == 78
    assert one_line(done) == "megaflow: unknown settings MEGAFLOW_GATEWAY_PROT; did you mean MEGAFLOW_GATEWAY_PORT?"


WRONG_WORDS = {
    "unknown command": ["sumbit", "demo"],
    "unknown option": ["runs", "--unknown"],
    "unknown agent": ["submit", "demo", "-a", "opendevin", "--dry-run"],
    "form of a factor": ["submit", "demo", "-a", "nop", "--kill-at", "banana", "--dry-run"],
    "factors of a sweep": ["sweep", "resources", "three", "demo", "-a", "nop"],
    "key and value": ["submit", "demo", "-a", "nop", "--agent-arg", "banana", "--dry-run"],
    "reward of an end": ["submit", "demo", "-a", "nop", "--reward", "submitted=banana", "--dry-run"],
    "bounds of a rate": ["submit", "demo", "-a", "nop", "--pass-rate", "banana", "--from", "x", "--dry-run"],
    "bounds without a run": ["submit", "demo", "-a", "nop", "--pass-rate", "0<p<1", "--dry-run"],
    "options that need another": ["submit", "demo", "-a", "nop", "--top-p", "0.5", "--dry-run"],
    "name of a dataset": ["dataset", "lint", "swe-bench-veryfied"],
    "path of a dataset": ["dataset", "show", "no/such/path"],
    "rules of a local copy": ["dataset", "lint", "swe-bench-veryfied=/"],
    "cron": ["schedule", "add", "nightly", "banana", "demo", "-a", "nop"],
    "fault of a simulation": ["simulate", "--fault", "banana=1"],
    "key of a run file": ["submit", "-c", "run.yaml"],
}
WRONG_DATA = {
    "row": ["dataset", "lint", "own=bad.jsonl"],
    "rows of no dataset": ["dataset", "show", "odd.jsonl"],
    "folder without tasks": ["dataset", "show", "empty"],
    "two folders of one name": ["dataset", "lint", "double"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "run.yaml").write_text("banana: 1\n")
    (folder / "bad.jsonl").write_text('{"instance_id": "a__a-1"}\n')
    (folder / "odd.jsonl").write_text('{"colour": "red"}\n')
    (folder / "empty").mkdir()
    for place in ("double/x/same", "double/y/same"):
        shutil.copytree(DEMO / "tasks/csv-to-jsonl", folder / place)
    return folder


@pytest.mark.parametrize("wrong", [*WRONG_WORDS, *WRONG_DATA])
def test_wrong_words_leave_with_64_and_wrong_data_with_65(files: Path, wrong: str) -> None:
    command, code = (WRONG_WORDS | WRONG_DATA)[wrong], 64 if wrong in WRONG_WORDS else 65
    done = megaflow(*command, cwd=files, MEGAFLOW_HOME=str(files / "home"))
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def test_an_error_of_the_system_without_a_file_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app.cli, "cli", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(SystemExit, match="74"):
        app.cli.main()
    assert capsys.readouterr().err.startswith("megaflow: could not go on: No space left on device")


def test_every_exit_code_of_an_error_is_in_the_reference() -> None:
    def codes(error: type[MegaFlowError]) -> set[int]:
        return {error.exit_code}.union(*map(codes, error.__subclasses__()))

    page = (ROOT / "docs/reference/cli.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    assert codes(MegaFlowError) <= {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
