"""The `megaflow` command in a process of its own that has imported everything before it begins: a second less each."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from app.cli import main

SERVER = multiprocessing.get_context("forkserver")
"""Starts processes from one without threads that has imported what they need."""
SERVER.set_forkserver_preload(
    [*("pytest", "tests.forked"), *("app.client", "app.evaluation", "app.instances.launcher")]
)


def megaflow(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """What the command says in this folder, with these variables and no others of ours or of the hub."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "MEGAFLOW_"))}
    return command(arguments, others | variables, cwd=cwd)


def command(
    arguments: tuple[str, ...], environment: Mapping[str, str], *, cwd: Path | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """The same with all of its environment. Raises: TimeoutExpired."""
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        run = (arguments, dict(environment), cwd or Path.cwd(), (out.name, err.name))
        process = SERVER.Process(target=_run, args=run)
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout_s, out.read(), err.read())
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read().decode(), err.read().decode())


def _run(arguments: tuple[str, ...], environment: Mapping[str, str], cwd: Path, outputs: tuple[str, str]) -> NoReturn:
    code = 70
    try:
        for own, name in enumerate(outputs, 1):
            os.dup2(os.open(name, os.O_WRONLY), own)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["megaflow", *arguments]
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
