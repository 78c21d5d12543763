"""Pulls images from a registry into the store without an engine. The program skopeo fetches, every digest is checked.

skopeo finds existing blobs in one folder and fetches the others. A blob that was unpacked is replaced by a
link to its layer: it takes no room and counts as existing until the layer is removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from app.errors import DiskFull, ImageUnavailable, ImageUnfit
from app.host import kernel
from app.host.disk import no_space
from app.host.slots import turn
from app.images.engine_registry import COMPATIBLE
from app.images.layer_store import DIGEST, ImageStore, StoredImage, image_of, layer_name
from app.images.logins import Login
from app.images.references import Reference, short
from app.images.registry_refusals import RefusalKind, RegistryRefusal, persist
from app.images.unpack import Bounds, Digesting, unpack_layer

_SAID = re.compile(r'level=fatal msg="(.*)"')
_QUERY = re.compile(r"\?[^\s\"\\]+")
"""Query of the storage URL to which a registry redirects. It grants access, like a key."""
_MOST_TIMES, _ALWAYS_BYTES = 200, 16 << 30
"""Limit of a layer: 200 times the bytes of its blob, or 16 GiB if that is more. Larger ones aim to fill a disk."""
_PROGRAMS = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd"}
"""Programs that unpack a layer's blob, by its first bytes."""


def pull(reference: Reference, store: ImageStore, deadline: float, login: Login | None = None) -> StoredImage:
    """Pulls an image of a registry into the store. Layers that are here already are not fetched.

    deadline: monotonic seconds.

    Raises: RegistryRefusal, ImageUnavailable, ImageUnfit, DiskFull.
    """
    work = _Pull(reference, store, deadline, login or {})
    try:
        return persist(work.once, deadline)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, IsADirectoryError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ImageUnavailable(f"{work.doing}: its registry answered what cannot be read ({what})") from error


class _Pull:
    def __init__(self, reference: Reference, store: ImageStore, deadline: float, login: Login) -> None:
        self.doing = f"image {reference.host}/{reference.repository}:{reference.version} cannot be pulled"
        self._reference = reference
        self._store = store
        self._deadline = deadline
        self._login = login

    def once(self) -> StoredImage:
        store = self._store
        with store.fetching(), store.scratch() as layout:
            self._fetch(layout)
            copied = read(layout, store)
            self._refuse_foreign(copied.config)
            image = image_of(copied.config_digest, copied.digests, copied.config.get("config") or {})
            with store.making(image):
                copied.unpack(store, timeout_s=self._left_s)
                stored = store.image(image.id)
        if stored is None:
            raise RegistryRefusal(self.doing, "a layer was removed meanwhile", RefusalKind.BUSY)
        return stored

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _fetch(self, layout: Path) -> None:
        """Fetches the image's blobs, and its index into the folder `layout`. One at a time from each registry, so
        that an image finds the layers that it shares with the one before.
        """
        more = ["--src-tls-verify=false"] if self._reference.is_near else []
        with (
            tempfile.NamedTemporaryFile("w", suffix=".json") as logins,
            turn(self._store.lock_file(f"fetch-{short(self._reference.host)}"), timeout_s=self._left_s),
        ):
            json.dump({"auths": {self._reference.host: _for_skopeo(self._login)}}, logins)
            logins.flush()
            more += ["--authfile", logins.name] if self._login else ["--src-no-creds"]
            message = copy(self._reference.for_skopeo, layout, self._store, more, timeout_s=self._left_s)
        if message:
            self._refuse(message)

    def _refuse(self, said: str) -> None:
        if no_space(said):
            raise DiskFull(f"{self.doing}: the disk is full ({said}); free some, or lower MEGAFLOW_IMAGE_DISK_HIGH.")
        refused = RegistryRefusal(self.doing, said)
        if refused.refusal is RefusalKind.PLATFORM:
            raise self._foreign(said)
        raise refused

    def _refuse_foreign(self, config: Mapping[str, Any]) -> None:
        """Checks the image's own configuration, as an engine does: a single manifest has no list to choose from."""
        system, machine, here = config.get("os"), config.get("architecture"), kernel.machine()
        if (system or "linux") != "linux" or (machine and machine != here and (here, machine) not in COMPATIBLE):
            raise self._foreign(f"{system}/{machine}")

    def _foreign(self, found: str) -> ImageUnfit:
        return ImageUnfit(
            f"{self.doing}: expected an image for linux/{kernel.machine()}, found {found}; name an image for this "
            "machine, or run the task where the architecture fits."
        )


