"""Unpacking what strangers packed, with and without Python's own filters (3.11.2 has none)."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from app.errors import SpecInvalid
from app.host import archives

Unpack = Callable[[bytes, Path], None]


@pytest.fixture(params=["with filters", "without filters"])
def unpack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Unpack:
    if request.param == "without filters":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    return archives.unpack


def _tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _member(name: str, *, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def test_files_folders_and_inner_links_are_unpacked(unpack: Unpack, tmp_path: Path) -> None:
    archive = _tar(
        (_member("a", kind=tarfile.DIRTYPE, mode=0o755), b""),
        (_member("a/run.sh", mode=0o755), b"hello"),
        (_member("link", kind=tarfile.SYMTYPE, link="a/run.sh"), b""),
    )
    unpack(archive, tmp_path / "out")
    assert (tmp_path / "out" / "link").read_bytes() == b"hello"
    assert (tmp_path / "out" / "a" / "run.sh").stat().st_mode & 0o111


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "members",
    [
        [(_member("../out.txt"), b"x")],
        [(_member("a/../../out.txt"), b"x")],
        [(_member("up", kind=tarfile.SYMTYPE, link="../.."), b"")],
        [(_member("etc", kind=tarfile.SYMTYPE, link="/etc"), b"")],
        [(_member("hard", kind=tarfile.LNKTYPE, link="../secret"), b"")],
        [(_member("disk", kind=tarfile.BLKTYPE), b"")],
        [(_member("pipe", kind=tarfile.FIFOTYPE), b"")],
    ],
)
def test_what_leads_outside_or_is_no_file_is_refused(
    unpack: Unpack, tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SpecInvalid):
        unpack(_tar(*members), tmp_path / "room" / "out")
    assert not (tmp_path / "out.txt").exists()
    assert not (tmp_path / "room" / "out.txt").exists()
    assert [path for path in before if not path.exists()] == []
