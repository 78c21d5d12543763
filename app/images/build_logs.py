"""Stores the logs of recent builds, one file each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from app.settings import Settings

MOST_BYTES = 2 << 20
"""Size above which a log loses its first half: its end tells what went wrong."""
KEEP = 200
"""Maximum number of logs."""
_MARK = "[megaflow] "
"""Prefix of MegaFlow's own lines."""
_STAMP = "%Y%m%d-%H%M%S-%f"
_REASON_LENGTH = 2000


class BuildLog:
    """A log file of limited size, written while its build runs. Not safe to share between threads."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._written = file.open("w+b")

    def write(self, text: str) -> None:
        """Raises: OSError: the disk is full."""
        self._written.write(text.encode(errors="replace"))
        if self._written.tell() > MOST_BYTES:
            self._written.seek(-MOST_BYTES // 2, os.SEEK_CUR)
            tail = self._written.read()
            self._written.seek(0)
            self._written.write(b"[... the beginning was left out ...]\n" + tail)
            self._written.truncate()
        self._written.flush()

    def note(self, text: str) -> None:
        """Writes a line that MegaFlow adds."""
        self.write(f"\n{_MARK}{text}\n")

    def close(self) -> None:
        """Raises: OSError: the disk is full."""
        self._written.close()


class BuildLogs:
    """The logs of this host and installation."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.home / "logs" / "builds"

    @contextmanager
    def begun(self, tag: str) -> Iterator[BuildLog]:
        """Opens a new log for the image `tag`. Notes in it how the block ended. Raises: OSError: the disk is full."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tidy()
        since = time.monotonic()
        log = BuildLog(self._folder / f"{_short(tag)}.{datetime.now(UTC).strftime(_STAMP)}.log")
        try:
            log.note(f"build of {tag}")
            yield log
            log.note(f"built in {time.monotonic() - since:.1f} s")
        except Exception as error:
            reason = str(error).partition("\n")[0][:_REASON_LENGTH]
            with suppress(OSError):  # the first error is the important one
                log.note(f"not built, after {time.monotonic() - since:.1f} s: {type(error).__name__}: {reason}")
            raise
        finally:
            log.close()

    def files(self) -> list[Path]:
        """Returns the log files, newest first."""
        return sorted(self._folder.glob("*.log"), key=lambda file: file.stem.rpartition(".")[2], reverse=True)

    def _tidy(self) -> None:
        for file in self.files()[KEEP - 1 :]:
            file.unlink(missing_ok=True)


def _short(tag: str) -> str:
    return tag.rpartition(":")[2].replace("/", "-")
