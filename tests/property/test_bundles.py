"""Bundles: the same files are the same bytes, and nothing gets out of its folder."""

from __future__ import annotations

import io
import os
import socket
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.artifacts import bundles
from app.artifacts.bundles import bundle_key, fetch_bundle, pack, store_bundle
from app.artifacts.folder import FolderStore
from app.errors import ArtifactMissing, SpecInvalid
from app.host import archives
from app.models.spec import Bundle

NAME = st.text(
    st.characters(codec="utf-8", exclude_characters="/\x00", exclude_categories=["Cs"]), min_size=1, max_size=40
).filter(lambda name: name not in (".", "..", ".git", "__pycache__") and len(name.encode()) <= 120)
TREE = st.dictionaries(
    st.lists(NAME, min_size=1, max_size=4).map("/".join), st.tuples(st.binary(max_size=200), st.booleans()), max_size=8
).filter(lambda tree: not any(one != other and other.startswith(f"{one}/") for one in tree for other in tree))


def write(folder: Path, tree: dict[str, tuple[bytes, bool]], *, backwards: bool = False) -> None:
    for number, (name, (content, executable)) in enumerate(sorted(tree.items(), reverse=backwards)):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod((0o755 if backwards else 0o700) if executable else (0o640 if backwards else 0o600))
        os.utime(file, (number, number + backwards))


@given(tree=TREE)
def test_the_same_files_are_the_same_bytes_and_come_back(tree: dict[str, tuple[bytes, bool]]) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        write(Path(one), tree)
        write(Path(other), tree, backwards=True)
        bundle, archive = pack(Path(one))
        assert pack(Path(other)) == (bundle, archive)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            found = {
                member.name: (tar.extractfile(member).read(), bool(member.mode & 0o100))  # type: ignore[union-attr]
                for member in tar
                if member.isreg()
            }
            assert all((member.uid, member.gid, member.mtime) == (0, 0, 0) for member in tar)
        assert found == tree


@given(
    place=st.lists(st.sampled_from(["a", "b"]), max_size=3),
    target=st.lists(st.sampled_from(["..", "a", "b", ".", "link"]), min_size=1, max_size=6),
    absolute=st.booleans(),
)
def test_a_link_is_kept_only_when_it_stays_inside(place: list[str], target: list[str], absolute: bool) -> None:
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer) / "room"
        (folder / "a" / "b" / "a").mkdir(parents=True)
        (folder / "b" / "a" / "b").mkdir(parents=True)
        (folder / "link").symlink_to("a/b")
        where = folder.joinpath(*place)
        where.mkdir(parents=True, exist_ok=True)
        text = ("/" if absolute else "") + "/".join(target)
        (where / "tried").symlink_to(text)
        try:
            _, archive = pack(folder)
        except SpecInvalid:
            return
        assert not absolute
        assert Path(os.path.realpath(where / "tried")).is_relative_to(folder.resolve())
        with tempfile.TemporaryDirectory() as target_folder:
            archives.unpack(archive, Path(target_folder))  # refuses whatever leads out


def test_a_link_through_another_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    room = tmp_path / "room"
    (room / "a" / "b" / "c").mkdir(parents=True)
    (room / "a" / "b" / "c" / "up").symlink_to("../../..")
    (room / "a" / "b" / "c" / "out").symlink_to("up/../other")  # to the eye it stays in a/b/c
    with pytest.raises(SpecInvalid, match="stays in its folder"):
        pack(room)


def test_pipes_sockets_loops_and_what_is_no_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid, match="expected a folder"):
        pack(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecInvalid, match="a pipe"):
        pack(tmp_path)
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        with pytest.raises(SpecInvalid, match="a socket"):
            pack(tmp_path)
    (tmp_path / "s").unlink()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SpecInvalid, match="loop"):
        pack(tmp_path)


def test_a_folder_beyond_the_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "MAX_BYTES", 1 << 20)
    (tmp_path / "large").write_bytes(b"x" * (1 << 20 | 1))
    with pytest.raises(SpecInvalid, match="at most 1 MiB"):
        pack(tmp_path)


def test_caches_and_repositories_are_left_out_and_empty_folders_kept(tmp_path: Path) -> None:
    for name in (".git", "__pycache__", "package/__pycache__", "empty"):
        (tmp_path / name).mkdir(parents=True)
        if name != "empty":
            (tmp_path / name / "file").write_text("x")
    with tarfile.open(fileobj=io.BytesIO(pack(tmp_path)[1])) as tar:
        assert tar.getnames() == ["empty", "package"]


def test_a_folder_is_stored_once_and_comes_back(tmp_path: Path) -> None:
    store, folder = FolderStore(tmp_path / "store"), tmp_path / "folder"
    write(folder, {"a/b": (b"content", True)})
    bundle = store_bundle(store, folder)
    stored = tmp_path / "store" / bundle_key(bundle)
    before = stored.stat()
    assert store_bundle(store, folder) == bundle
    assert (stored.stat().st_ino, stored.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert fetch_bundle(store, bundle) == pack(folder)[1]
    assert bundle.size_bytes == len(pack(folder)[1])


@pytest.mark.parametrize("damage", [b"", b"not gzip", b"\x1f\x8b\x08\x00broken"])
def test_a_damaged_bundle_is_noticed(tmp_path: Path, damage: bytes) -> None:
    store = FolderStore(tmp_path)
    bundle = Bundle(sha256="0" * 64, size_bytes=1)
    with pytest.raises(ArtifactMissing):
        fetch_bundle(store, bundle)
    store.put(bundle_key(bundle), damage)
    with pytest.raises(ArtifactMissing, match="submit the dataset again"):
        fetch_bundle(store, bundle)


def test_another_folders_content_under_a_bundles_key_is_noticed(tmp_path: Path) -> None:
    store, folder = FolderStore(tmp_path / "store"), tmp_path / "folder"
    write(folder, {"a": (b"one", False)})
    bundle = store_bundle(store, folder)
    other = Bundle(sha256="1" * 64, size_bytes=bundle.size_bytes)
    store.put(bundle_key(other), store.get(bundle_key(bundle)))
    with pytest.raises(ArtifactMissing, match="expected content with that digest"):
        fetch_bundle(store, other)
