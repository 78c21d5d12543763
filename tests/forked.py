"""The `megaflow` command in a fork of this process: one of its own, without the second of importing everything."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from app.cli import main
from app.settings import load


def megaflow(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """What the command says in this folder, with these variables and no others of ours or the hub's."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if (child := os.fork()) == 0:
            _run(arguments, (out.fileno(), err.fileno()), cwd, variables)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
    return subprocess.CompletedProcess(arguments, code, *said)


def _run(
    arguments: tuple[str, ...], files: tuple[int, int], cwd: Path | None, variables: Mapping[str, str]
) -> NoReturn:
    """The child: it ends here whatever happens, so that pytest goes on in one process."""
    code = 70
    try:
        for own, file in enumerate(files, 1):
            os.dup2(file, own)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(cwd or Path.cwd())
        for name in [name for name in os.environ if name.startswith(("HF_", "MEGAFLOW_"))]:
            del os.environ[name]
        os.environ.update(variables)
        load.cache_clear()
        for name in [name for name in sys.modules if name.startswith("huggingface_hub")]:
            del sys.modules[name]  # which reads its variables when it is imported
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
