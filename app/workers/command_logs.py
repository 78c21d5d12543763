"""Keeps outputs of commands that are too long to be returned, as files while the attempt runs.

The files are never inside the environment: they do not count toward its disk limit, its commands cannot change them,
and a reset does not delete them. Their total size is bounded; output that was cut off is marked.
"""

from __future__ import annotations

import os
import tarfile
import threading
from collections.abc import Sequence
from pathlib import Path

import structlog
import zstandard

from app.agents.running.redact import redact_file
from app.models.shell import LOGS_FULL

log = structlog.get_logger()

INDEX = "index.txt"
_COMMAND_CHARS = 200


class CommandLogs:
    """Long outputs of one attempt in `folder`, with `limit_bytes` as the total limit. Thread-safe.

    earlier: number of outputs that another worker has stored for this attempt; numbering starts after them.
    """

    def __init__(self, folder: Path, limit_bytes: int, *, earlier: int = 0) -> None:
        self._folder = folder
        self._earlier = earlier
        self._limit_bytes = limit_bytes
        self._left_bytes = limit_bytes
        self._lock = threading.Lock()
        self._kept: list[OutputFile] = []

    @property
    def left_bytes(self) -> int:
        return self._left_bytes

    def open(self, stream: str, command: str) -> OutputFile:
        with self._lock:
            name = f"{self._earlier + len(self._kept) + 1:04}.{stream}"
            output = OutputFile(self, self._folder / name, command)
            self._kept.append(output)
        return output

    def grant(self, wanted: int) -> int:
        """Reserves up to `wanted` bytes of the remaining space; returns the number of bytes reserved."""
        with self._lock:
            granted = min(wanted, self._left_bytes)
            self._left_bytes -= granted
            return granted

    def __bool__(self) -> bool:
        """Whether there is anything to store."""
        return bool(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def unpack(self, packed: bytes) -> list[str]:
        """Extracts the outputs stored by another worker into the folder; returns its index lines. Raises: OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (
            zstandard.ZstdDecompressor().stream_reader(packed) as content,
            tarfile.open(fileobj=content, mode="r|") as archive,
        ):
            archive.extractall(self._folder, filter="data")
        return (self._folder / INDEX).read_text(encoding="utf-8").splitlines()

    def pack(self, redact: Sequence[str], earlier: bytes | None = None) -> Path:
        """Packs them and an index into a tar (zstd) in the folder; redacts the secrets in `redact`. Raises: OSError.

        earlier: the tar of another worker; its outputs come first.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = [] if earlier is None else self.unpack(earlier)
        names = [line.partition(":")[0] for line in lines] + [one.name for one in self._kept]
        target = self._folder / "packed.tar.zst"
        lines += [one.describe() for one in self._kept]
        (self._folder / INDEX).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        with (
            target.open("wb") as file,
            zstandard.ZstdCompressor().stream_writer(file, closefd=False) as packed,
            tarfile.open(fileobj=packed, mode="w|") as archive,
        ):
            for name in (INDEX, *names):
                path = self._folder / name
                if path.exists():
                    for secret in redact:
                        redact_file(path, secret.encode())
                    archive.add(path, arcname=name)
        return target


class OutputFile:
    """File with one output stream. Used by one thread."""

    def __init__(self, logs: CommandLogs, file: Path, command: str) -> None:
        self._logs = logs
        self._file = file
        self._command = command
        self._handle: int | None = None
        self._size = 0
        self._why_cut = ""

    @property
    def name(self) -> str:
        return self._file.name

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._why_cut:
            return
        granted = self._logs.grant(len(data))
        if granted < len(data):
            self._why_cut = LOGS_FULL
        try:
            self._append(memoryview(data)[:granted])
        except OSError as error:  # a failed log must not fail the command
            self._why_cut = f"it could not be written: {error.strerror}"
            log.warning("command_log.not_written", file=self.name, error=str(error))

    def _append(self, data: memoryview) -> None:
        if self._handle is None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        while data:
            written = os.write(self._handle, data)
            self._size += written
            data = data[written:]

    def location(self, total_bytes: int) -> str:
        if self._size < total_bytes and not self._why_cut:
            self._why_cut = LOGS_FULL
        part = f"the first {self._size} bytes of it are" if self._why_cut else "all of it is"
        why = f": {self._why_cut}" if self._why_cut else ""
        return f"{part} {self.name} in the attempt's command_logs{why}"

    def describe(self) -> str:
        """Returns a line for the index."""
        cut = f", cut: {self._why_cut}" if self._why_cut else ""
        command = self._command[:_COMMAND_CHARS].encode("utf-8", "replace").decode().strip().replace("\n", "\\n")
        return f"{self.name}: {self._size} bytes{cut}; of: {command}"

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
