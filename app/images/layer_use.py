"""Counts unpacked layers as use of an engine's image, and removes them with it.

The store is imported late: it takes its images from here.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import structlog

log = structlog.get_logger()


def users(home: Path) -> Counter[str]:
    """Environments without an engine, by the id of their image."""
    from app.host.environment_records import Records

    return Counter(record.image_id for record in Records(home.resolve()).all())


def change_marker(home: Path) -> frozenset[str]:
    """Something else whenever an image came or went; cheap."""
    found: list[str] = []
    for folder in ("images", "references"):
        with suppress(FileNotFoundError):
            found += os.listdir(home / "images" / "oci" / folder)
    return frozenset(name for name in found if not name.startswith("."))


def any_here(home: Path) -> bool:
    """Whether anything lies unpacked."""
    return any((home / "images" / "oci" / "images").glob("[!.]*.json"))


def references(home: Path) -> dict[str, str]:
    """The references whose image is here as a whole, with its id."""
    from app.images.layer_store import ImageStore

    return ImageStore(home.resolve()).references()


def forget(home: Path, image_id: str) -> int:
    """Remove the unpacked image; bytes that are free now, 0 when an environment stands on it."""
    from app.host.environment_records import Records
    from app.images.layer_store import ImageStore

    where = home.resolve()
    try:
        return ImageStore(where).remove(image_id, keep=Records(where).layers_in_use)
    except OSError as error:  # what is in use cannot be told: nothing goes
        log.warning("unpacked.not_removed", image=image_id, reason=str(error))
        return 0


def tidy(home: Path) -> int:
    """Remove what killed processes left half unpacked, and layers of no image; bytes that are free now."""
    from app.host.environment_records import Records
    from app.images.layer_store import ImageStore

    where = home.resolve()
    try:
        return ImageStore(where).tidy(keep=Records(where).layers_in_use)
    except OSError as error:
        log.warning("unpacked.not_tidied", reason=str(error))
        return 0
