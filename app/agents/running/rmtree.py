"""Removes a directory tree of any depth, without recursion and without long paths."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def uproot(tree: Path, beside: Path) -> None:
    """Remove the folder `tree` as far as one may; folders below it are moved into a folder in `beside` first."""
    with suppress(OSError):
        pile = Path(tempfile.mkdtemp(prefix=".removing-", dir=beside))
        waiting, number = [tree], 0
        while waiting:
            folder = waiting.pop()
            with suppress(OSError):
                folder.chmod(0o700)
                with os.scandir(folder) as entries:
                    found = list(entries)
                for entry in found:
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                        continue
                    os.chmod(entry.path, 0o700)  # else it cannot be moved: its `..` changes
                    number += 1
                    moved = pile / str(number)
                    os.rename(entry.path, moved)
                    waiting.append(moved)
                folder.rmdir()
        pile.rmdir()
