"""Records the commands run in an attempt's environments for a terminal player (asciicast, version 2).

Running commands are recorded in bounded memory. The recording is written once, with the other artifacts.
"""

from __future__ import annotations

import codecs
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Unpack

import orjson

from app.models.shell import (
    CommandOptions,
    CommandResult,
    InteractiveProgram,
    ProgramOptions,
    Services,
    Shell,
    StatefulShell,
    left_out,
)

MOST_BYTES = 2 << 20
"""Size limit of the commands and outputs that one worker records; a grader adds at most the same size."""
_PACKED_BYTES = 3 << 20
"""Size limit after encoding as JSON."""
_AGENT_BYTES = MOST_BYTES * 3 // 4
"""Size limit of the agent's part: the rest is for the grading."""
_RESULT_BYTES = 64 << 10
_STREAM_BYTES = 256 << 10
_COMMAND_CHARACTERS = 4000
_OWN_CHARACTERS = 500
"""Text limit for MegaFlow's own commands."""
_INPUT_BYTES = 2000
_LABEL_CHARACTERS = 80
_MOST_COMMANDS = 2000
_EACH_BYTES = 300
"""Estimated size of a command without output."""
_TOGETHER_S = 0.05
"""Pieces of a stream that come within this time are joined."""
_SIZE = {"width": 120, "height": 32}
_IDLE_S = 2
"""The player shortens longer pauses to this."""
_REDACTED = b"[redacted]"
_UNSEEN = re.compile(r"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")
"""Control characters without an effect on a terminal."""
_STEERING = re.compile(r"[\x07\x08\x0b-\x0d]")
_AGENT = "agent"
SET_UP = "set-up"

Event = tuple[float, str, str]


@dataclass(eq=False, slots=True)
class TerminalCommand:
    """A running or ended command. Times are monotonic seconds. Used by one thread."""

    terminal: Terminal
    stage: str
    text: str
    cwd: str
    sent: bytearray
    begun: float
    ended: float | None = None
    how: str = ""  # how it ended; empty: successfully
    left_out: int = 0  # bytes, at the end
    _pieces: list[tuple[float, bytearray]] = field(default_factory=list)
    _size: int = 0

    def write(self, data: bytes) -> None:
        """Records a piece of the output stream, with the current time."""
        now = time.monotonic()
        room = self.terminal.grant(self.stage, min(len(data), _STREAM_BYTES - self._size))
        if room and self._pieces and now - self._pieces[-1][0] < _TOGETHER_S:
            self._pieces[-1][1].extend(data[:room])
        elif room:
            self._pieces.append((now, bytearray(data[:room])))
        self._size += room
        self.left_out += len(data) - room

    def send(self, data: bytes) -> None:
        """Records the beginning of the input stream."""
        self.sent += data[: max(0, _INPUT_BYTES - len(self.sent))]

    def close(self, how: str = "") -> None:
        """Records the end of the command; only the first call counts."""
        if self.ended is None:
            self.ended, self.how = time.monotonic(), how

    def finish(self, result: CommandResult) -> None:
        """Records the end of the command and its whole output."""
        self.ended = time.monotonic()
        if result.timed_out:
            self.how = f"killed after {result.duration_s:.1f} s"
        elif result.exit_code:
            self.how = f"exit code {result.exit_code}"
        pieces = [_without_middle(one) for one in (result.stdout, result.stderr) if one]
        size = sum(map(len, pieces))
        if self.terminal.grant(self.stage, size) == size:
            self._pieces += [(self.ended, bytearray(piece)) for piece in pieces]
        else:
            self.left_out = len(result.stdout) + len(result.stderr)

    def pieces(self, secrets: Sequence[bytes]) -> list[tuple[float, bytes]]:
        """Returns the output with its times, without secrets; also removes a secret split over two pieces."""
        pieces: list[tuple[float, bytes | bytearray]] = [*self._pieces]
        if self.left_out:
            pieces.append((self.ended or time.monotonic(), left_out(self.left_out)))
        whole = b"".join(piece for _, piece in pieces)
        if not any(secret in whole for secret in secrets):
            return [(at, bytes(piece)) for at, piece in pieces]
        apart = [(at, _redacted(piece, secrets)) for at, piece in pieces]
        if not any(secret in b"".join(piece for _, piece in apart) for secret in secrets):
            return apart
        return [(pieces[-1][0], _redacted(whole, secrets))]


