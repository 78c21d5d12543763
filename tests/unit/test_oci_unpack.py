"""Layers out of tars: what overlayfs must find, and that nothing gets outside."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
from pathlib import Path

import pytest

from app.errors import ImageUnavailable
from app.images.layer_store import ImageStore
from app.images.registry_pull import CopiedImage, read
from app.images.unpack import Bounds, unpack, unpack_layer

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners and deletions need root")

Entry = tuple[str, dict[str, object]]


def layer(*entries: Entry) -> io.BytesIO:
    """A tar of (name, fields); `data` is a file's content, `xattr.NAME` an attribute."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, fields in entries:
            member = tarfile.TarInfo(name)
            member.mtime = 1_000_000_000
            data = fields.get("data", b"")
            assert isinstance(data, bytes)
            member.size = len(data)
            for key, value in fields.items():
                if key.startswith("xattr."):
                    member.pax_headers["SCHILY." + key] = str(value)
                elif key != "data":
                    setattr(member, key, value)
            tar.addfile(member, io.BytesIO(data))
    buffer.seek(0)
    return buffer


FOLDER = {"type": tarfile.DIRTYPE, "mode": 0o755}


def test_owners_modes_times_and_hard_links_are_kept(tmp_path: Path) -> None:
    packed = layer(
        ("bin", {**FOLDER, "mode": 0o750, "uid": 7}),
        ("bin/tool", {"data": b"run", "mode": 0o4711, "uid": 1234, "gid": 55}),
        ("again", {"type": tarfile.LNKTYPE, "linkname": "bin/tool"}),
        ("link", {"type": tarfile.SYMTYPE, "linkname": "/bin/tool", "uid": 9}),
        ("pipe", {"type": tarfile.FIFOTYPE, "mode": 0o622}),
    )
    assert unpack(packed, tmp_path) == 3
    tool = (tmp_path / "bin/tool").stat()
    assert (stat.S_IMODE(tool.st_mode), tool.st_uid, tool.st_gid, tool.st_mtime) == (0o4711, 1234, 55, 1e9)
    assert (tmp_path / "again").stat().st_ino == tool.st_ino
    assert (os.readlink(tmp_path / "link"), (tmp_path / "link").lstat().st_uid) == ("/bin/tool", 9)
    assert not (tmp_path / "pipe").exists()
    folder = (tmp_path / "bin").stat()
    assert (stat.S_IMODE(folder.st_mode), folder.st_uid, folder.st_mtime) == (0o750, 7, 1e9)


def test_deletions_become_what_overlayfs_takes_for_deletions(tmp_path: Path) -> None:
    unpack(layer(("etc", FOLDER), ("etc/.wh.gone", {}), ("var/.wh..wh..opq", {}), (".wh..wh.plnk", FOLDER)), tmp_path)
    gone = (tmp_path / "etc/gone").lstat()
    assert (stat.S_ISCHR(gone.st_mode), gone.st_rdev) == (True, 0)
    assert os.getxattr(tmp_path / "var", "trusted.overlay.opaque") == b"y"
    assert sorted(os.listdir(tmp_path)) == ["etc", "var"]


def test_capabilities_are_kept_and_overlays_own_attributes_are_not_taken_from_an_image(tmp_path: Path) -> None:
    capability = "\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
    fields = {"data": b"x", "xattr.security.capability": capability, "xattr.trusted.overlay.redirect": "/etc"}
    unpack(layer(("ping", fields)), tmp_path)
    assert os.getxattr(tmp_path / "ping", "security.capability") == capability.encode()
    assert "trusted.overlay.redirect" not in os.listxattr(tmp_path / "ping")


@pytest.mark.parametrize("target", ["/OUTSIDE", "../../../../../../../..OUTSIDE"])
def test_a_link_of_a_layer_leads_nowhere_outside(tmp_path: Path, target: str) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    where = target.replace("OUTSIDE", str(outside))
    packed = layer(
        ("way", {"type": tarfile.SYMTYPE, "linkname": where}),
        ("way/planted", {"data": b"x"}),
        ("../planted", {"data": b"x"}),
        ("way/.wh.kept", {}),
        ("hard", {"data": b""}),
    )
    (outside / "kept").touch()
    unpack(packed, inside)
    assert os.listdir(outside) == ["kept"]
    assert not (tmp_path / "planted").exists()
    assert (inside / "planted").exists()


