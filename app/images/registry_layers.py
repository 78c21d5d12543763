"""Pulls whole images from a registry into the store, checking every digest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from app.errors import ImageUnavailable, ImageUnfit
from app.host import kernel
from app.host.disk import disk_named
from app.images.engine_registry import COMPATIBLE
from app.images.layer_store import ImageStore, StoredImage, image_of, layer_name
from app.images.logins import Login
from app.images.references import Reference
from app.images.registry_client import (
    SMALL_BYTES,
    RefusalKind,
    RegistryCalls,
    RegistryRefusal,
    first_byte,
    persist,
    start_of,
)
from app.images.unpack import Readable, from_tar

_CHUNK_BYTES = 1 << 20
_GZIP_BYTES = 64 << 10
"""Read at a time of what may unpack to a thousand times as much."""
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")


class Registry:
    """One repository of one registry, for one pull. `deadline`: monotonic; login: as for `RegistryCalls`.

    Raises (every method): ImageUnavailable, DiskFull.
    """

    def __init__(self, reference: Reference, deadline: float, login: Callable[[], Login] = Login) -> None:
        self._reference = reference
        self._deadline = deadline
        self._name = f"{reference.host}/{reference.repository}:{reference.version}"
        self._doing = f"image {self._name} cannot be pulled"
        self._calls = RegistryCalls(reference, self._doing, deadline, login)

    def pull(self, store: ImageStore) -> StoredImage:
        """Have the image in the store; its layers are fetched one after another, those that are here are not."""
        try:
            with self._calls:
                return self._pulled(store)
        except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
            what = f"{type(error).__name__}: {error}"
            raise self._refused(f"its registry answered what cannot be read ({what})") from error

    def _pulled(self, store: ImageStore) -> StoredImage:
        manifest = self._manifest(self._reference.version)
        config_digest = _digest(manifest["config"])
        config = self._described("blobs", config_digest)
        self._refuse_foreign(config)
        image = image_of(config_digest, config["rootfs"]["diff_ids"], config.get("config") or {})
        if len(image.layers) != len(manifest["layers"]):
            raise self._refused(f"its {len(manifest['layers'])} layers are {len(image.layers)} by its configuration")
        with store.making(image):
            for digest, blob in zip(config["rootfs"]["diff_ids"], manifest["layers"], strict=True):
                self._layer(store, digest, blob)
        found = store.image(image.id)
        if found is None:
            raise self._refused("a layer was removed meanwhile; try again")
        return found

    def _refused(self, why: str, refusal: RefusalKind = RefusalKind.OTHER) -> RegistryRefusal:
        return RegistryRefusal(self._doing, why, refusal)

    # --- Layers ---------------------------------------------------------------------------------------------------

    def _layer(self, store: ImageStore, digest: str, blob: Mapping[str, Any]) -> None:
        def fill(folder: Path) -> int:
            with self._fetched(_digest(blob), store.layers.parent) as packed, unpacked(packed) as stream:
                return from_tar(stream, digest)(folder)

        store.add_layer(layer_name(digest), fill, timeout_s=max(0.0, self._deadline - time.monotonic()))

    @contextmanager
    def _fetched(self, digest: str, disk: Path) -> Iterator[IO[bytes]]:
        """A blob in a temporary file, checked; on the disk of the folder `disk`, where room is made for images."""
        with disk_named(f"fetch {digest}"), tempfile.TemporaryFile(dir=disk) as file:
            blob = _Blob(file)
            persist(lambda: self._fetch(digest, blob), self._deadline)
            if blob.digest != digest:
                raise self._refused(f"blob {digest} arrived with another content")
            file.seek(0)
            yield file

    def _fetch(self, digest: str, blob: _Blob) -> None:
        """From where it broke off before, if the registry can do that."""
        with self._calls.ask("blobs", digest, offset=blob.size_bytes) as answer, self._calls.unbroken():
            begin = first_byte(answer)
            if begin != blob.size_bytes:
                blob.clear()
                if begin != 0:
                    raise self._refused(
                        f"expected the rest of blob {digest}, found another part of it", RefusalKind.BUSY
                    )
            for chunk in answer.iter_content(_CHUNK_BYTES):
                blob.add(chunk)
                if time.monotonic() > self._deadline:
                    raise self._refused("it took longer than this task allows for its image")

    # --- Manifests ------------------------------------------------------------------------------------------------

    def _manifest(self, version: str) -> dict[str, Any]:
        found = self._described("manifests", version)
        if "manifests" in found:
            return self._manifest(_digest(self._fitting(found["manifests"])))
        if "config" not in found or "layers" not in found:
            raise self._refused(f"expected a manifest of version 2, found {found.get('mediaType') or 'another format'}")
        return found

    def _fitting(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        platforms = [choice.get("platform") or {} for choice in choices]
        for choice, platform in zip(choices, platforms, strict=True):
            if (platform.get("os"), platform.get("architecture")) == ("linux", kernel.machine()):
                return choice
        raise self._foreign(platforms)

    def _refuse_foreign(self, config: Mapping[str, Any]) -> None:
        """By the image's own word, as an engine does it: with one manifest alone there is no list to choose from."""
        system, machine, here = config.get("os"), config.get("architecture"), kernel.machine()
        if (system or "linux") != "linux" or (machine and machine != here and (here, machine) not in COMPATIBLE):
            raise self._foreign([config])

    def _foreign(self, platforms: Iterable[Mapping[str, Any]]) -> ImageUnfit:
        there = sorted({f"{one.get('os')}/{one.get('architecture')}" for one in platforms})
        return ImageUnfit(
            f"image {self._name} cannot be pulled: expected an image for linux/{kernel.machine()}, found "
            f"{', '.join(there)}; name an image for this machine, or run the task where the architecture fits."
        )

    def _described(self, kind: str, name: str) -> dict[str, Any]:
        """A manifest or a configuration, by its tag or digest."""

        def once() -> bytes:
            with self._calls.ask(kind, name) as answer, self._calls.unbroken():
                return start_of(answer)

        content = persist(once, self._deadline)
        if len(content) > SMALL_BYTES:
            raise self._refused(f"{kind}/{name} has more than {SMALL_BYTES} bytes")
        if _DIGEST.match(name) and f"sha256:{hashlib.sha256(content).hexdigest()}" != name:
            raise self._refused(f"{name} arrived with another content")
        found = json.loads(content)
        if not isinstance(found, dict):
            raise self._refused(f"expected an object in {kind}/{name}, found {type(found).__name__}")
        return found