def copy(source: str, layout: Path, store: ImageStore, more: Sequence[str] = (), *, timeout_s: float) -> str:
    """Copies an image's blobs into the store. Returns skopeo's error, if any. Raises: ImageUnavailable: no skopeo."""
    program = shutil.which("skopeo")
    if program is None:
        raise ImageUnavailable("skopeo is not installed here (Debian: apt-get install skopeo).")
    command = [program, "--insecure-policy", "copy", "--quiet", "--dest-oci-accept-uncompressed-layers"]
    command += ["--dest-shared-blob-dir", str(store.blobs), *more, source, "oci:."]
    try:
        result = subprocess.run(  # noqa: S603 (its words are ours, but for the image's name)
            command,
            cwd=layout,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return "it took longer than this task allows for its image"
    if result.returncode == 0:
        return ""
    fatal = _SAID.search(result.stderr)
    return _QUERY.sub("?…", (fatal[1] if fatal else result.stderr.strip()).replace('\\"', '"')) or "no message"


@dataclass(frozen=True)
class CopiedImage:
    """An image whose blobs are in the store. `digests`: of its uncompressed layers; `blobs`: their paths."""

    config_digest: str
    config: dict[str, Any]
    digests: list[str]
    blobs: list[Path]

    def unpack(self, store: ImageStore, *, timeout_s: float) -> None:
        """Unpacks its layers into the store. Raises: RegistryRefusal: one is gone; ImageUnavailable, DiskFull."""
        deadline = time.monotonic() + timeout_s
        for digest, blob in zip(self.digests, self.blobs, strict=True):
            name = layer_name(digest)
            if not store.add_layer(name, partial(_fill, blob, digest, deadline), timeout_s=timeout_s):
                _prove(blob, digest, store.layers / name, deadline)
            _link(blob, store.layers / name)


def read(layout: Path, store: ImageStore) -> CopiedImage:
    """Reads the result of `copy`. Raises: ImageUnavailable, ValueError, LookupError, TypeError, AttributeError."""
    [entry] = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads(store.blob(_digest(entry)).read_text())
    config_digest = _digest(manifest["config"])
    config = json.loads(store.blob(config_digest).read_text())
    blobs = [store.blob(_digest(one)) for one in manifest["layers"]]
    digests = [str(one) for one in config["rootfs"]["diff_ids"]]
    return CopiedImage(config_digest, config, digests, blobs)


def _prove(blob: Path, digest: str, layer: Path, deadline: float) -> None:
    """Checks that a blob belongs to a layer that is here: an image could name another's layer to get its content.

    Raises: ImageUnavailable: it belongs to another layer; RegistryRefusal: it was removed; ImageUnfit.
    """
    actual = ""
    try:
        with _unpacked(blob) as stream:
            actual = Digesting(stream, _bounds(blob, deadline)).finish()
    except IsADirectoryError:  # already replaced by a link to its layer
        pass
    except FileNotFoundError as error:
        raise RegistryRefusal(f"unpack {digest}", "a layer was removed meanwhile", RefusalKind.BUSY) from error
    if actual != digest and blob.resolve() != layer.resolve():
        raise ImageUnavailable(f"a layer is damaged: expected {digest}, found {actual or 'another'}.")


def _fill(blob: Path, digest: str, deadline: float, folder: Path) -> int:
    if not blob.is_file():
        raise RegistryRefusal(f"unpack {digest}", "a layer was removed meanwhile", RefusalKind.BUSY)
    with _unpacked(blob) as stream:
        return unpack_layer(stream, digest, folder, _bounds(blob, deadline))


def _bounds(blob: Path, deadline: float) -> Bounds:
    return Bounds(deadline, max(_ALWAYS_BYTES, _MOST_TIMES * blob.stat().st_size))


def _for_skopeo(login: Login) -> dict[str, str]:
    pair = f"{login.get('username', '')}:{login.get('password', '')}"
    token = login.get("identitytoken")
    return {"auth": b64encode(pair.encode()).decode(), **({"identitytoken": token} if token else {})}


def _link(blob: Path, layer: Path) -> None:
    link = blob.with_name(f".{uuid.uuid4().hex}")
    link.symlink_to(os.path.relpath(layer, blob.parent))
    link.rename(blob)


def _digest(blob: Mapping[str, Any]) -> str:
    digest = str(blob.get("digest", ""))
    if not DIGEST.fullmatch(digest):
        raise ImageUnavailable(f"expected a sha256 digest in the registry's answer, found {digest!r}.")
    return digest


@contextmanager
def _unpacked(blob: Path) -> Iterator[IO[bytes]]:
    with blob.open("rb", buffering=0) as file:
        name = _PROGRAMS.get(file.read(2))
        file.seek(0)
        if name is None:
            yield file
            return
        program = shutil.which(name)
        if program is None:
            raise ImageUnavailable(f"a layer is compressed with {name}, which is not installed here.")
        with subprocess.Popen([program, "-dc"], stdin=file, stdout=subprocess.PIPE) as process:  # noqa: S603
            assert process.stdout is not None
            try:
                yield process.stdout
            finally:
                process.kill()