class Terminal:
    """Commands that this worker ran for one attempt. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: list[TerminalCommand] = []
        self._not_recorded = 0
        self._sizes = {True: 0, False: 0}  # True: the agent's commands
        self._epoch = time.time() - time.monotonic()

    def __bool__(self) -> bool:
        """Whether there is anything to store."""
        return bool(self._commands)

    def begin(self, stage: str, text: str, *, cwd: str | None = None, sent: bytes | None = None) -> TerminalCommand:
        """Records the start of a command. Over the limit, the returned command is not recorded but can be used."""
        most = _COMMAND_CHARACTERS if stage in (_AGENT, SET_UP) else _OWN_CHARACTERS
        command = TerminalCommand(
            self,
            stage,
            text[:most],
            cwd or "",
            bytearray((sent or b"")[:_INPUT_BYTES]),
            time.monotonic(),
        )
        size = _EACH_BYTES + len(command.text) + len(command.sent)
        with self._lock:
            if len(self._commands) < _MOST_COMMANDS and self._granted(stage, size) == size:
                self._commands.append(command)
            else:
                self._not_recorded += 1
        return command

    def grant(self, stage: str, wanted: int) -> int:
        """Reserves up to `wanted` bytes of the remaining space; returns the number of bytes reserved."""
        with self._lock:
            return self._granted(stage, wanted)

    def _granted(self, stage: str, wanted: int) -> int:
        is_agent = stage.startswith(_AGENT)
        room = MOST_BYTES - sum(self._sizes.values())
        if is_agent:
            room = min(room, _AGENT_BYTES - self._sizes[True])
        granted = max(0, min(wanted, room))
        self._sizes[is_agent] += granted
        return granted

    def pack(self, redact: Sequence[str], earlier: bytes | None = None) -> bytes:
        """Returns the recording without the secrets in `redact`, appended to the recording of another worker, if any.

        Raises: ValueError: `earlier` is not a recording.
        """
        with self._lock:
            commands, secrets = list(self._commands), [secret.encode() for secret in redact if secret]
        first = min((one.begun for one in commands), default=time.monotonic()) + self._epoch
        header: dict[str, Any] = {"version": 2, **_SIZE, "timestamp": math.floor(first), "idle_time_limit": _IDLE_S}
        before, rows, at_least = b"", list[Any](), 0.0
        if earlier is not None:
            head, _, before = earlier.partition(b"\n")
            header = orjson.loads(head)
            rows = header.pop("commands")
            at_least = max((row[1] for row in rows), default=0.0)
        offset = header["timestamp"] - self._epoch
        base = max(0.0, at_least - (min((one.begun for one in commands), default=0.0) - offset)) - offset
        rows += [_row(one, base) for one in commands]
        events = sorted(
            (event for one in commands for event in _events(one, secrets, base)), key=lambda event: event[0]
        )
        head = orjson.dumps({**header, "commands": rows})
        return _redacted(head + b"\n" + before + b"".join(self._lines(events)), secrets)

    def _lines(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Encodes events as JSON lines, within the size limit also after escaping."""
        lines = [orjson.dumps([round(at, 3), kind, text]) + b"\n" for at, kind, text in events]
        sizes = accumulate(map(len, lines))
        inside = [line for line, size in zip(lines, sizes, strict=True) if size <= _PACKED_BYTES]
        yield from inside
        if missing := self._not_recorded + len(lines) - len(inside):
            last = events[-1][0] if events else 0.0
            yield orjson.dumps([round(last, 3), "o", f"\x1b[0m[the recording is full: {missing} more]\r\n"]) + b"\n"


def _row(command: TerminalCommand, base: float) -> list[Any]:
    """Returns the header's row: begin, end (now, if still running), stage, how it ended, first line."""
    label = _as_text(command.text).strip().partition("\n")[0][:_LABEL_CHARACTERS]
    ended = time.monotonic() if command.ended is None else command.ended
    return [round(command.begun + base, 3), round(ended + base, 3), command.stage, _how(command), label]


def _how(command: TerminalCommand) -> str:
    return command.how if command.ended is not None else "it had not ended"


def _events(command: TerminalCommand, secrets: Sequence[bytes], base: float) -> Iterator[Event]:
    label = _row(command, base)[4]
    begun = command.begun + base
    yield begun, "m", f"{command.stage}: {label}"
    directory = f" {_as_text(command.cwd)}" if command.cwd else ""
    typed = _with_returns(_as_text(command.text).strip("\n"))
    yield begun, "o", f"\x1b[1;32m{command.stage}\x1b[0;34m{directory}\x1b[0m $ {typed}\r\n"
    if sent := _as_text(command.sent.decode("utf-8", "replace")).strip("\n"):
        yield begun, "o", f"\x1b[2m{_with_returns(sent)}\x1b[0m\r\n"
    decoder, last, steers = codecs.getincrementaldecoder("utf-8")("replace"), "\n", False
    for at, piece in command.pieces(secrets):
        if text := _UNSEEN.sub("", decoder.decode(piece)):
            last, steers = text[-1], steers or "\x1b" in text
            yield at + base, "o", _with_returns(text)
    ended = base + (time.monotonic() if command.ended is None else command.ended)
    after = "" if last == "\n" else "\r\n"
    if steers:  # leave the alternate screen, reset colours and modes
        after += "\x1b[?1047l\x1b[!p\x1b[0m"
    if how := _how(command):
        after += f"\x1b[31m[{how}]\x1b[0m\r\n"
    if after:
        yield ended, "o", after


def _as_text(text: str) -> str:
    """Makes control sequences visible as text, so the player does not execute them."""
    plain = _UNSEEN.sub("", text.encode("utf-8", "replace").decode())
    return _STEERING.sub("", plain).replace("\x1b", "^[").replace("\t", "    ")


def _with_returns(text: str) -> str:
    """Converts line ends to CR LF, as a terminal needs them."""
    return text.replace("\r\n", "\n").replace("\n", "\r\n")


def _without_middle(data: bytes) -> bytes:
    half = _RESULT_BYTES // 2
    return data if len(data) <= 2 * half else data[:half] + left_out(len(data) - 2 * half) + data[-half:]


def _redacted(content: bytes | bytearray, secrets: Sequence[bytes]) -> bytes:
    for secret in secrets:
        content = content.replace(secret, _REDACTED)
    return bytes(content)


def _watched(command: TerminalCommand, run: Callable[[], CommandResult]) -> CommandResult:
    try:
        result = run()
    except BaseException as error:
        command.close(type(error).__name__)
        raise
    command.finish(result)
    return result


class RecordedShell:
    """A shell, and its services if it has any. Raises the errors of both."""

    def __init__(self, terminal: Terminal, stage: str, shell: Shell, after: Callable[[], None] = lambda: None) -> None:
        """Wraps `shell`. after: called when a command has ended, before its result is returned."""
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
    """A program whose output is recorded as it is read."""

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
