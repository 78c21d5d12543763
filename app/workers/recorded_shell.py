"""A shell whose commands and streams are recorded; it changes nothing of what they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Unpack

from app.models.shell import (
    CommandOptions,
    CommandResult,
    InteractiveProgram,
    ProgramOptions,
    Services,
    Shell,
    StatefulShell,
)
from app.workers.terminal import Terminal, TerminalCommand


def _watched(command: TerminalCommand, run: Callable[[], CommandResult]) -> CommandResult:
    try:
        result = run()
    except BaseException as error:
        command.close(type(error).__name__)
        raise
    command.finish(result)
    return result


class RecordedShell:
    """A shell, and the services beside it, where it has some. Raises what they raise."""

    def __init__(self, terminal: Terminal, stage: str, shell: Shell, after: Callable[[], None] = lambda: None) -> None:
        """after: called when a command has ended, before its result is given."""
        self._terminal = terminal
        self._stage = stage
        self._shell = shell
        self._after = after

    def run(self, command: str, **how: Unpack[CommandOptions]) -> CommandResult:
        noted = self._terminal.begin(self._stage, command, cwd=how.get("cwd"), sent=how.get("stdin"))
        run = partial(self._shell.run, command, **how)
        result = _watched(noted, run)
        self._after()
        return result

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> StatefulShell:
        return _RecordedSession(self._terminal, self._stage, self._shell.shell(cwd=cwd, env=env), self._after)

    def stream(self, argv: Sequence[str], **how: Unpack[ProgramOptions]) -> InteractiveProgram:
        noted = self._terminal.begin(self._stage, " ".join(argv), cwd=how.get("cwd"))
        try:
            program = self._shell.stream(argv, **how)
        except BaseException as error:
            noted.close(type(error).__name__)
            raise
        return _RecordedProgram(program, noted)

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self._shell.put(path, content, mode=mode)

    def get(self, path: str) -> bytes:
        return self._shell.get(path)

    def put_tree(self, archive: bytes, path: str) -> None:
        self._shell.put_tree(archive, path)

    def get_tree(self, path: str) -> bytes:
        return self._shell.get_tree(path)

    @property
    def services(self) -> tuple[str, ...]:
        return self._shell.services if isinstance(self._shell, Services) else ()

    def service(self, name: str) -> Shell:
        assert isinstance(self._shell, Services)
        return RecordedShell(self._terminal, f"{self._stage}@{name}", self._shell.service(name))

    def logs(self) -> dict[str, bytes]:
        return self._shell.logs() if isinstance(self._shell, Services) else {}

    def assure(self) -> None:
        if isinstance(self._shell, Services):
            self._shell.assure()


class _RecordedSession:
    def __init__(self, terminal: Terminal, stage: str, shell: StatefulShell, after: Callable[[], None]) -> None:
        self._terminal = terminal
        self._stage = stage
        self._shell = shell
        self._after = after

    def run(self, command: str, *, timeout_s: float) -> CommandResult:
        noted = self._terminal.begin(self._stage, command)
        result = _watched(noted, partial(self._shell.run, command, timeout_s=timeout_s))
        self._after()
        return result

    def close(self) -> None:
        self._shell.close()


class _RecordedProgram:
    """What it writes is recorded as it is read."""

    def __init__(self, program: InteractiveProgram, noted: TerminalCommand) -> None:
        self._program = program
        self._noted = noted

    def read(self, timeout_s: float | None = None) -> bytes | None:
        piece = self._program.read(timeout_s)
        if piece:
            self._noted.write(piece)
        elif piece is not None:
            self._noted.close()
        return piece

    def write(self, data: bytes) -> None:
        self._noted.send(data)
        self._program.write(data)

    def close_input(self) -> None:
        self._program.close_input()

    def resize(self, rows: int, columns: int) -> None:
        self._program.resize(rows, columns)

    def signal(self, number: int) -> None:
        self._program.signal(number)

    def wait(self, timeout_s: float | None = None) -> int | None:
        code = self._program.wait(timeout_s)
        if code is not None:
            self._noted.close()
            self._noted.how = f"exit code {code}" if code else ""
        return code

    def close(self) -> None:
        self._noted.close()
        self._program.close()
