"""Keeps a program's output in a file that can be read while it grows, up to a limit."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from app.models.shell import OutputLog, OutputLogs

_LONGEST_LINE = 1 << 20  # what is cut out of the middle begins and ends with a line, unless lines are longer than this


class Output:
    """Writes to `file`. Of more than `head_bytes` the last `tail_bytes` to twice as many are kept, too.

    While it is open they are in files of the same name with `.tail` and `.tail-before`; `close` puts them together,
    with a line in the gap that says how much is missing and, where there are `logs`, under which name all of it is
    kept. Safe to share between threads.
    """

    def __init__(
        self, file: Path, *, head_bytes: int = 32 << 20, tail_bytes: int = 8 << 20, logs: OutputLogs | None = None
    ) -> None:
        self.file = file
        self._logs = logs
        self._log: OutputLog | None = None
        self._head_bytes = head_bytes
        self._tail_bytes = tail_bytes
        self._lock = threading.Lock()
        self._parts: list[BinaryIO] = [file.open("wb", buffering=0)]  # where it is written to is the last
        self._written = 0  # into the last
        self._lost = 0
        self._total = 0
        self._older_bytes = 0

    def write(self, data: bytes) -> None:
        """Raises: OSError: the disk is full."""
        view = memoryview(data)
        with self._lock:
            self._total += len(data)
            while view:
                room = (self._head_bytes if len(self._parts) == 1 else self._tail_bytes) - self._written
                if room <= 0:
                    self._turn_over()
                    continue
                written = self._parts[-1].write(view[:room]) or 0
                self._written += written
                view = view[written:]

    def _turn_over(self) -> None:
        """Begin a new part of the tail; the one before the last is given up."""
        if len(self._parts) == 1:
            self._parts.append(self._tail.open("wb", buffering=0))
        else:
            if self._before.exists():
                self._give_up(self._before)
            self._lost += self._older_bytes
            self._older_bytes = self._written
            self._parts.pop().close()
            os.replace(self._tail, self._before)
            self._parts.append(self._tail.open("wb", buffering=0))
        self._written = 0

    def _give_up(self, part: Path) -> None:
        """It will not be in the file: have it in the log, behind the head."""
        if self._log is None and self._logs is not None and self._logs.left_bytes:
            self._log = self._logs.open(self.file.name, "the agent's framework")
            self._note(self.file)
        self._note(part)

    def _note(self, part: Path) -> None:
        if self._log is not None:
            with part.open("rb") as source:
                while piece := source.read(1 << 20):
                    self._log.write(piece)

    @property
    def _tail(self) -> Path:
        return self.file.with_name(self.file.name + ".tail")

    @property
    def _before(self) -> Path:
        return self.file.with_name(self.file.name + ".tail-before")

    def close(self) -> None:
        """Put the parts together. Safe to call twice. Raises: OSError: the disk is full."""
        with self._lock:
            if not self._parts:
                return
            for written in self._parts:
                written.close()
            self._parts = []
            kept = [part for part in (self._before, self._tail) if part.exists()]
            try:
                if self._log is not None:
                    for part in kept:
                        self._note(part)
                    self._log.close()
                if kept:
                    self._join(kept)
            finally:
                for part in kept:
                    part.unlink(missing_ok=True)

    def _join(self, parts: Sequence[Path]) -> None:
        with self.file.open("r+b") as whole:
            end = whole.seek(0, os.SEEK_END)
            skip = 0
            if self._lost:
                cut = _after_last_line(whole, end)
                skip = _to_next_line(parts[0])
                whole.seek(cut)
                whole.truncate()
                where = f"; {self._log.location(self._total)}" if self._log is not None else ""
                whole.write(f"\n[{self._lost + end - cut + skip} bytes are left out here{where}]\n".encode())
            for part in parts:
                with part.open("rb") as source:
                    source.seek(skip)
                    while piece := source.read(1 << 20):
                        whole.write(piece)
                skip = 0


def _after_last_line(file: BinaryIO, end: int) -> int:
    """Where the last line that is whole ends."""
    begin = max(0, end - _LONGEST_LINE)
    file.seek(begin)
    found = file.read(end - begin).rfind(b"\n")
    return end if found < 0 else begin + found + 1


def _to_next_line(part: Path) -> int:
    """Where the first whole line begins."""
    with part.open("rb") as source:
        return source.read(_LONGEST_LINE).find(b"\n") + 1


class Outputs:
    """The outputs of one run, in `folder`: `stdout`, `stderr`, and both as they came in `agent.log`.

    logs: for all of the first two, where they are too long.
    """

    def __init__(self, folder: Path, logs: OutputLogs | None = None) -> None:
        self.stdout = Output(folder / "stdout", logs=logs)
        self.stderr = Output(folder / "stderr", head_bytes=4 << 20, tail_bytes=2 << 20, logs=logs)
        self.log = Output(folder / "agent.log", head_bytes=8 << 20, tail_bytes=4 << 20)

    @property
    def files(self) -> list[Path]:
        return [self.stdout.file, self.stderr.file, self.log.file]

    def write(self, output: Output, data: bytes) -> None:
        """To `output`, one of this object's, and to the log. Raises: OSError."""
        output.write(data)
        self.log.write(data)

    def close(self) -> None:
        """Raises: OSError."""
        for output in (self.stdout, self.stderr, self.log):
            output.close()
