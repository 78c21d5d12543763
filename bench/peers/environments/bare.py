"""No environment at all: shells of this host. What the agent's commands cost by themselves."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from live import Live, WithoutFiles

_NEW_SHELLS = """
import os, sys, time
count, begun = 0, time.monotonic()
while (took := time.monotonic() - begun) < float(sys.argv[1]):
    os.waitpid(os.posix_spawn("/bin/sh", ["/bin/sh", "-c", "true"], os.environ), 0)
    count += 1
print(count / took)
"""


_VARIABLES = {**os.environ, "PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}


class Bare:
    def __init__(self, options: dict[str, Any]) -> None:
        self._folder = options["folder"]
        self._remembers = True

    def start(self) -> Live:
        return BareShell(self._folder) if self._remembers else BareShells(self._folder)

    def versions(self) -> dict[str, str]:
        return {"python": platform.python_version()}

    def extra(self) -> dict[str, Callable[..., Any]]:
        return {"new_shells": self.new_shells, "remember": self.remember}

    def remember(self, on: bool) -> None:
        """Whether commands go to one shell, in what is started from now on; else each to a new one."""
        self._remembers = on

    def new_shells(self, seconds: float) -> dict[str, float]:
        """New shells a second that this host can start for one `true` each, with nothing else to do.

        As many programs as there are processors do it: about what can be had where each command has a shell of its own.
        """
        command = [sys.executable, "-c", _NEW_SHELLS, str(seconds)]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(os.cpu_count() or 1)]  # noqa: S603
        return {"per_s": sum(float(process.communicate()[0]) for process in processes)}

    def close(self) -> None:
        pass


class BareShell(WithoutFiles):
    """Every command in a subshell of one bash, so that a `cd` stays where it was given.

    The benchmark gives a folder in memory: the least that the commands can take, without waiting for a disk.
    """

    container = ""
    ends_quickly = True

    def __init__(self, folder: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bare-", dir=folder))
        self._shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],  # noqa: S607
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self._folder,
            env=_VARIABLES,
        )

    def run(self, command: str) -> tuple[int, bytes]:
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        home = command.replace("/tmp/agent", str(self._folder / "agent"))
        self._shell.stdin.write(f"( {home}\n) </dev/null\nprintf '\\n-- %d --\\n' $?\n".encode())
        self._shell.stdin.flush()
        output = b""
        while not (output.endswith(b" --\n") and b"\n-- " in output):
            output += self._shell.stdout.readline()
        said, _, code = output.rpartition(b"\n-- ")
        return int(code.split()[0]), said

    def stop(self) -> None:
        self._shell.kill()
        self._shell.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class BareShells(WithoutFiles):
    """Every command in a new `/bin/sh`, as an environment runs it, started by the quickest call that Python has."""

    container = ""
    ends_quickly = True

    def __init__(self, folder: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bare-", dir=folder))

    def run(self, command: str) -> tuple[int, bytes]:
        script = f"cd {self._folder}\n" + command.replace("/tmp/agent", str(self._folder / "agent"))
        reading, writing = os.pipe()
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, writing, 1),
            (os.POSIX_SPAWN_DUP2, writing, 2),
        ]
        child = os.posix_spawn("/bin/sh", ["/bin/sh", "-c", script], _VARIABLES, file_actions=actions)
        os.close(writing)
        with open(reading, "rb") as pipe:
            said = pipe.read()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said

    def stop(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


contender = Bare
