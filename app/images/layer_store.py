"""Stores unpacked layers of images, each once per host.

images/oci/layers/NAME      a layer's files, as overlayfs takes them
images/oci/images/ID.json   an image: its layers and the used part of its configuration
images/oci/snapshots/KEY.json   an image with one more layer, made by set-up commands
images/oci/unkept/KEY.json  set-up commands whose result is more than files
images/oci/blobs/…          fetched from a registry: a blob until it is unpacked, then a link to its layer
images/oci/references/…     the image of a reference at its last request
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from app.errors import ImageUnavailable
from app.host import trees
from app.host.disk import disk_named
from app.host.slots import turn
from app.images.unpack import Fill

log = structlog.get_logger()

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = 24
"""Digits of a digest in a layer's name: few, so that many names fit into one mount. 96 bits do not collide."""


InUse = Callable[[], set[str]]
"""Returns the names of layers in use. Called while no new use can begin, so that none is missing."""
_UNKEPT_S = 24 * 3600.0
"""Time until caching a set-up is tried again."""

SYSTEM_MARK = "y"
"""First letter of layers that belong to no image and are never removed."""
SNAPSHOT_MARK = "s"
"""First letter of layers that are not an image's own."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image, or a snapshot of one, by its layers in the store."""

    id: str  # sha256:… of its configuration, as engines and registries call it
    layers: tuple[str, ...]  # names in the store, bottom first
    env: dict[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""


@dataclass(frozen=True, slots=True)
class StoredImageEntry:
    """An image in the store, or a set-up's result. `used_at`: seconds since 1970, for images of their arrival."""

    image: StoredImage
    used_at: float
    snapshot: str | None = None  # its name; None: an image


def image_of(image_id: str, digests: Sequence[str], config: Mapping[str, Any]) -> StoredImage:
    """Creates an image from the digests of its uncompressed layers and the section `config` of its configuration."""
    pairs = (entry.partition("=") for entry in config.get("Env") or ())
    env = {name: value for name, _, value in pairs}
    layers = tuple(layer_name(digest) for digest in digests)
    return StoredImage(image_id, layers, env, config.get("User") or "", config.get("WorkingDir") or "")


def layer_name(digest: str) -> str:
    """Returns the store's name of a layer's digest (`sha256:…`). Raises: ImageUnavailable: no digest, but a path."""
    if not DIGEST.fullmatch(digest):
        raise ImageUnavailable(f"expected a sha256 digest of a layer in the image, found {digest[:80]!r}.")
    return digest.removeprefix("sha256:")[:_NAME]


class ImageStore:
    """The store below a home. Safe for many threads and processes."""

    def __init__(self, home: Path) -> None:
        self._root = home / "images" / "oci"
        self.layers = self._root / "layers"
        self.blobs = self._root / "blobs"

    def add_layer(self, name: str, fill: Fill, *, timeout_s: float) -> bool:
        """Adds a layer unless it is there. One of all concurrent calls runs `fill`. Returns whether this one did.

        The image that needs it must be in `making`, else another process may remove it as left over.

        Raises: ImageUnavailable, DiskFull.
        """
        if self.has_layer(name):
            return False
        try:
            with turn(self.lock_file(name), timeout_s=timeout_s):
                if missing := not self.has_layer(name):
                    self._fill(name, fill)
                return missing
        except TimeoutError as error:
            raise ImageUnavailable(f"layer {name} is being unpacked by another; {error}.") from error

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yields a folder next to the layers, from which one can be moved. Removed afterwards, also after a kill."""
        name = uuid.uuid4().hex
        lock = self.lock_file(name)
        folder = self.layers / f".new-{name}"
        with turn(lock, timeout_s=1.0):
            folder.mkdir(parents=True)
            try:
                yield folder
            finally:
                trees.remove(folder)
                lock.with_name(f"{name}.0").unlink(missing_ok=True)  # the name that `turn` uses

    def lock_file(self, name: str) -> Path:
        return self._root / "locks" / name

    def has_layer(self, name: str) -> bool:
        return (self.layers / name).is_dir()

    def size_bytes(self, layers: Iterable[str]) -> int:
        """Returns the bytes of these layers."""
        return sum(int(_read(self._size_file(name), "0")) for name in layers)

    def _fill(self, name: str, fill: Fill) -> None:
        fresh = self.layers / f".new-{name}"
        trees.remove(fresh)  # remains of a killed process: this one holds the lock
        fresh.mkdir(parents=True)
        begun = time.monotonic()
        try:
            with disk_named(f"unpack layer {name}"):
                size_bytes = fill(fresh)
            self._publish(fresh, name, size_bytes)
        except BaseException:
            trees.remove(fresh)
            raise
        log.info("layer.unpacked", layer=name, size_bytes=size_bytes, took_s=round(time.monotonic() - begun, 3))

    def _publish(self, folder: Path, name: str, size_bytes: int) -> None:
        self.layers.mkdir(parents=True, exist_ok=True)
        write_whole(self._size_file(name), str(size_bytes))
        folder.rename(self.layers / name)

    def _size_file(self, name: str) -> Path:
        return self._root / "sizes" / name

    def fetching(self) -> AbstractContextManager[None]:
        """Prevents, for the block, that any process removes blobs that were fetched and not yet unpacked."""
        self.blobs.mkdir(parents=True, exist_ok=True)
        return _lock(self.lock_file("fetching"), fcntl.LOCK_SH)

    def blob(self, digest: str) -> Path:
        """Returns the path of a registry's blob by its digest. Once unpacked, it is a link to its layer."""
        return self.blobs / digest.replace(":", "/", 1)

    def _drop_blobs(self) -> None:
        """Removes blobs that were not unpacked, and links to removed layers; does nothing during a fetch."""
        with suppress(BlockingIOError), _lock(self.lock_file("fetching"), fcntl.LOCK_EX | fcntl.LOCK_NB):
            for blob in self.blobs.glob("**/*"):
                if not blob.is_dir():  # a link to an existing layer is one
                    blob.unlink(missing_ok=True)

    def announce(self, image: StoredImage) -> None:
        """Records the layers of an image. It can be used as soon as all of them are there."""
        write_whole(self._image_file(image.id), json.dumps(asdict(image)))

    @contextmanager
    def making(self, image: StoredImage) -> Iterator[None]:
        """Announces an image. In the block, while its layers arrive, no process removes them as left over."""
        with _lock(self._making_file(image.id), fcntl.LOCK_SH):
            self.announce(image)
            yield

    def image(self, image_id: str) -> StoredImage | None:
        """Returns the image if all of its layers are here."""
        return self._loaded(self._image_file(image_id))

    def images(self) -> list[StoredImage]:
        loaded = [self._loaded(file) for file in self._files("images")]
        return [image for image in loaded if image is not None]

    def listed(self) -> list[StoredImageEntry]:
        """Returns the complete images, and the results of set-ups."""
        images = [(file, None) for file in self._files("images")]
        entries = []
        for file, name in (*images, *((file, file.stem) for file in self._files("snapshots"))):
            with suppress(FileNotFoundError):  # just removed
                if (image := self._loaded(file)) is not None:
                    entries.append(StoredImageEntry(image, file.stat().st_mtime, name))
        return entries

    def references(self) -> dict[str, str]:
        """Returns the references whose images are complete here, with the images' ids."""
        ids: dict[str, str] = {}
        for file in self._files("references"):
            with suppress(OSError, ValueError, KeyError):  # just removed
                reference = json.loads(file.read_text())["reference"]
                if image_id := self.recall(reference):
                    ids[reference] = image_id
        return ids

    def change_marker(self) -> frozenset[str]:
        """Returns a value that changes whenever an image comes or goes; cheap."""
        return frozenset(
            file.name for folder in ("images", "references") for file in (self._root / folder).glob("[!.]*")
        )

    def remember(self, reference: str, image_id: str) -> None:
        """Records the image of a reference."""
        write_whole(self._hashed("references", reference), json.dumps({"reference": reference, "image": image_id}))

    def recall(self, reference: str) -> str | None:
        """Returns the id of a reference's image at its last request; None when it is not here."""
        image_id = json.loads(_read(self._hashed("references", reference), "{}")).get("image")
        return image_id if image_id and self.image(image_id) else None

    def add_snapshot(
        self,
        key: str,
        under: StoredImage,
        upper: Path,
        size_bytes: int,
    ) -> StoredImage:
        """Moves the folder `upper` into the store as one more layer on `under`. Of two with one key the first stays."""
        name = f"{SNAPSHOT_MARK}{hashlib.sha256(key.encode()).hexdigest()[: _NAME - 1]}"
        with self.in_use(), turn(self.lock_file(name), timeout_s=30.0):
            if (existing := self.snapshot(key)) is not None:
                trees.remove(upper)
                return existing
            trees.remove(self.layers / name)  # remains of a process that was killed before it wrote the snapshot file
            self._publish(upper, name, size_bytes)
            image = replace(under, layers=(*under.layers, name))
            write_whole(self._hashed("snapshots", key), json.dumps(asdict(image)))
            return image

    def snapshot(self, key: str) -> StoredImage | None:
        """Returns the image stored under `key` if all of its layers are here. Counts as use."""
        file = self._hashed("snapshots", key)
        image = self._loaded(file)
        if image is not None:
            with suppress(FileNotFoundError):  # just removed
                os.utime(file)
        return image

    def note_unkept(self, key: str, image_id: str) -> None:
        """Records that the set-up `key` on this image cannot be cached: it is not tried again for a day."""
        write_whole(self._hashed("unkept", key), image_id)

    def is_unkept(self, key: str) -> bool:
        """Whether `note_unkept` recorded the key in the last day."""
        try:
            return time.time() - self._hashed("unkept", key).stat().st_mtime < _UNKEPT_S
        except FileNotFoundError:
            return False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Prevents removals while held: for the time between finding an image and recording its use."""
        with self._locked(fcntl.LOCK_SH):
            yield

    def remove(self, image_id: str, *, keep: InUse) -> int:
        """Removes an image with its snapshots, and layers that nothing else needs. Returns the freed bytes.

        keep: layers in use (`Records.layers_in_use`).
        An image that is in use stays: 0.
        """
        with self._locked(fcntl.LOCK_EX):
            in_use = keep()
            snapshots = [file for file in self._files("snapshots") if _described(file).get("id") == image_id]
            files = [self._image_file(image_id), *snapshots]
            others = {name for file in self._files("images") if file != files[0] for name in _names(file)}
            if {name for file in files for name in _names(file)} & in_use - others:
                return 0
            unkept = [file for file in self._files("unkept") if _read(file, "") == image_id]
            for file in (*files, *unkept):
                file.unlink(missing_ok=True)
            return self._drop(in_use)

    def remove_setup(self, name: str, *, keep: InUse) -> int:
        """Removes a set-up's result by its name in `listed`. Returns the freed bytes; 0: it is in use and stays."""
        with self._locked(fcntl.LOCK_EX):
            in_use = keep()
            file = self._root / "snapshots" / f"{name}.json"
            if set(_described(file).get("layers", ())[-1:]) & in_use:
                return 0
            file.unlink(missing_ok=True)
            return self._drop(in_use)

    def tidy(self, *, keep: InUse) -> int:
        """Removes remains of killed processes, unfinished images, and layers of no image. Returns the freed bytes."""
        with self._locked(fcntl.LOCK_EX):
            in_use = keep()
            for file in self._files("images"):
                self._drop_unfinished(file)
            for file in self._files("references"):
                with suppress(ValueError):  # damaged file
                    if self._loaded(self._image_file(_described(file).get("image", ""))) is not None:
                        continue
                file.unlink(missing_ok=True)
            for left in self.layers.glob(".old-*"):
                trees.remove(left)
            for unfinished in self.layers.glob(".new-*"):
                self._drop_layer(unfinished, unfinished.name.removeprefix(".new-"))
            self._drop_blobs()
            return self._drop(in_use)

    def _drop_unfinished(self, file: Path) -> None:
        if self._loaded(file) is not None:
            return
        with suppress(BlockingIOError), _lock(self._making_file(file.stem), fcntl.LOCK_EX | fcntl.LOCK_NB):
            if self._loaded(file) is None:  # still unfinished under the lock
                file.unlink(missing_ok=True)

    def _drop(self, keep: set[str]) -> int:
        needed = keep | {name for file in (*self._files("images"), *self._files("snapshots")) for name in _names(file)}
        superfluous = [one for one in self.layers.glob(f"[!.{SYSTEM_MARK}]*") if one.name not in needed]
        return sum(self._drop_layer(one, one.name) for one in superfluous)

    def _drop_layer(self, folder: Path, name: str) -> int:
        try:
            with turn(self.lock_file(name), timeout_s=0.0):
                doomed = folder.with_name(f".old-{uuid.uuid4().hex}")
                folder.rename(doomed)
                size_bytes = self.size_bytes([name])
                self._size_file(name).unlink(missing_ok=True)
        except TimeoutError:  # another process is making it
            return 0
        trees.remove(doomed)
        return size_bytes

    def _loaded(self, file: Path) -> StoredImage | None:
        values = _described(file)
        if not values or not all(self.has_layer(name) for name in values["layers"]):
            return None
        return StoredImage(**{**values, "layers": tuple(values["layers"])})

    def _image_file(self, image_id: str) -> Path:
        return self._root / "images" / f"{image_id.removeprefix('sha256:')}.json"

    def _files(self, kind: str) -> list[Path]:
        return list((self._root / kind).glob("[!.]*.json"))

    def _hashed(self, kind: str, key: str) -> Path:
        return self._root / kind / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def _making_file(self, image_id: str) -> Path:
        return self._root / "locks" / f"making-{image_id.removeprefix('sha256:')}"

    def _locked(self, how: int) -> AbstractContextManager[None]:
        return _lock(self._root / "lock", how)


@contextmanager
def _lock(file: Path, how: int) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def _described(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_read(file, "{}"))
    return content


def _names(file: Path) -> set[str]:
    return set(_described(file).get("layers", ()))


def _read(file: Path, otherwise: str) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return otherwise


def write_whole(file: Path, text: str) -> None:
    """Writes a file: a reader sees the old content or the new. Raises: DiskFull."""
    fresh = file.with_name(f".{uuid.uuid4().hex}")
    with disk_named(f"write {file.name}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            fresh.write_text(text)
            fresh.rename(file)
        finally:
            fresh.unlink(missing_ok=True)
