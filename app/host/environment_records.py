"""Stores records of environments on this host: one small file each, written first and removed last.

The folder's name determines everything else (cgroup, runtime's state), so that any process can end an environment.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError

log = structlog.get_logger()

DEADLINE = "megaflow.deadline"
"""Label with the deadline; see `Tags.labels`."""


@dataclass(frozen=True, slots=True)
class Record:
    """Record of an environment: its owner, and its layers."""

    id: str
    labels: dict[str, str]
    image: str  # as the task names it
    image_id: str
    layers: tuple[str, ...] = ()  # names in the store
    made_unix_s: float = field(default_factory=time.time)

    @property
    def installation(self) -> str:
        return self.labels.get("megaflow", "")

    @property
    def deadline_unix_s(self) -> float:
        """Unix time when its attempt should have ended; 0 when the label is missing."""
        return float(self.labels.get(DEADLINE, 0))


class Records:
    """Records of one home."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "environments" / "oci"

    def place(self, identity: str) -> Path:
        """Returns the folder of an environment's files."""
        return self.folder / identity

    def write(self, record: Record) -> None:
        """Writes a record and creates the environment's folder, or replaces the record atomically for readers."""
        file = self._file(record.id)
        content = _RECORD.dump_json(record)
        if self._make_place(file.parent):
            file.write_bytes(content)  # readers ignore a partial record, and a young folder without one
            return
        fresh = file.with_name(f".{_NAME}.{threading.get_ident()}")
        fresh.write_bytes(content)
        fresh.rename(file)

    def _make_place(self, place: Path) -> bool:
        try:
            place.mkdir()
        except FileExistsError:
            return False
        except FileNotFoundError:
            self.folder.mkdir(parents=True, exist_ok=True)
            _scatter(self.folder)
            place.mkdir()
        return True

    def relabel(self, identity: str, labels: dict[str, str]) -> bool:
        """Gives an environment to another owner. False: it no longer exists, and is not created again."""
        record = self.read(identity)
        if record is not None:
            self.write(replace(record, labels=labels))
        return record is not None

    def restack(self, identity: str, layers: Sequence[str]) -> None:
        """Records that an environment has other layers now."""
        record = self.read(identity)
        if record is not None:
            self.write(replace(record, layers=tuple(layers)))

    def read(self, identity: str) -> Record | None:
        """Reads a record; None: it is missing, or incomplete because of a full disk. Raises: OSError."""
        with suppress(FileNotFoundError, ValidationError):
            return _RECORD.validate_json(self._file(identity).read_bytes())
        return None

    def exists(self, identity: str) -> bool:
        return self._file(identity).exists()

    def remove(self, identity: str) -> None:
        """Removes a record and its folder, which must otherwise be empty."""
        with suppress(FileNotFoundError):
            for name in os.listdir(self.place(identity)):
                if name.startswith("."):  # left incomplete by a killed process
                    os.unlink(self.place(identity) / name)
            self._file(identity).unlink(missing_ok=True)
            self.place(identity).rmdir()

    def all(self) -> Iterator[Record]:
        """Yields all environments that may exist, of any process; those without an owner (no labels) after a minute.

        An unreadable record is left out, because its owner must not be guessed.
        """
        for name in self._names():
            try:
                record = self.read(name) or self._nameless(name)
            except OSError as error:
                log.warning("record.not_read", environment=name, reason=str(error))
                continue
            if record is not None:
                yield record

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return []

    def _nameless(self, identity: str) -> Record | None:
        """Returns a record without owner for a folder without record; None while its creator may still be writing."""
        try:
            made_unix_s = self.place(identity).stat().st_mtime
        except FileNotFoundError:
            return None
        return Record(identity, {}, "", "", made_unix_s=made_unix_s) if time.time() - made_unix_s > _YOUNG_S else None

    def layers_in_use(self) -> set[str]:
        """Raises: OSError: a record cannot be read; then no layer may be treated as unused."""
        records = [self.read(name) for name in self._names()]
        return {layer for record in records if record is not None for layer in record.layers}

    def _file(self, identity: str) -> Path:
        return self.folder / identity / _NAME


_NAME = "record.json"
_RECORD = TypeAdapter(Record)  # ignores unknown fields, which a newer version may write
_YOUNG_S = 60.0
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_UNRELATED = 0x00020000


def _scatter(folder: Path) -> None:
    """Tells ext4 that the folders below are unrelated, so that it spreads them over the disk.

    Otherwise they share one small inode table, in which ext4 without a journal skips all entries deleted in the last
    minutes: after a thousand environments each new folder costs a millisecond.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = struct.unpack("l", fcntl.ioctl(handle, _GET_FLAGS, struct.pack("l", 0)))[0]
        fcntl.ioctl(handle, _SET_FLAGS, struct.pack("l", flags | _UNRELATED))
    except OSError:  # another file system
        pass
    finally:
        os.close(handle)
