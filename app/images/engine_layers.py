"""Uses the layers of the engine's images directly, by content hash.

The engine's own layer folders are not mounted: it may remove them any time. Where they are visible their files are
linked into the store instead, which copies nothing, shares the page cache with the engine's containers, and outlives
the engine's copy. Elsewhere, as on another disk, the image is exported, and skopeo splits it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import structlog

from app.errors import ImageUnavailable
from app.host.disk import disk_named
from app.host.engine import Engine
from app.images import link_layers
from app.images.layer_store import ImageStore, StoredImage, image_of
from app.images.registry_pull import copy, read

log = structlog.get_logger()


def take(engine: Engine, image_id: str, store: ImageStore, *, timeout_s: float) -> StoredImage:
    """Copies an image of the engine into the store. Raises: ImageUnavailable, EngineUnavailable, DiskFull."""
    with engine.named(f"look at image {image_id}", ImageUnavailable):
        about: dict[str, Any] = engine.api.inspect_image(image_id)  # type: ignore[no-untyped-call]
    digests = about["RootFS"].get("Layers") or []
    if not digests:
        raise ImageUnavailable(f"expected layers in image {image_id}, found none.")
    image = image_of(about["Id"], digests, about.get("Config") or {})
    with store.making(image):
        folders = _visible(about, len(digests))
        for name, folder in zip(image.layers, folders, strict=False):
            _link(store, name, folder, timeout_s)
        if store.image(image.id) is None:
            _export(engine, image, store, timeout_s)
    if (stored := store.image(image.id)) is None:
        raise ImageUnavailable(f"image {image_id}: the engine's export lacks some of its {len(digests)} layers.")
    return stored


def _visible(about: dict[str, Any], count: int) -> list[Path]:
    driver = about.get("GraphDriver") or {}
    data = driver.get("Data") or {}
    if driver.get("Name") != "overlay2" or not data.get("UpperDir") or os.geteuid() != 0:
        return []
    lower = [folder for folder in (data.get("LowerDir") or "").split(":") if folder]
    folders = [Path(folder) for folder in (*reversed(lower), data["UpperDir"])]
    return folders if len(folders) == count and all(folder.is_dir() for folder in folders) else []


def _link(store: ImageStore, name: str, folder: Path, timeout_s: float) -> None:
    try:
        store.add_layer(name, lambda fresh: link_layers.take(folder, fresh), timeout_s=timeout_s)
    except (FileNotFoundError, link_layers.Entangled) as error:  # removed meanwhile, or incomplete alone
        log.debug("layer.not_linked", layer=name, reason=str(error))


def _export(engine: Engine, image: StoredImage, store: ImageStore, timeout_s: float) -> None:
    with store.fetching(), store.scratch() as layout:
        archive = layout / "image.tar"
        doing = f"export image {image.id}"
        with engine.named(doing, ImageUnavailable), disk_named(doing), archive.open("wb") as file:
            file.writelines(engine.api.get_image(image.id))
        if message := copy(f"docker-archive:{archive}", layout, store, timeout_s=timeout_s):
            raise ImageUnavailable(f"image {image.id} could not be unpacked: {message}")
        archive.unlink()
        read(layout, store).unpack(store, timeout_s=timeout_s)
