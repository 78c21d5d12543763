"""Makes the layer above every image: files that an engine would mount into a container.

As a layer it costs nothing at a start, may be written to like everything else, and is as before in the next
environment.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from app.environments.runtimes import hosts_file
from app.images.layer_store import SNAPSHOT_MARK, SYSTEM_MARK, ImageStore

HELPER = ".megaflow-session"
"""The session's helper, in the root folder."""
HOSTNAME = "environment"
"""The same in all: what a set-up wrote down of it stays true in the next environment."""

_FOLDERS = ("proc", "sys", "dev", "etc")
_ETC = hosts_file.texts(HOSTNAME)


def system_layer(store: ImageStore, helper: Path) -> str:
    """The name of the layer in the store, made if missing. Raises: DiskFull."""
    digest = hashlib.sha256(helper.read_bytes())
    digest.update(repr((_FOLDERS, _ETC, HELPER)).encode())
    name = f"{SYSTEM_MARK}{digest.hexdigest()[:23]}"
    store.add_layer(name, lambda folder: _fill(folder, helper), timeout_s=60.0)
    return name


def stacked(system: str, layers: Sequence[str]) -> list[str]:
    """All layers of an environment, topmost first: what set-ups wrote, the system's, the image's."""
    own = [name for name in layers if not name.startswith(SNAPSHOT_MARK)]
    kept = [name for name in layers if name.startswith(SNAPSHOT_MARK)]
    once = dict.fromkeys(reversed(own))  # an image may have a layer twice, overlayfs refuses it; the upper one hides it
    return [*reversed(kept), system, *once]


def _fill(folder: Path, helper: Path) -> int:
    for name in _FOLDERS:
        _dressed(folder / name, 0o755)
    for name, text in _ETC.items():
        (folder / "etc" / name).write_text(text)
        os.chmod(folder / "etc" / name, 0o644)
    shutil.copyfile(helper, folder / HELPER)
    os.chmod(folder / HELPER, 0o755)
    os.chmod(folder, 0o755)
    return helper.stat().st_size


def _dressed(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)  # whatever this process's umask
