"""Our own launcher: a small program without libraries that starts an environment as crun would, in less time.

It does what the specification says (`steps`), with the filter of system calls that crun has compiled of it, and is used
where a trial has shown that the kernel confirms all that.
"""

from __future__ import annotations

import functools
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.environments import compiling, crun
from app.environments.disk import FULL
from app.environments.oci import namespace, spawning
from app.environments.oci.birth import Birth, Lacking
from app.environments.oci.namespace import Stage
from app.environments.oci.sealed import program_at, sealed
from app.environments.oci.spawning import LISTENING
from app.environments.oci.steps import plan
from app.environments.oci.users import Users
from app.errors import EnvironmentFailed

_SOURCE = Path(__file__).parent / "launcher"
_PLAN, _MOUNTS, _TRANSLATION, _FILTER = range(LISTENING + 1, LISTENING + 5)
"""The numbers that its files have: those of launcher.h."""
_STARTED, _LACKING, _FAILED = "started", "lacking", "failed"
"""Its last words: one of these, then the first process, what the image lacks, or an errno and a line about it."""

_ON_DISK = ("new ", "folder ", "overlay ", "file ")
"""Steps that fail on a full disk; where others find no space, a limit of the kernel's is reached."""


@dataclass(frozen=True)
class Launched:
    """An environment that was started."""

    first: int
    """Its first process, by this host's numbers."""
    launcher: int
    """The process that started it; it has ended, or is about to."""

    def settle(self) -> None:
        """Nothing is left of the start."""
        with suppress(ChildProcessError):  # we are a fork of whoever started it
            os.waitpid(self.launcher, 0)


@dataclass(frozen=True)
class Launcher:
    """Starts environments whose users are apart."""

    program: Path
    home: Path  # what it must see

    @classmethod
    def of(cls, home: Path) -> Launcher:
        """Compiled when it is missing. Raises: compiling.NotCompiled: also when somebody else may have."""
        program = compiling.kept(home / "cache" / "oci-launcher" / "launcher", _sources())
        if not crun.nobody_elses(program.parent, program):
            raise compiling.NotCompiled(f"somebody else may write to {program}; remove it, or take that away.")
        return cls(program, home)

    def start(
        self,
        birth: Birth,
        users: Users,
        stage: Stage,
        listening: socket.socket,
        rules: bytes,
        *,
        timeout_s: float,
    ) -> Launched:
        """Start an environment; its first process inherits `listening`. rules: the compiled filter of system calls.

        Returns when the first process runs; the launcher itself is still to be settled.

        Raises: OSError; ValueError: something has a zero byte inside; Lacking; EnvironmentFailed with the launcher's
        words, or: it hung.
        """
        text = _in_memory(plan(birth, users, stage))
        try:
            files = {
                LISTENING: listening.fileno(),
                _PLAN: text,
                _MOUNTS: namespace.plain(self.home, stage),
                _TRANSLATION: users.namespace,
                _FILTER: sealed(rules, lambda: rules),
            }
            return self._launched(files, timeout_s)
        finally:
            os.close(text)

    def _launched(self, files: dict[int, int], timeout_s: float) -> Launched:
        ours, said = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                command = program_at(sealed(self.program, self.program.read_bytes))
                pid = spawning.spawn([command], {0: said, 1: said, 2: said, **files})
            finally:
                os.close(said)
            with spawning.ended_unless_done(pid):
                told = spawning.last_words(ours, timeout_s)
        finally:
            os.close(ours)
        if told is None:
            raise spawning.hung(pid, timeout_s)
        outcome, _, about = told.decode("utf-8", "replace").strip().partition(" ")
        if outcome == _STARTED:
            return Launched(int(about), pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if outcome == _LACKING:
            raise Lacking(about)
        number, _, words = about.partition(" ") if outcome == _FAILED else ("0", "", f"{outcome} {about}")
        errno = int(number)
        if errno and (words.startswith(_ON_DISK) or errno not in FULL):
            raise OSError(errno, words)
        raise EnvironmentFailed(f"an environment could not be started (exit code {code}): {words}")


def _in_memory(content: bytes) -> int:
    handle = os.memfd_create("plan", os.MFD_CLOEXEC)
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(content)
    except BaseException:
        os.close(handle)
        raise
    return handle


@functools.cache
def _sources() -> tuple[Path, ...]:
    return tuple(sorted(_SOURCE.glob("*.c")))