class _Blob:
    """What has come of a blob, in a file, and the digest of that."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def add(self, chunk: bytes) -> None:
        self._hash.update(chunk)
        self._file.write(chunk)
        self.size_bytes += len(chunk)

    def clear(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._hash = hashlib.sha256()
        self.size_bytes = 0


def _digest(blob: Mapping[str, Any]) -> str:
    digest = str(blob.get("digest", ""))
    if not _DIGEST.match(digest):
        raise ImageUnavailable(f"expected a sha256 digest in the registry's answer, found {digest!r}.")
    return digest


# --- Compression ----------------------------------------------------------------------------------------------------


class _Gunzip:
    """A gzip file, also one of several parts."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._inflate = zlib.decompressobj(31)
        self._rest = bytearray()

    def read(self, size: int = -1, /) -> bytes:
        while len(self._rest) < size:
            data = self._inflate.unused_data or self._source.read(_GZIP_BYTES)
            if not data:
                break
            if self._inflate.eof:
                self._inflate = zlib.decompressobj(31)
            self._rest += self._inflate.decompress(data)
        found = bytes(self._rest[:size])
        del self._rest[:size]
        return found


@contextmanager
def unpacked(file: IO[bytes]) -> Iterator[Readable]:
    """The content of a layer's blob, whichever way it is compressed."""
    magic = file.read(4)
    file.seek(0)
    if magic[:2] == b"\x1f\x8b":
        yield _Gunzip(file)
    elif magic == b"\x28\xb5\x2f\xfd":
        with _zstd(file) as stream:
            yield stream
    else:
        yield file


@contextmanager
def _zstd(file: IO[bytes]) -> Iterator[Readable]:
    program = shutil.which("zstd")
    if program is None:
        raise ImageUnavailable("a layer is compressed with zstd, which is not installed here: `apt install zstd`.")
    os.lseek(file.fileno(), 0, os.SEEK_SET)  # what the file object calls its place is not yet the kernel's
    command = [program, "-dc"]
    with subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE) as process:  # noqa: S603 (a constant)
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()
