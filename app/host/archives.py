"""Creates, checks and unpacks tar archives; no member may lead out of its folder."""

from __future__ import annotations

import io
import os
import posixpath
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

from app.errors import SpecInvalid


def of_file(path: str, content: bytes, *, mode: int) -> bytes:
    """Creates a tar with one file at the absolute `path`, owned by root; the unpacker must create its folders."""
    return of_files({path: content}, mode=mode)


def of_files(contents: Mapping[str, bytes], *, mode: int) -> bytes:
    """Creates a tar with several files, by path; see `of_file`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in contents.items():
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size, member.mode, member.mtime = len(content), mode, int(time.time())
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def of_folder(path: str) -> bytes:
    """Creates a tar with only the empty folder `path`."""
    member = tarfile.TarInfo(path.strip("/"))
    member.type, member.mode, member.mtime = tarfile.DIRTYPE, 0o755, int(time.time())
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(member)
    return buffer.getvalue()


def unpack(archive: bytes, folder: Path) -> None:
    """Unpacks without owners and set-uid bits. Raises: SpecInvalid: damaged, or a member leads out of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(archive) as tar:
        try:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(folder, filter="data")
            else:  # Debian 12's Python 3.11.2 has no filters yet
                _unpack_by_hand(tar, folder)
        except tarfile.TarError as error:
            raise SpecInvalid(f"the archive cannot be unpacked: {error}.") from error


def _unpack_by_hand(tar: tarfile.TarFile, folder: Path) -> None:
    for member in tar:
        _refuse_unsafe(member)
        if not (folder / member.name).parent.resolve().is_relative_to(folder.resolve()):
            raise SpecInvalid(f"archive member {member.name!r} is refused: a link of the archive leads it outside.")
        member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
        member.mode &= 0o755
        tar.extract(member, folder)


def _refuse_unsafe(member: tarfile.TarInfo) -> None:
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        raise SpecInvalid(f"archive member {member.name!r} is refused: expected a file, a folder or a link.")
    targets = [member.name.lstrip("/")]
    if member.issym():
        targets.append(posixpath.join(posixpath.dirname(targets[0]), member.linkname))
    elif member.islnk():
        targets.append(member.linkname)
    for target in targets:
        clean = posixpath.normpath(target)
        if clean.startswith(("/", "../")) or clean == "..":
            raise SpecInvalid(f"archive member {member.name!r} is refused: it leads outside of its folder.")


def plain_files(archive: bytes, *, limit_bytes: int) -> bytes:
    """Copies the files and folders of an uncompressed tar, for a place where its links would lead elsewhere.

    Symbolic links, special files and names that lead outside are left out. A hard link becomes a copy of its file, if
    that is in the archive. Owners and special bits are not kept.

    Raises: SpecInvalid: it is no tar. ValueError: it has more than `limit_bytes` of files.
    """
    buffer = io.BytesIO()
    try:
        _copy_plain(archive, buffer, limit_bytes)
    except tarfile.TarError as error:
        raise SpecInvalid(f"expected an uncompressed tar, found something else: {error}.") from error
    return buffer.getvalue()


def _copy_plain(archive: bytes, made: io.BytesIO, limit_bytes: int) -> None:
    with _opened(archive) as tar, tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as plain:
        for member in tar:
            name = posixpath.normpath(member.name.lstrip("/"))
            if name == ".." or name.startswith("../") or not (member.isreg() or member.isdir() or member.islnk()):
                continue
            copy = tarfile.TarInfo(name)
            copy.mode = member.mode & 0o777
            if member.isdir():
                copy.type = tarfile.DIRTYPE
                plain.addfile(copy)
                continue
            try:
                source = tar.extractfile(member)
            except KeyError:  # a hard link to a file that is not in the archive
                continue
            content = b"" if source is None else source.read(limit_bytes + 1)
            if made.tell() + len(content) > limit_bytes:
                raise ValueError(f"expected files of at most {limit_bytes} bytes, found more")
            copy.size = len(content)
            plain.addfile(copy, io.BytesIO(content))


def absolute(path: str) -> str:
    """Normalizes an absolute path (dots, double slashes). Raises: ValueError: it is relative, or the root itself."""
    clean = posixpath.normpath("/" + path.lstrip("/")) if path.startswith("/") else ""
    if not clean or clean == "/" or "\0" in path:
        raise ValueError(f"expected an absolute path inside the environment, found {path!r}.")
    return clean


def _opened(archive: bytes) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=io.BytesIO(archive), mode="r:")
    except tarfile.TarError as error:
        raise SpecInvalid(f"expected an uncompressed tar, found something else: {error}.") from error
