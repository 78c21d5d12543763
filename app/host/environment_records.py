"""Records of environments on this host: one small file each, written first and removed last.

From the folder's name alone all else follows (cgroup, runtime's state), so that any process can end it.
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
"""The label that says until when; see `Tags.labels`."""


@dataclass(frozen=True, slots=True)
class Record:
    """One environment: its owner, and the layers that it stands on."""

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
        """When its attempt should have ended; 0 when it does not say."""
        return float(self.labels.get(DEADLINE, 0))


class Records:
    """The records of one home."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "environments" / "oci"

    def place(self, identity: str) -> Path:
        """The folder of an environment's files."""
        return self.folder / identity

    def write(self, record: Record) -> None:
        """Write it and make the environment's folder; or replace it, whole at once for readers in other processes."""
        file = self._file(record.id)
        content = _RECORD.dump_json(record)
        if self._make_place(file.parent):
            file.write_bytes(content)  # half of it is none to readers, who leave a young folder without alone
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
        """Give a living environment to another owner. False: it is gone, and stays so."""
        found = self.read(identity)
        if found is not None:
            self.write(replace(found, labels=labels))
        return found is not None

    def restack(self, identity: str, layers: Sequence[str]) -> None:
        """Note that an environment stands on other layers now."""
        found = self.read(identity)
        if found is not None:
            self.write(replace(found, layers=tuple(layers)))

    def read(self, identity: str) -> Record | None:
        """None when there is none, or it is torn by a full disk. Raises: OSError."""
        with suppress(FileNotFoundError, ValidationError):
            return _RECORD.validate_json(self._file(identity).read_bytes())
        return None

    def exists(self, identity: str) -> bool:
        return self._file(identity).exists()

    def remove(self, identity: str) -> None:
        """The folder with it, which must be empty but for the record."""
        with suppress(FileNotFoundError):
            for name in os.listdir(self.place(identity)):
                if name.startswith("."):  # half written by a process that was killed
                    os.unlink(self.place(identity) / name)
            self._file(identity).unlink(missing_ok=True)
            self.place(identity).rmdir()

    def all(self) -> Iterator[Record]:
        """Every environment that may exist, of any process; those without an owner (no labels) after a minute.

        One whose record cannot be read just now is left out: whose it is must not be guessed.
        """
        for name in self._names():
            try:
                found = self.read(name) or self._nameless(name)
            except OSError as error:
                log.warning("record.not_read", environment=name, reason=str(error))
                continue
            if found is not None:
                yield found

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return []

    def _nameless(self, identity: str) -> Record | None:
        """A folder that does not say whose it is: its maker was killed, or is just making it; then it is none yet."""
        try:
            made = self.place(identity).stat().st_mtime
        except FileNotFoundError:
            return None
        return Record(identity, {}, "", "", made_unix_s=made) if time.time() - made > _YOUNG_S else None

    def layers_in_use(self) -> set[str]:
        """Raises: OSError: a record could not be read, and so nothing may be taken for unused."""
        found = [self.read(name) for name in self._names()]
        return {layer for record in found if record is not None for layer in record.layers}

    def _file(self, identity: str) -> Path:
        return self.folder / identity / _NAME


_NAME = "record.json"
_RECORD = TypeAdapter(Record)  # fields that a newer version may write are passed over
_YOUNG_S = 60.0
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_UNRELATED = 0x00020000


def _scatter(folder: Path) -> None:
    """Tell ext4 that what is in the folders below is unrelated, so that it spreads them over the disk.

    Side by side they would share one small table of inodes, in which ext4 without a journal passes over everything that
    was deleted in the last minutes: after a thousand environments each new folder costs a millisecond.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = struct.unpack("l", fcntl.ioctl(handle, _GET_FLAGS, struct.pack("l", 0)))[0]
        fcntl.ioctl(handle, _SET_FLAGS, struct.pack("l", flags | _UNRELATED))
    except OSError:  # another file system
        pass
    finally:
        os.close(handle)
