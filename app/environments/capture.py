"""A command's output, bounded: the first and the last part of each stream are kept, all of it where there are logs."""

from __future__ import annotations

from app.models.shell import LOGS_FULL, OutputLog, OutputLogs, left_out

KEEP_BYTES = 1 << 20
"""Kept of each end of a stream."""


class Capture:
    """One stream of one command. With `logs`, all of it goes there once it is too long to be kept whole."""

    def __init__(
        self, keep_bytes: int = KEEP_BYTES, *, logs: OutputLogs | None = None, stream: str = "", command: str = ""
    ) -> None:
        self._keep = keep_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._left_out = 0
        self._total = 0
        self._logs, self._stream, self._command = logs, stream, command
        self._log: OutputLog | None = None

    def feed(self, data: bytes) -> None:
        before, self._total = self._total, self._total + len(data)
        if self._logs is not None and self._total > 2 * self._keep:
            self._note(self._logs, data, first=before <= 2 * self._keep)
        room = self._keep - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._keep:
            self._trim()

    def _note(self, logs: OutputLogs, data: bytes, *, first: bool) -> None:
        if first and logs.left_bytes:
            self._log = logs.open(self._stream, self._command)
            self._log.write(self._head + self._tail)  # all of it so far: nothing was trimmed yet
        if self._log is not None:
            self._log.write(data)

    @property
    def truncated(self) -> bool:
        return self._left_out > 0 or len(self._tail) > self._keep

    @property
    def log_names(self) -> tuple[str, ...]:
        """Under which all of it is kept, if it is."""
        return () if self._log is None else (self._log.name,)

    def content(self) -> bytes:
        """What was kept; where something is missing, a line says how much."""
        self._trim()
        if not self._left_out:
            return bytes(self._head + self._tail)
        told = self._log.told(self._total) if self._log is not None else "" if self._logs is None else LOGS_FULL
        return bytes(self._head) + left_out(self._left_out, told) + bytes(self._tail)

    def close(self) -> None:
        """Nothing more will come."""
        if self._log is not None:
            self._log.close()

    def _trim(self) -> None:
        surplus = len(self._tail) - self._keep
        if surplus > 0:
            self._left_out += surplus
            del self._tail[:surplus]


def captures(logs: OutputLogs | None, command: str) -> tuple[Capture, Capture]:
    """Of a command's two streams."""
    return Capture(logs=logs, stream="stdout", command=command), Capture(logs=logs, stream="stderr", command=command)
