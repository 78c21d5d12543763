"""Checks keys of artifacts; every store accepts the same ones."""

from __future__ import annotations

from app.errors import SpecInvalid

_LONGEST_BYTES = 1000  # S3 takes 1024, a prefix included
_LONGEST_SEGMENT = 255  # of a file's name


def checked(key: str) -> str:
    """`key` itself, when it stays below the store's root and means one object.

    Raises: SpecInvalid.
    """
    segments = key.split("/")
    printable = key.isprintable() and "\\" not in key
    if not printable or any(segment in ("", ".", "..") for segment in segments):
        raise SpecInvalid(
            f"expected an artifact key like runs/7/patch.diff (a relative path without empty, `.` or `..` segments); "
            f"found {key[:200]!r}; rename what it was made from"
        )
    if len(key.encode()) > _LONGEST_BYTES:
        raise SpecInvalid(f"expected an artifact key of at most {_LONGEST_BYTES} bytes; found {len(key.encode())}")
    if (longest := max(len(segment.encode()) for segment in segments)) > _LONGEST_SEGMENT:
        raise SpecInvalid(f"expected an artifact key with at most {_LONGEST_SEGMENT} bytes a segment; found {longest}")
    return key
