"""The agent that repeats a recorded attempt without a model: its commands and edits, in order."""

from __future__ import annotations

import posixpath
import shlex
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import BinaryIO

from app.agents.base import AgentJob, AgentReport
from app.agents.recorded import Action, Edit, Insert, RecordedCommand, Write, actions
from app.errors import SpecInvalid
from app.models.endings import BLAME, Blame, EndReason
from app.models.shell import CancelToken, CommandResult, Shell, StatefulShell

_LONGEST_OUTPUT_BYTES = 4000  # of one command, in the log


class ReplayAgent:
    """Replays `AgentJob.recording`; what its commands give today is in the log, and decides nothing."""

    name = "replay"
    version = "1"
    needs_model = False
    needs_solution = False

    def check(self) -> None:
        """Always there."""

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        """Raises: SpecInvalid: no recording, none that can be done again, or of an attempt without a result."""
        todo, end = _plan(job)
        log = job.scratch / "agent.log"
        deadline = time.monotonic() + job.limits.agent_timeout_s
        done = 0
        with log.open("wb") as sink:
            hands = _Hands(job, shell, sink)
            try:
                for action in todo:
                    if cancel.is_set():
                        return AgentReport(EndReason.CANCELLED, log=log, steps=done)
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        why = f"time was up after {done} of {len(todo)} recorded actions"
                        return AgentReport(EndReason.AGENT_TIMEOUT, why, log=log, steps=done)
                    hands.do(action, min(left_s, job.limits.command_timeout_s))
                    done += 1
            finally:
                hands.close()
        if cancel.is_set():
            return AgentReport(EndReason.CANCELLED, log=log, steps=done)
        return AgentReport(end, f"did {done} recorded actions again", log=log, steps=done)


def _plan(job: AgentJob) -> tuple[list[Action], EndReason]:
    if job.recording is None:
        raise SpecInvalid(f"agent 'replay' on {job.task_name}: expected a recorded attempt; found none; name a run")
    end = job.recorded_end or EndReason.SUBMITTED
    if BLAME[end] is not Blame.RESULT:
        raise SpecInvalid(
            f"agent 'replay' on {job.task_name}: expected an attempt that ended with a result; found one that ended"
            f" with {end}; name another run"
        )
    return actions(job.recording), end


class _Hands:
    """Carries actions out. A file that is not there, or a text that is not in it, was an answer then and is one now."""

    def __init__(self, job: AgentJob, shell: Shell, sink: BinaryIO) -> None:
        self._workdir = job.workdir
        self._shell = shell
        self._sink = sink
        self._shared: StatefulShell | None = None

    def do(self, action: Action, timeout_s: float) -> None:
        match action:
            case RecordedCommand():
                self._command(action, timeout_s)
            case Write(path, content):
                self._write(path, content.encode("utf-8", "surrogatepass"))
            case Edit():
                self._edit(action)
            case Insert():
                self._insert(action)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()

    def _command(self, action: RecordedCommand, timeout_s: float) -> None:
        self._say(f"$ {action.text}")
        result = self._run(action, timeout_s)
        code = "no end in time" if result.timed_out else f"exit code {result.exit_code}"
        self._say(f"{result.text()[-_LONGEST_OUTPUT_BYTES:]}[{code}]")

    def _run(self, action: RecordedCommand, timeout_s: float) -> CommandResult:
        if action.background:
            quoted = shlex.quote(action.text)
            return self._apart(f"nohup bash -c {quoted} >/dev/null 2>&1 &", action.cwd, timeout_s)
        if action.apart:
            return self._apart(action.text, action.cwd, timeout_s)
        if self._shared is None:
            self._shared = self._shell.shell(cwd=self._workdir)
        return self._shared.run(action.text, timeout_s=timeout_s)

    def _apart(self, text: str, cwd: str | None, timeout_s: float) -> CommandResult:
        """As the frameworks run it: by bash where there is one."""
        quoted = shlex.quote(text)
        command = f"if command -v bash >/dev/null; then exec bash -c {quoted}; fi; exec sh -c {quoted}"
        return self._shell.run(command, cwd=cwd or self._workdir, timeout_s=timeout_s)

    def _edit(self, edit: Edit) -> None:
        text = self._read(edit.path)
        found = text.count(edit.old) if text is not None and edit.old else 0
        if text is None or found == 0 or (found > 1 and not edit.everywhere):
            self._say(f"edit {edit.path}: the text is there {found} times; nothing is changed")
            return
        self._write(edit.path, text.replace(edit.old, edit.new).encode("utf-8", "surrogateescape"))

    def _insert(self, insert: Insert) -> None:
        text = self._read(insert.path)
        lines = [] if text is None else text.split("\n")
        if text is None or not 0 <= insert.after_line <= len(lines):
            self._say(f"insert into {insert.path}: there is no line {insert.after_line}; nothing is changed")
            return
        lines[insert.after_line : insert.after_line] = insert.text.split("\n")
        self._write(insert.path, "\n".join(lines).encode("utf-8", "surrogateescape"))

    def _read(self, path: str) -> str | None:
        with suppress(FileNotFoundError):
            return self._shell.get(self._absolute(path)).decode("utf-8", "surrogateescape")
        return None

    def _write(self, path: str, content: bytes) -> None:
        path = self._absolute(path)
        self._shell.put(path, content, mode=self._mode(path))
        self._say(f"wrote {path}, {len(content)} bytes")

    def _mode(self, path: str) -> int:
        """Of the file that is there: an edited script stays one that can be run."""
        folder, name = posixpath.split(path)
        told = self._shell.run(f"stat -c %a ./{shlex.quote(name)}", cwd=folder, timeout_s=30).stdout.strip()
        return int(told, 8) if told.isdigit() else 0o644

    def _absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self._workdir.rstrip('/')}/{path}"

    def _say(self, *lines: str) -> None:
        self._sink.writelines(_encoded(lines))


def _encoded(lines: Iterable[str]) -> Iterable[bytes]:
    return (f"{line}\n".encode("utf-8", "replace") for line in lines)
