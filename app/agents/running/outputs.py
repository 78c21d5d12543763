"""Writes a program's output to a file that can be read while it grows, up to a limit."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from app.models.shell import OutputLog, OutputLogs

_LONGEST_LINE = 1 << 20  # the cut-out middle begins and ends with a line, unless lines are longer than this


class Output:
    """Writes to `file`. If there is more than `head_bytes`, also keeps the last `tail_bytes` to twice `tail_bytes`.

    `close` marks the gap with a line that gives the number of missing bytes and, with `logs`, the name of the complete
    log. Thread-safe.
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
        self._handle = file.open("w+b", buffering=0)
        self._size = 0  # of the file
        self._total = 0  # bytes written

    def write(self, data: bytes) -> None:
        """Raises: OSError: the disk is full."""
        with self._lock:
            self._total += len(data)
            if self._log is not None:
                self._log.write(data)
            self._append(data)
            if self._size > self._head_bytes + 2 * self._tail_bytes:
                self._shorten()

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = self._handle.write(view) or 0
            self._size += written
            view = view[written:]

    def _shorten(self) -> None:
        """Keeps the head and the end of the tail; the log continues to get everything."""
        if self._size == self._total and self._logs is not None and self._logs.left_bytes:
            self._log = self._logs.open(self.file.name, "the agent's framework")
            with self.file.open("rb") as source:
                while piece := source.read(1 << 20):
                    self._log.write(piece)
        self._handle.seek(-self._tail_bytes, os.SEEK_END)
        self._put_behind(self._head_bytes, self._handle.read(self._tail_bytes))

    def _put_behind(self, place: int, data: bytes) -> None:
        self._handle.seek(place)
        self._handle.truncate()
        self._size = place
        self._append(data)

    def close(self) -> None:
        """Marks what is missing. May be called twice. Raises: OSError: the disk is full."""
        with self._lock:
            if self._handle.closed:
                return
            with self._handle:
                if self._log is not None:
                    self._log.close()
                if self._size < self._total:
                    self._mark_gap()

    def _mark_gap(self) -> None:
        """Writes the mark between whole lines."""
        self._handle.seek(0)
        head = self._handle.read(self._head_bytes)
        tail = self._handle.read()
        cut, skip = _after_last_line(head), tail.find(b"\n", 0, _LONGEST_LINE) + 1
        missing = self._total - self._size + len(head) - cut + skip
        where = f"; {self._log.location(self._total)}" if self._log is not None else ""
        self._put_behind(cut, f"\n[{missing} bytes are left out here{where}]\n".encode() + tail[skip:])


def _after_last_line(head: bytes) -> int:
    """Returns the end of the last whole line."""
    newline = head.rfind(b"\n", max(0, len(head) - _LONGEST_LINE))
    return len(head) if newline < 0 else newline + 1


class Outputs:
    """Outputs of one run, in `folder`: `stdout`, `stderr`, and both in order of arrival in `agent.log`.

    logs: store for the complete stdout and stderr, where they are too long.
    """

    def __init__(self, folder: Path, logs: OutputLogs | None = None) -> None:
        self.stdout = Output(folder / "stdout", logs=logs)
        self.stderr = Output(folder / "stderr", head_bytes=4 << 20, tail_bytes=2 << 20, logs=logs)
        self.log = Output(folder / "agent.log", head_bytes=8 << 20, tail_bytes=4 << 20)

    @property
    def files(self) -> list[Path]:
        return [self.stdout.file, self.stderr.file, self.log.file]

    def write(self, output: Output, data: bytes) -> None:
        """Writes to `output`, one of this object's, and to the log. Raises: OSError."""
        output.write(data)
        self.log.write(data)

    def close(self) -> None:
        """Raises: OSError."""
        for output in (self.stdout, self.stderr, self.log):
            output.close()
