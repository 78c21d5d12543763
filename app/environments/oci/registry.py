"""Images of a registry, without an engine: version 2 of the registries' interface, everything checked by its digest."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import requests
import structlog

from app.environments.disk import disk_named
from app.environments.image_store.names import HUB, located, manifest_of
from app.environments.image_store.registry import COMPATIBLE
from app.environments.oci import kernel
from app.environments.oci.store import ImageStore, StoredImage, image_of, layer_name
from app.environments.oci.unpack import Readable, from_tar
from app.errors import ImageDenied, ImageMissing, ImageUnavailable, ImageUnfit

log = structlog.get_logger()

_LISTS = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_ACCEPT = ", ".join((*_LISTS, *_MANIFESTS))
_HUB_SERVER = "registry-1.docker.io"
_CALL_S = 60.0
_CHUNK_BYTES = 1 << 20
_GZIP_BYTES = 64 << 10
"""Read at a time of what may unpack to a thousand times as much."""
_SMALL_BYTES = 8 << 20
"""The most of a manifest, a configuration or a message that is read: registries take manifests of 4 MiB."""
_PATIENCE_S = 30.0
"""The longest wait that a registry may ask for between two tries."""
_TRIES = 5
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")


@dataclass(frozen=True, slots=True)
class Reference:
    """Where an image is: registry, repository, and a tag or a digest."""

    host: str
    repository: str
    version: str

    @classmethod
    def parse(cls, text: str) -> Reference:
        """From what people write: `python:3.12`, `ghcr.io/a/b@sha256:…`, `localhost:5000/x`."""
        host, path = located(text)
        if host == HUB:
            host, path = _HUB_SERVER, path if "/" in path else f"library/{path}"
        repository, version = manifest_of(path)
        return cls(host, repository, version)

    @property
    def url(self) -> str:
        scheme = "http" if _near(self.host) else "https"
        return f"{scheme}://{self.host}/v2/{self.repository}"


@dataclass
class Registry:
    """One repository of one registry, for the time of one pull. Raises: ImageUnavailable, DiskFull."""

    reference: Reference
    deadline: float  # monotonic
    given: Mapping[str, str] | None = field(
        default=None, repr=False
    )  # `username` and `password`; None: what `docker login` has kept
    _session: requests.Session = field(default_factory=requests.Session)
    _authorisation: str | None = None

    def pull(self, store: ImageStore) -> StoredImage:
        """Have the image in the store; its layers are fetched one after another, those that are here are not."""
        try:
            with self._session:
                return self._pulled(store)
        except (requests.RequestException, ValueError, KeyError, zlib.error) as error:
            what = f"{type(error).__name__}: {error}"
            raise self._refused(f"its registry broke off or answered what cannot be read ({what})") from error

    def _pulled(self, store: ImageStore) -> StoredImage:
        manifest = self._manifest(self.reference.version)
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

    def _layer(self, store: ImageStore, digest: str, blob: Mapping[str, Any]) -> None:
        def fill(folder: Path) -> int:
            with self._fetched(_digest(blob), store.layers.parent) as packed, unpacked(packed) as stream:
                return from_tar(stream, digest)(folder)

        store.add_layer(layer_name(digest), fill, timeout_s=max(0.0, self.deadline - time.monotonic()))

    @contextmanager
    def _fetched(self, digest: str, disk: Path) -> Iterator[IO[bytes]]:
        """A blob in a temporary file, checked; on the disk of the folder `disk`, where room is made for images."""
        with disk_named(f"fetch {digest}"), tempfile.TemporaryFile(dir=disk) as file:
            found = hashlib.sha256()
            with self._get("blobs", digest) as answer:
                for chunk in answer.iter_content(_CHUNK_BYTES):
                    found.update(chunk)
                    file.write(chunk)
                    if time.monotonic() > self.deadline:
                        raise self._refused("it took longer than this task allows for its image")
            if f"sha256:{found.hexdigest()}" != digest:
                raise self._refused(f"blob {digest} arrived with another content")
            file.seek(0)
            yield file

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
        with self._get(kind, name) as answer:
            content = _start_of(answer)
        if len(content) > _SMALL_BYTES:
            raise self._refused(f"{kind}/{name} has more than {_SMALL_BYTES} bytes")
        if _DIGEST.match(name) and f"sha256:{hashlib.sha256(content).hexdigest()}" != name:
            raise self._refused(f"{name} arrived with another content")
        found = json.loads(content)
        if not isinstance(found, dict):
            raise self._refused(f"expected an object in {kind}/{name}, found {type(found).__name__}")
        return found

    # --- Calls ----------------------------------------------------------------------------------------------------

    def _get(self, kind: str, name: str) -> requests.Response:
        """One call, its content still to be read; a busy registry is asked again, as it wishes."""
        for attempt in range(_TRIES):
            try:
                answer = self._ask(f"{self.reference.url}/{kind}/{name}")
            except requests.RequestException as error:
                if attempt == _TRIES - 1:
                    raise self._refused(f"no answer from {self.reference.host} ({error})") from error
                self._wait(2.0**attempt * 0.2)
                continue
            if answer.ok:
                return answer
            if (answer.status_code != 429 and answer.status_code < 500) or attempt == _TRIES - 1:
                why = f"{answer.status_code} for {kind}/{name}: {_words(answer)}"
                raise self._refused(why, _meant(answer.status_code, kind))
            self._wait(_asked_wait_s(answer, 2.0**attempt * 0.2))
        raise AssertionError("unreachable")

    def _ask(self, url: str) -> requests.Response:
        answer = self._send(url)
        if answer.status_code == 401 and self._authorisation is None:
            answer.close()
            self._authorisation = self._authorised(answer.headers.get("WWW-Authenticate", ""))
            answer = self._send(url)
        return answer

    def _send(self, url: str) -> requests.Response:
        headers = {"Accept": _ACCEPT}
        if self._authorisation:
            headers["Authorization"] = self._authorisation
        left_s = max(0.1, min(_CALL_S, self.deadline - time.monotonic()))
        # Not through the session's own: it would put a password of ~/.netrc in the place of our token.
        return self._session.get(url, headers=headers, stream=True, timeout=left_s, auth=_as_it_is)

    def _authorised(self, challenge: str) -> str:
        """What the registry wants to see: a token from where it says, or the password itself."""
        login = self._login()
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and login:
            return f"Basic {login}"
        if scheme.lower() != "bearer":
            raise self._refused("it wants a login: `docker login` first, or MEGAFLOW_REGISTRY_AUTH", ImageDenied)
        asked = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        params = {name: asked[name] for name in ("service", "scope") if name in asked}
        headers = {"Authorization": f"Basic {login}"} if login else {}
        call: dict[str, Any] = {
            "params": params,
            "headers": headers,
            "stream": True,
            "timeout": _CALL_S,
            "auth": _as_it_is,
        }
        with self._session.get(asked["realm"], **call) as answer:
            if not answer.ok:
                raise self._refused(
                    f"no token for it ({answer.status_code}): `docker login` first, or MEGAFLOW_REGISTRY_AUTH",
                    _meant(answer.status_code, "token"),
                )
            found = json.loads(_start_of(answer))
        return f"Bearer {found.get('token') or found['access_token']}"

    def _login(self) -> str | None:
        if self.given is None:
            return _kept_login(self.reference.host)
        return base64.b64encode(f"{self.given['username']}:{self.given['password']}".encode()).decode()

    def _wait(self, seconds: float) -> None:
        if time.monotonic() + seconds > self.deadline:
            raise self._refused("the registry was too busy for the time that this task allows for its image")
        time.sleep(seconds)

    def _refused(self, why: str, kind: type[ImageUnavailable] = ImageUnavailable) -> ImageUnavailable:
        return kind(f"image {self._name} cannot be pulled: {why}.")

    @property
    def _name(self) -> str:
        return f"{self.reference.host}/{self.reference.repository}:{self.reference.version}"


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _digest(blob: Mapping[str, Any]) -> str:
    digest = str(blob.get("digest", ""))
    if not _DIGEST.match(digest):
        raise ImageUnavailable(f"expected a sha256 digest in the registry's answer, found {digest!r}.")
    return digest


def _near(host: str) -> bool:
    """Whether a registry, with or without its port, is on this machine: these are spoken to without encryption."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _meant(status: int, asked_for: str) -> type[ImageUnavailable]:
    """What a refusal means. A blob that is not there is a registry's that is being filled or cleaned."""
    if status == 404 and asked_for == "manifests":
        return ImageMissing
    return ImageDenied if status in (401, 403) else ImageUnavailable


def _start_of(answer: requests.Response) -> bytes:
    """What it says, cut off a little after `_SMALL_BYTES`."""
    found = bytearray()
    for chunk in answer.iter_content(64 << 10):
        found += chunk
        if len(found) > _SMALL_BYTES:
            break
    return bytes(found)


def _words(answer: requests.Response) -> str:
    with answer, suppress(requests.RequestException, ValueError, LookupError, TypeError):
        return str(json.loads(_start_of(answer))["errors"][0]["message"])
    return answer.reason or "no reason given"


def _asked_wait_s(answer: requests.Response, otherwise_s: float) -> float:
    with answer, suppress(KeyError, ValueError):
        return min(_PATIENCE_S, float(answer.headers["Retry-After"]))
    return otherwise_s


def _kept_login(host: str) -> str | None:
    """What `docker login` has kept for a registry."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    names = [host, f"https://{host}", *(["https://index.docker.io/v1/", "docker.io"] if host == _HUB_SERVER else [])]
    with suppress(OSError, ValueError):
        known: dict[str, Any] = json.loads((folder / "config.json").read_text()).get("auths", {})
        for name in names:
            if auth := known.get(name, {}).get("auth"):
                base64.b64decode(auth, validate=True)
                return str(auth)
    return None


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
