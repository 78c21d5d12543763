"""A command's output, bounded: the first and the last part of each stream are kept."""

from __future__ import annotations

KEEP_BYTES = 1 << 20
"""Kept of each end of a stream."""


class Capture:
    """One stream of one command."""

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep = keep_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._left_out = 0

    def feed(self, data: bytes) -> None:
        room = self._keep - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._keep:
            self._trim()

    @property
    def truncated(self) -> bool:
        return self._left_out > 0 or len(self._tail) > self._keep

    def content(self) -> bytes:
        """What was kept; where something is missing, a line says how much."""
        self._trim()
        if not self._left_out:
            return bytes(self._head + self._tail)
        note = f"\n[... {self._left_out} bytes left out ...]\n".encode()
        return bytes(self._head) + note + bytes(self._tail)

    def _trim(self) -> None:
        surplus = len(self._tail) - self._keep
        if surplus > 0:
            self._left_out += surplus
            del self._tail[:surplus]
