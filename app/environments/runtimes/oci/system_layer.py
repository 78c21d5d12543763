"""Makes the layer above every image: files that an engine would mount into a container.

As a layer, these files cost nothing at a start, may be written to like all others, and are unchanged in the next
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
"""Name of the session's helper, in the root folder."""
HOSTNAME = "environment"
"""Host name of every environment: what a set-up stored of it stays true in the next one."""

_FOLDERS = ("proc", "sys", "dev", "etc")
_ETC = hosts_file.texts(HOSTNAME)


def system_layer(store: ImageStore, helper: Path) -> str:
    """Returns the name of the layer in the store; makes it if missing. Raises: DiskFull."""
    digest = hashlib.sha256(helper.read_bytes())
    digest.update(repr((_FOLDERS, _ETC, HELPER)).encode())
    name = f"{SYSTEM_MARK}{digest.hexdigest()[:23]}"
    store.add_layer(name, lambda folder: _fill(folder, helper), timeout_s=60.0)
    return name


def stacked(system: str, layers: Sequence[str]) -> list[str]:
    """Returns all layers of an environment, topmost first: set-up snapshots, the system layer, the image's."""
    own = [name for name in layers if not name.startswith(SNAPSHOT_MARK)]
    snapshots = [name for name in layers if name.startswith(SNAPSHOT_MARK)]
    once = dict.fromkeys(reversed(own))  # overlayfs refuses a layer twice; the upper one hides the lower one
    return [*reversed(snapshots), system, *once]


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
    folder.chmod(mode)  # independent of this process's umask
