"""Starting the command: what the program itself imports, and the list of its commands."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from app.cli import cli
from app.cli.catalogue import COMMANDS
from app.cli.group import Commands
from app.cli.json_keys import KEYS
from tests.forked import megaflow

HEAVY = ("sqlalchemy", "redis", "psycopg", "docker", "celery", "boto3")
SHOW = f"""
import sys
from app.cli import main
try:
    main()
finally:
    print("imported:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
"""


def imported(*arguments: str) -> tuple[int, list[str]]:
    """The command's exit code in a process of its own, and what it imported."""
    done = subprocess.run([sys.executable, "-c", SHOW, *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.strip().splitlines()[-1].removeprefix("imported:").split()


def test_the_program_itself_imports_no_servers_client() -> None:
    assert imported("--help") == (0, [])
    assert imported("sumbit") == (64, [])


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), ([], 64), (["--nonsense"], 64)])
def test_words_that_are_no_command_end_with_a_code(arguments: list[str], code: int) -> None:
    assert megaflow(*arguments).returncode == code


@pytest.mark.parametrize(("said", "meant"), [("sumbit", "submit"), ("stats", "status"), ("log", "logs")])
def test_a_misspelt_command_is_recognised(said: str, meant: str) -> None:
    assert f"'{meant}'" in megaflow(said).stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_how_its_own_help_begins(name: str) -> None:
    top: Any = typer.main.get_command(cli)
    said = " ".join((top.load(name).help or "").split())
    assert said.startswith(COMMANDS[name].help)


WITHOUT_JSON = {
    *("shell", "mcp", "experience serve"),  # hold a conversation until they are told to stop
    *("worker control", "worker persistent", "worker grading", "worker launcher"),  # as these
    "events",  # JSON lines anyway
}


def test_every_command_has_json_and_its_help_says_the_keys() -> None:
    def invoked(command: Any, words: str) -> Iterator[tuple[str, Any]]:
        if getattr(command, "invoke_without_command", True) and not command.hidden:
            yield words, command
        for name, below in getattr(command, "commands", {}).items():
            yield from invoked(below, f"{words} {name}")

    top = typer.main.get_group(cli)
    assert isinstance(top, Commands)
    found = {words: one for name in COMMANDS for words, one in invoked(top.load(name), name)}
    with_json = {words for words, one in found.items() if any(option.name == "json" for option in one.params)}
    assert set(found) - with_json == WITHOUT_JSON
    assert with_json == set(KEYS)
    for words, keys in KEYS.items():
        printed = " ".join(CliRunner().invoke(cli, [*words.split(), "--help"]).output.split())
        assert printed.endswith(f"Keys of --json: {keys}"), words


def test_a_name_in_brackets_is_printed_in_the_help() -> None:
    assert "NAME[@REVISION] (`megaflow dataset list`)" in " ".join(megaflow("submit", "--help").stdout.split())
