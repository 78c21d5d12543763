"""Every command explains itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from app.cli import cli
from app.cli.catalogue import COMMANDS


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


TOP: Any = typer.main.get_command(cli)
ALL = [(), *(path for name in COMMANDS for path in commands(TOP.load(name), (name,)))]


def test_there_are_commands_in_groups() -> None:
    assert {("submit",), ("images", "sync"), ("schedule", "add")} <= set(ALL)


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_its_help_names_it(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(cli, [*path, "--help"], prog_name="megaflow", catch_exceptions=False)
    assert shown.exit_code == 0
    assert " ".join(("Usage: megaflow", *path)) in shown.output
