"""Makes, checks and unpacks tar archives; nothing in one may leave its folder."""

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
    """A tar with one file under the absolute `path`, owned by root; its folders are left to the unpacker."""
    return of_files({path: content}, mode=mode)


def of_files(contents: Mapping[str, bytes], *, mode: int) -> bytes:
    """The same with several files, by path."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in contents.items():
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size, member.mode, member.mtime = len(content), mode, int(time.time())
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def of_folder(path: str) -> bytes:
    """A tar with the one empty folder `path`."""
    member = tarfile.TarInfo(path.strip("/"))
    member.type, member.mode, member.mtime = tarfile.DIRTYPE, 0o755, int(time.time())
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(member)
    return buffer.getvalue()


def unpack(archive: bytes, folder: Path) -> None:
    """Unpack into `folder`, without owners and set-uid bits. Raises: SpecInvalid: damaged, or it leads outside."""
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
    """The files and folders of an uncompressed tar, for a place where its links would lead elsewhere.

    Symbolic links and what is neither file nor folder are left out, and names that lead outside; a hard link is the
    file that it means, when that is in the archive. Owners and special bits are not kept.

    Raises: SpecInvalid: it is no tar. ValueError: it has more than `limit_bytes` of files.
    """
    made = io.BytesIO()
    try:
        _copy_plain(archive, made, limit_bytes)
    except tarfile.TarError as error:
        raise SpecInvalid(f"expected an uncompressed tar, found something else: {error}.") from error
    return made.getvalue()


def _copy_plain(archive: bytes, made: io.BytesIO, limit_bytes: int) -> None:
    with _opened(archive) as tar, tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as plain:
        for member in tar:
            name = posixpath.normpath(member.name.lstrip("/"))
            if name == ".." or name.startswith("../") or not (member.isreg() or member.isdir() or member.islnk()):
                continue
            kept = tarfile.TarInfo(name)
            kept.mode = member.mode & 0o777
            if member.isdir():
                kept.type = tarfile.DIRTYPE
                plain.addfile(kept)
                continue
            try:
                source = tar.extractfile(member)
            except KeyError:  # a hard link to what is not in the archive
                continue
            content = b"" if source is None else source.read(limit_bytes + 1)
            if made.tell() + len(content) > limit_bytes:
                raise ValueError(f"expected files of at most {limit_bytes} bytes, found more")
            kept.size = len(content)
            plain.addfile(kept, io.BytesIO(content))


def absolute(path: str) -> str:
    """`path` without dots and doubled slashes. Raises: ValueError: it is relative, or the root itself."""
    clean = posixpath.normpath("/" + path.lstrip("/")) if path.startswith("/") else ""
    if not clean or clean == "/" or "\0" in path:
        raise ValueError(f"expected an absolute path inside the environment, found {path!r}.")
    return clean


def _opened(archive: bytes) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=io.BytesIO(archive), mode="r:")
    except tarfile.TarError as error:
        raise SpecInvalid(f"expected an uncompressed tar, found something else: {error}.") from error
