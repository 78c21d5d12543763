"""What the command says where a home, a URL or a variable is wrong: one line, the next command, the documented code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("MEGAFLOW_")}
    return subprocess.run(
        [sys.executable, "-m", "megaflow", *arguments],
        env={**bare, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize("command", [["runs"], ["status", "x"], ["cancel", "x"], ["limits"], ["audit"]], ids=" ".join)
def test_where_nothing_runs_the_next_command_is_up(tmp_path: Path, command: list[str]) -> None:
    done = run(*command, MEGAFLOW_HOME=str(tmp_path / "home"))
    assert done.returncode == 69
    assert one_line(done).endswith("try `megaflow up`")


@pytest.mark.parametrize(("command", "home"), [("up", "/proc/none/home"), ("down", "file"), ("demo", "file")])
def test_a_home_that_cannot_be_made_names_its_variable(tmp_path: Path, command: str, home: str) -> None:
    (tmp_path / "file").touch()
    done = run(command, MEGAFLOW_HOME=str(tmp_path / home))
    assert done.returncode == 78
    assert one_line(done).startswith("megaflow: MEGAFLOW_HOME: expected a folder that can be made and written to")


@pytest.mark.parametrize(
    ("name", "url"), [("DATABASE_URL", "mysql://user:hidden@host/db"), ("BROKER_URL", "amqp://host")]
)
def test_a_server_of_another_kind_is_refused_by_its_variable(name: str, url: str) -> None:
    done = run("runs", **{f"MEGAFLOW_{name}": url})
    assert done.returncode == 78
    assert f"MEGAFLOW_{name}" in one_line(done)
    assert "hidden" not in done.stderr


def test_a_database_that_is_down_is_named() -> None:
    done = run("runs", MEGAFLOW_DATABASE_URL="postgresql://nobody@127.0.0.1:1/none")
    assert done.returncode == 69
    assert "expected PostgreSQL to answer" in one_line(done)
    assert "megaflow doctor" in done.stderr


def test_a_misspelt_setting_is_recognised() -> None:
    done = run("runs", MEGAFLOW_GATEWAY_PROT="1")
    assert done.returncode == 78
    assert one_line(done) == "megaflow: unknown settings MEGAFLOW_GATEWAY_PROT; did you mean MEGAFLOW_GATEWAY_PORT?"
