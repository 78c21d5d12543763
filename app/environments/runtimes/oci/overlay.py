"""One file system out of an image's layers and an environment's own."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from app.host import kernel

_OPTIONS_LIMIT_BYTES = 4095
"""The kernel takes one page of mount options."""
_VOLATILE = "volatile"
"""No syncs to disk: an environment does not outlive its host's power. Known since kernel 5.10."""


def mount(layers: Sequence[Path], upper: Path, work: Path, root: Path) -> None:
    """Mount at `root`: what is written goes to `upper`; `layers`, topmost first, stay as they are.

    Changes the calling thread's working folder, so that 127 layers fit into the kernel's page of options. Devices that
    an image may bring do not work.

    Raises: OSError.
    """
    os.chdir(layers[0].parent)
    told = options(layers, upper, work)
    if len(told) + len(_VOLATILE) + 1 > _OPTIONS_LIMIT_BYTES:
        raise OSError(errno.E2BIG, f"{len(layers)} layers are more than one mount can name", str(root))
    try:
        kernel.mount("overlay", str(root), "overlay", kernel.MS_NODEV, f"{told},{_VOLATILE}")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        kernel.mount("overlay", str(root), "overlay", kernel.MS_NODEV, told)


def options(layers: Sequence[Path], upper: Path, work: Path) -> str:
    """What `mount` tells the kernel, for a working folder that is the layers'."""
    base = layers[0].parent
    lower = ":".join(os.path.relpath(layer, base) for layer in layers)
    return f"lowerdir={lower},upperdir={os.path.relpath(upper, base)},workdir={os.path.relpath(work, base)}"
