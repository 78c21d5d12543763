"""Keeps the logs of recent builds, one file each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from app.errors import UnknownName
from app.settings import Settings

HEAD_BYTES = 512 << 10
TAIL_BYTES = 1 << 20
"""Kept of a log's beginning and, at the least, of its end."""
KEEP = 200
"""How many logs are kept, and for how long."""
KEEP_S = 30 * 86400.0
_MARK = "[megaflow] "
"""What our own lines begin with."""
_BUILT, _NOT_BUILT = "built in", "not built, after"
_STAMP = "%Y%m%d-%H%M%S-%f"
_LAST_BYTES = 4000
_SHORTEST_NAME = 4


class BuildLog:
    """A file that is written while its build runs, and does not grow too large. Not safe to share between threads."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._written = file.open("w+b")
        self._tail_at = HEAD_BYTES  # where the end begins, once something was left out
        self._left_out = 0

    def write(self, text: str) -> None:
        """Raises: OSError: the disk is full."""
        self._written.write(text.encode(errors="replace"))
        self._written.flush()
        if self._written.tell() > self._tail_at + 2 * TAIL_BYTES:
            self._shorten()

    def note(self, text: str) -> None:
        """A line that MegaFlow adds."""
        begun = "" if self._at_line_start() else "\n"
        self.write(f"{begun}{_MARK}{text}\n")

    def close(self) -> None:
        """Raises: OSError: the disk is full."""
        self._written.close()

    def _at_line_start(self) -> bool:
        if self._written.tell() == 0:
            return True
        self._written.seek(-1, os.SEEK_END)
        return self._written.read(1) == b"\n"

    def _shorten(self) -> None:
        """Leave out what is neither the beginning nor the end, and say how much that is."""
        end = self._written.tell()
        self._left_out += end - TAIL_BYTES - self._tail_at
        self._written.seek(end - TAIL_BYTES)
        tail = self._written.read()
        gap = f"\n[... {self._left_out} bytes left out ...]\n".encode()
        self._written.seek(HEAD_BYTES)
        self._written.write(gap + tail)
        self._written.truncate()
        self._tail_at = HEAD_BYTES + len(gap)


@dataclass(frozen=True, slots=True)
class StoredBuildLog:
    """A log on this host. `name`: tells it from every other; `outcome`: None while it is written, or was cut short."""

    name: str
    file: Path
    begun_at: datetime
    size_bytes: int
    outcome: str | None

    def text(self) -> str:
        """What the build said."""
        return self.file.read_text(errors="replace")


class BuildLogs:
    """The logs of this host and installation."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.home / "logs" / "builds"

    @contextmanager
    def begun(self, tag: str) -> Iterator[BuildLog]:
        """A new log for the image `tag`, which is told how the block ended.

        Raises: OSError: the disk is full.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tidy()
        since = time.monotonic()
        log = BuildLog(self._folder / f"{_short(tag)}.{datetime.now(UTC).strftime(_STAMP)}.log")
        try:
            log.note(f"build of {tag}")
            yield log
            log.note(f"{_BUILT} {time.monotonic() - since:.1f} s")
        except Exception as error:
            told = str(error).partition("\n")[0][: _LAST_BYTES // 2]
            with suppress(OSError):  # what went wrong first is what matters
                log.note(f"{_NOT_BUILT} {time.monotonic() - since:.1f} s: {type(error).__name__}: {told}")
            raise
        finally:
            log.close()

    def all(self) -> list[StoredBuildLog]:
        """Newest first."""
        found = []
        for file in self._files():
            try:
                size_bytes, outcome = file.stat().st_size, _outcome(file)
            except FileNotFoundError:  # removed meanwhile
                continue
            found.append(StoredBuildLog(file.stem, file, _begun_at(file), size_bytes, outcome))
        return found

    def of(self, name: str) -> StoredBuildLog:
        """The newest log of an image, by its tag or its beginning, or the log of this name.

        Raises: UnknownName.
        """
        kept, wanted = self.all(), _short(name)
        for one in kept:
            if one.name == wanted or (len(wanted) >= _SHORTEST_NAME and one.name.startswith(wanted)):
                return one
        raise UnknownName.of("build log", name, sorted({one.name.partition(".")[0] for one in kept})[:30])

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.log"), key=_begun_at, reverse=True)

    def _tidy(self) -> None:
        """Make place for one more."""
        oldest = datetime.fromtimestamp(time.time() - KEEP_S, UTC)
        for number, file in enumerate(self._files()):
            if number >= KEEP - 1 or _begun_at(file) < oldest:
                file.unlink(missing_ok=True)


def _short(tag: str) -> str:
    return tag.rpartition(":")[2].replace("/", "-")


def _begun_at(file: Path) -> datetime:
    try:
        return datetime.strptime(file.stem.rpartition(".")[2], _STAMP).replace(tzinfo=UTC)
    except ValueError:  # from before logs had a time
        return datetime.fromtimestamp(0, UTC)


def _outcome(file: Path) -> str | None:
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - _LAST_BYTES))
        last = log.read().decode(errors="replace").rstrip("\n").rpartition("\n")[2]
    told = last.removeprefix(_MARK)
    return told if last.startswith(_MARK) and told.startswith((_BUILT, _NOT_BUILT)) else None
