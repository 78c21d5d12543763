"""A shell that remembers, made of commands that do not: where no session helper runs.

Each command first takes over what the last one left (its folder, its exports) and leaves its own when it ends.
Variables that are not exported, functions and options do not live on, as they do in a session's shell.
"""

from __future__ import annotations

import shlex
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from app.environments.processes import COMMAND
from app.errors import EnvironmentFailed
from app.models.shell import CommandResult

_SCRIPT = """[ -f {state} ] && . {state} && cd -- "$(cat {state}.folder)"
trap '{{
  unset {mark}; export -p >| {state}.new && pwd >| {state}.folder && mv -f {state}.new {state}
}} 2>/dev/null' EXIT
"""


class Run(Protocol):
    """`Shell.run`."""

    def __call__(
        self, command: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None, timeout_s: float
    ) -> CommandResult: ...


class RememberingShell:
    """One command at a time (a lock sees to it)."""

    def __init__(self, run: Run, folder: str, *, cwd: str | None, env: Mapping[str, str] | None) -> None:
        """`folder`: where the state is kept, as commands see it; it must exist."""
        self._run = run
        self._state = f"{folder}/.shell-{uuid.uuid4().hex}"
        self._cwd = cwd
        self._env = env
        self._lock = threading.Lock()
        self._closed = False

    def run(self, command: str, *, timeout_s: float) -> CommandResult:
        script = _SCRIPT.format(state=shlex.quote(self._state), mark=COMMAND) + command
        with self._lock:
            if self._closed:
                raise EnvironmentFailed("this shell was closed.")
            return self._run(script, cwd=self._cwd, env=self._env, timeout_s=timeout_s)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                state = shlex.quote(self._state)
                with suppress(EnvironmentFailed):  # and the state with it
                    self._run(f"rm -f {state} {state}.new {state}.folder", timeout_s=10.0)
