"""`pip install .` without extras: the client's commands work, the others say which extra they need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.often import params

ROOT = Path(__file__).parents[2]
Client = Callable[..., subprocess.CompletedProcess[str]]


def _run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("MEGAFLOW_")}
    return subprocess.run(
        command, env={**bare, **variables}, cwd="/", capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    """Run the command of an environment that has the package and what it depends on, nothing more."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("needs uv beside the interpreter, which `make bootstrap` installs")
    folder = tmp_path_factory.mktemp("client")
    made = _run(str(uv), "venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
    assert made.returncode == 0, made.stderr
    lock = ("--constraint", str(ROOT / "requirements/all.lock"))
    install = (str(uv), "pip", "install", "--quiet", *lock, "--python", str(folder / "venv/bin/python"))
    done = _run(*install, "--offline", str(ROOT))
    if done.returncode != 0:
        done = _run(*install, str(ROOT))
    if done.returncode != 0 and any(sign in done.stderr for sign in ("Failed to fetch", "error sending request")):
        pytest.skip(f"needs a package index or uv's cache: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    home = str(folder / "home")
    return lambda *arguments: _run(str(folder / "venv/bin/megaflow"), *arguments, MEGAFLOW_HOME=home)


CLIENT = (
    "runs | status x | show x | logs x | artifacts x | cancel x | retry x --failed | explain x | usage | events"
    " | submit demo -a oracle | schedule list | models list | limits | receipt x"
)


OFTEN = ("runs", "submit demo -a oracle")


@pytest.mark.parametrize("command", params(CLIENT.split(" | "), OFTEN))
def test_a_clients_command_gets_as_far_as_the_database(client: Client, command: str) -> None:
    done = client(*command.split())
    assert done.returncode == 69, done.stderr
    assert "expected PostgreSQL to answer" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "extras"),
    [
        ("up", "worker,model,embedded"),
        ("doctor", "worker,model,embedded"),
        ("worker control", "worker"),
        ("report x --plot x.png", "plots"),
    ],
)
def test_another_command_says_which_extra_it_needs(client: Client, command: str, extras: str) -> None:
    done = client(*command.split())
    assert done.returncode == 69, done.stderr
    assert f"try `pip install 'megaflow[{extras}]'`" in done.stderr
    assert "Traceback" not in done.stderr