def test_a_hard_link_to_outside_finds_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (tmp_path / "inside").mkdir()
    packed = layer(("stolen", {"type": tarfile.LNKTYPE, "linkname": f"../{'../' * 20}{tmp_path}/secret"}))
    with pytest.raises(ImageUnavailable, match="stolen"):
        unpack(packed, tmp_path / "inside")


def test_a_later_member_replaces_an_earlier_one_of_another_kind(tmp_path: Path) -> None:
    packed = layer(
        ("a", FOLDER),
        ("a/b", {"data": b"1"}),
        ("a", {"type": tarfile.SYMTYPE, "linkname": "c"}),
        ("c", {"data": b"2"}),
        ("c", FOLDER),
        ("c/d", {"data": b"3"}),
    )
    unpack(packed, tmp_path)
    assert (tmp_path / "a" / "d").read_bytes() == b"3"


def test_devices_of_an_image_are_left_out(tmp_path: Path) -> None:
    unpack(layer(("disk", {"type": tarfile.BLKTYPE, "devmajor": 254, "devminor": 0}), ("x", {"data": b"x"})), tmp_path)
    assert os.listdir(tmp_path) == ["x"]


def test_another_content_than_promised_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageUnavailable, match=r"expected sha256:0.*found sha256:"):
        unpack_layer(layer(("x", {"data": b"x"})), "sha256:" + "0" * 64, tmp_path)


def test_what_is_no_tar_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageUnavailable, match="damaged"):
        unpack(io.BytesIO(b"no tar at all" * 1000), tmp_path)


@pytest.mark.parametrize(
    ("entry", "bounds", "says"),
    [
        (("x", {"uid": 2**40}), Bounds(), "damaged"),
        (("x", {"pax_headers": {"mtime": "inf"}}), Bounds(), "damaged"),
        (("x" * 300, {"data": b"x"}), Bounds(), "damaged"),
        (("x", {"data": b"x" * 11}), Bounds(most_bytes=10), "more than 10 bytes"),
        (("x", {"data": b"x"}), Bounds(deadline=0.0), "within the time"),
    ],
)
def test_what_cannot_be_unpacked_is_the_images_fault(tmp_path: Path, entry: Entry, bounds: Bounds, says: str) -> None:
    with pytest.raises(ImageUnavailable, match=says):
        unpack(layer(entry), tmp_path, bounds)


def copied(store: ImageStore, folder: Path, content: bytes, diff_id: str) -> CopiedImage:
    """An image of one layer, as skopeo leaves it."""

    def blob(data: bytes) -> dict[str, str]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        store.blob(digest).parent.mkdir(parents=True, exist_ok=True)
        if not store.blob(digest).exists():
            store.blob(digest).write_bytes(data)
        return {"digest": digest}

    config = blob(json.dumps({"rootfs": {"diff_ids": [diff_id]}}).encode())
    manifest = blob(json.dumps({"config": config, "layers": [blob(content)]}).encode())
    folder.mkdir(exist_ok=True)
    (folder / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    return read(folder, store)


def test_an_image_names_no_folder_and_no_layer_of_another_as_its_own(tmp_path: Path) -> None:
    store, content, other = ImageStore(tmp_path), layer(("secret", {})).read(), layer(("x", {})).read()
    digest, others = (f"sha256:{hashlib.sha256(one).hexdigest()}" for one in (content, other))
    for place, data, named in (("one", content, digest), ("two", other, others)):
        for bytes_ in (data, data, gzip.compress(data)):
            copied(store, tmp_path / place, bytes_, named).unpack(store, timeout_s=10)
    for data, named in ((gzip.compress(other, 1), digest), (other, digest), (content, "/etc"), (content, "../" * 9)):
        with pytest.raises(ImageUnavailable, match=r"expected (a )?sha256"):
            copied(store, tmp_path / "forged", data, named).unpack(store, timeout_s=10)


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh...", "folder/.wh..."])
def test_a_deletion_of_the_folder_above_is_refused_and_touches_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "neighbour").mkdir()
    (tmp_path / "neighbour" / "file").write_text("x")
    (tmp_path / "new").mkdir()
    with pytest.raises(ImageUnavailable, match="it deletes"):
        unpack(layer((name, {})), tmp_path / "new")
    assert (tmp_path / "neighbour" / "file").read_text() == "x"
