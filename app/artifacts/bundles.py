"""Stores folders by the hash of their content: build contexts, hidden tests, gold solutions.

The same files give the same bytes on every machine, so a folder used by many tasks is stored once.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from app.artifacts.base import ArtifactStore
from app.errors import ArtifactMissing, SpecInvalid
from app.models.spec import Bundle

MAX_BYTES = 256 << 20
_MAX_UNZIPPED_BYTES = MAX_BYTES + (1 << 20)  # plus the last member's header and the end of the archive
_IGNORED = {"__pycache__", ".git"}


def pack(folder: Path) -> tuple[Bundle, bytes]:
    """Packs the folder into an uncompressed, normalised tar; returns its address and the tar.

    Sorted; owner 0, time 0; only the x bit of a file's mode is preserved. A symbolic link is included if its target is
    in the folder. `__pycache__` and `.git` are left out.

    Raises: SpecInvalid: not a folder, too large, a link to outside, a device, a socket, a pipe, an unreadable file.
    """
    if not folder.is_dir():
        raise SpecInvalid(f"expected a folder at {folder}; found {'a file' if folder.exists() else 'nothing'}")
    try:
        archive = _archive(folder)
    except OSError as error:
        raise SpecInvalid(f"{folder}: expected to read every file of it; found {error}") from error
    return Bundle(sha256=hashlib.sha256(archive).hexdigest(), size_bytes=len(archive)), archive


def store_bundle(store: ArtifactStore, folder: Path) -> Bundle:
    """Stores `folder` unless it is already stored. Raises: SpecInvalid, ArtifactStoreUnavailable, DiskFull."""
    bundle, archive = pack(folder)
    if not store.exists(key := bundle_key(bundle)):
        store.create(key, gzip.compress(archive, compresslevel=6, mtime=0))
    return bundle


def fetch_bundle(store: ArtifactStore, bundle: Bundle) -> bytes:
    """Returns the tar, verified by its digest. Raises: ArtifactMissing: absent or damaged; ArtifactStoreUnavailable."""
    key = bundle_key(bundle)
    archive = _unzipped(key, store.get(key))
    if (digest := hashlib.sha256(archive).hexdigest()) != bundle.sha256:
        raise ArtifactMissing(f"{key}: expected content with that digest; found {digest}; submit the dataset again")
    return archive


def bundle_key(bundle: Bundle) -> str:
    """Returns the key of a bundle in the store."""
    return f"bundles/{bundle.sha256}.tar.gz"


def _unzipped(key: str, content: bytes) -> bytes:
    try:
        with gzip.open(io.BytesIO(content)) as unzipped:
            archive = unzipped.read(_MAX_UNZIPPED_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ArtifactMissing(f"{key}: expected a gzip file; found {error}; submit the dataset again") from error
    if len(archive) > _MAX_UNZIPPED_BYTES:
        raise ArtifactMissing(f"{key}: expected at most {_MAX_UNZIPPED_BYTES} bytes unzipped; found more")
    return archive


def _archive(folder: Path) -> bytes:
    room = folder.resolve()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in _walk(folder):
            member = _member(path, folder, room)
            if buffer.tell() + member.size > MAX_BYTES:
                raise SpecInvalid(f"{folder}: expected at most {MAX_BYTES >> 20} MiB in all; found more, at {path}")
            if member.isreg():
                with open(path, "rb", opener=_without_links) as content:
                    tar.addfile(member, content)
            else:
                tar.addfile(member)
    return buffer.getvalue()


def _without_links(path: str, flags: int) -> int:
    """Opens a path that was checked before; fails if it was replaced by a link since then."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _walk(folder: Path) -> Iterator[Path]:
    """Yields all paths below, folders before their content, sorted by name; does not follow links."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.name not in _IGNORED)
    for name in names:
        yield (path := folder / name)
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)


def _member(path: Path, folder: Path, room: Path) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path.relative_to(folder).as_posix())  # owner, group and time are 0 by default
    status = path.lstat()
    if stat.S_ISREG(status.st_mode):
        member.size = status.st_size
        member.mode = 0o755 if status.st_mode & 0o100 else 0o644
    elif stat.S_ISDIR(status.st_mode):
        member.type, member.mode = tarfile.DIRTYPE, 0o755
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.mode = tarfile.SYMTYPE, 0o777
        member.linkname = _inner_target(path, room)
    else:
        raise SpecInvalid(f"{path}: expected a file, a folder or a link; found a device, a socket or a pipe")
    return member


def _inner_target(link: Path, room: Path) -> str:
    target = os.readlink(link)
    try:
        end = link.resolve()  # follows all links on the path: each link alone may look harmless
    except RuntimeError as error:
        raise SpecInvalid(f"{link}: expected a link with an end; found one that leads back to itself") from error
    if os.path.isabs(target) or not end.is_relative_to(room):
        raise SpecInvalid(f"{link}: expected a relative link that stays in its folder; found one to {target}")
    return target
