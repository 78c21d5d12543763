"""Starting the command: what is imported for help and for a command line that is wrong, and how that ends."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from app.cli import catalogue, cli
from app.cli.catalogue import COMMANDS
from app.cli.later import _Later

HEAVY = ("sqlalchemy", "redis", "psycopg", "docker", "celery", "boto3")
SHOW = f"""
import sys
from app.cli import main
try:
    main()
finally:
    print("imported:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
"""


def started(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own. What it imported is the last line of its standard error."""
    return subprocess.run(
        [sys.executable, "-c", SHOW, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def imported(done: subprocess.CompletedProcess[str]) -> list[str]:
    return done.stderr.strip().splitlines()[-1].removeprefix("imported:").split()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), (["--version"], 0), (["submit", "--help"], 0), ([], 64), (["sumbit"], 64), (["--nonsense"], 64)],
)
def test_the_program_itself_imports_no_servers_client(arguments: list[str], code: int) -> None:
    done = started(*arguments)
    assert done.returncode == code, done.stderr
    assert imported(done) == []


EVERY = f"""
import sys
from app.cli import main
for name in {list(COMMANDS)}:
    sys.argv = ["megaflow", name, "--no-such-option"]
    try:
        main()
    except SystemExit as ended:
        print(name, ended.code)
print("imported:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
"""


def test_a_usage_error_of_a_command_imports_no_servers_client() -> None:
    done = subprocess.run([sys.executable, "-c", EVERY], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [f"{name} 64" for name in COMMANDS]
    assert done.stderr.count("--no-such-option") >= len(COMMANDS)
    assert imported(done) == []


@pytest.mark.parametrize(("said", "meant"), [("sumbit", "submit"), ("stats", "status"), ("log", "logs")])
def test_a_misspelt_command_is_recognised(said: str, meant: str) -> None:
    assert f"'{meant}'" in started(said).stderr


def test_the_list_of_commands_is_what_the_modules_have() -> None:
    modules = {
        path.stem
        for path in Path(catalogue.__file__).parent.glob("*.py")
        if hasattr(import_module(f"app.cli.{path.stem}"), "register")
    }
    assert modules == {entry.module for entry in COMMANDS.values()}
    for module in modules:
        own = typer.Typer()
        import_module(f"app.cli.{module}").register(own)
        assert set(typer.main.get_group(own).commands) == {n for n, entry in COMMANDS.items() if entry.module == module}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_how_its_own_help_begins(name: str) -> None:
    top: Any = typer.main.get_command(cli)
    said = " ".join((top.load(name).help or "").split())
    assert said.startswith(COMMANDS[name].help)


@pytest.mark.parametrize("path", sorted(Path(catalogue.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_what_is_imported_late_is_there(path: Path) -> None:
    module = import_module(f"app.cli.{path.stem}")
    for value in vars(module).values():
        if isinstance(value, _Later):
            value._load()
    blocks = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    imported = [one for block in blocks for one in block.body if isinstance(one, ast.ImportFrom)]
    modules = {name.asname or name.name for one in imported for name in one.names if name.name.islower()}
    assert {name for name in modules if not hasattr(module, name)} == set()
