"""Uses the layers of the engine's images directly, by content hash.

The engine's own layer folders are not mounted: it may remove them under us. Where they are visible their files are
linked into the store instead, which copies nothing, shares the page cache with the engine's containers, and outlives
the engine's copy (on another disk they are copied). Elsewhere the image is exported.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from app.errors import ImageUnavailable
from app.host.engine import Engine
from app.images import link_layers
from app.images.layer_store import ImageStore, StoredImage, image_of, layer_name
from app.images.unpack import Digesting, Fill, unpack

log = structlog.get_logger()


def take(engine: Engine, image_id: str, store: ImageStore, *, timeout_s: float) -> StoredImage:
    """Have an image of the engine in the store.

    Raises: ImageUnavailable, EngineUnavailable, DiskFull.
    """
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
    if (found := store.image(image.id)) is None:
        raise ImageUnavailable(f"image {image_id}: the engine's export lacks some of its {len(digests)} layers.")
    return found


# --- From its folders -------------------------------------------------------------------------------------------------


def _visible(about: dict[str, Any], count: int) -> list[Path]:
    """The engine's folders of the layers, bottom first; none when it keeps them otherwise, or not here."""
    driver = about.get("GraphDriver") or {}
    data = driver.get("Data") or {}
    if driver.get("Name") != "overlay2" or not data.get("UpperDir") or os.geteuid() != 0:
        return []
    lower = [folder for folder in (data.get("LowerDir") or "").split(":") if folder]
    folders = [Path(folder) for folder in (*reversed(lower), data["UpperDir"])]
    return folders if len(folders) == count and all(folder.is_dir() for folder in folders) else []


def _link(store: ImageStore, name: str, folder: Path, timeout_s: float) -> None:
    """Have a layer of the engine's files; when that cannot be, leave it to the export."""
    try:
        store.add_layer(name, lambda fresh: link_layers.take(folder, fresh), timeout_s=timeout_s)
    except (FileNotFoundError, link_layers.Entangled) as error:  # removed under us, or no whole
        log.debug("layer.not_linked", layer=name, reason=str(error))


# --- By export ------------------------------------------------------------------------------------------------------


class _Stream:
    """The engine's export as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int = -1, /) -> bytes:
        while len(self._rest) < size and (chunk := next(self._chunks, None)) is not None:
            self._rest += chunk
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


def _export(engine: Engine, image: StoredImage, store: ImageStore, timeout_s: float) -> None:
    """Unpack the export as it comes. It names its layers only at the end, but their content tells who they are."""
    with engine.named(f"export image {image.id}", ImageUnavailable):
        chunks = engine.api.get_image(image.id)
        stream = _Stream(iter(chunks))
        with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 20) as tar:  # type: ignore[call-overload]
            for member in tar:
                tar.members = []
                content = tar.extractfile(member) if member.isreg() and _may_be_layer(member.name) else None
                if content is not None:
                    _take_layer(store, image, member.name, content, timeout_s)


def _may_be_layer(name: str) -> bool:
    return name.endswith("/layer.tar") or name.startswith("blobs/sha256/")


def _take_layer(store: ImageStore, image: StoredImage, name: str, content: Any, timeout_s: float) -> None:
    if name.startswith("blobs/"):  # newer engines name each by its digest
        known = layer_name(name.rpartition("/")[2])
        if known in image.layers:
            store.add_layer(known, _of_digest(content, known), timeout_s=timeout_s)
        return
    _take_unnamed(store, image, content, timeout_s)


def _of_digest(content: Any, name: str) -> Fill:
    def fill(fresh: Path) -> int:
        digesting = Digesting(content)
        size_bytes = unpack(digesting, fresh)
        if layer_name(digesting.finish()) != name:
            raise ImageUnavailable(f"the engine's export is damaged: layer {name} has another content.")
        return size_bytes

    return fill


def _take_unnamed(store: ImageStore, image: StoredImage, content: Any, timeout_s: float) -> None:
    with store.scratch() as fresh:
        digesting = Digesting(content)
        size_bytes = unpack(digesting, fresh)
        name = layer_name(digesting.finish())
        if name not in image.layers:
            raise ImageUnavailable(f"the engine's export of {image.id} has a layer {name} which the image has not.")

        def fill(place: Path) -> int:
            place.rmdir()
            fresh.rename(place)
            return size_bytes

        store.add_layer(name, fill, timeout_s=timeout_s)
