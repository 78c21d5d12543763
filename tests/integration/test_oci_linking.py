"""An engine's layer folder taken into the store: linked on one disk, left to the export on another."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.host import kernel, mount_namespace
from app.images import link_layers
from tests.services import missing

OPAQUE = "trusted.overlay.opaque"


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """A layer as overlayfs keeps it."""
    if os.geteuid() != 0:
        missing("root")
    return filled(tmp_path / "layer")


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder of another file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as found:
        yield Path(found)


def filled(folder: Path) -> Path:
    (folder / "d").mkdir(parents=True)
    (folder / "d" / "f").write_text("content")
    os.link(folder / "d" / "f", folder / "d" / "same")
    (folder / "d" / "f").chmod(0o4755)
    os.chown(folder / "d", 12, 34)
    os.utime(folder / "d" / "f", ns=(10**18, 10**18))
    os.mknod(folder / "gone", stat.S_IFCHR | 0o600, os.makedev(0, 0))
    os.mknod(folder / "disk", stat.S_IFBLK | 0o600, os.makedev(8, 0))
    (folder / "link").symlink_to("/nowhere")
    os.lchown(folder / "link", 5, 6)
    os.setxattr(folder / "d", OPAQUE, b"y")
    return folder


def test_on_one_disk_nothing_is_copied(layer: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert link_layers.take(layer, tmp_path / "new") == 2 * len("content")
    assert (tmp_path / "new" / "d" / "f").samefile(layer / "d" / "f")


def test_a_folder_mounted_onto_itself_is_linked_and_a_disk_of_its_own_is_not_mistaken(
    layer: Path, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()

    def covered() -> tuple[bool, bool]:
        kernel.mount(str(layer), str(layer), None, 4096)  # as engines bind their folder
        link_layers._uncover(layer)
        once = os.path.exists(layer / "d")
        kernel.mount("tmpfs", str(layer), "tmpfs", 0)  # and as a disk for data hides what was there before
        (layer / "of the disk").touch()
        link_layers._uncover(layer)
        return once, os.path.exists(layer / "of the disk")

    assert mount_namespace.apart(covered, needs=tmp_path) == (True, True)

    def linked() -> bool:
        kernel.mount(str(layer), str(layer), None, 4096)
        link_layers._unpacked(layer, tmp_path / "new")
        return (tmp_path / "new" / "d" / "f").samefile(layer / "d" / "f")

    assert mount_namespace.apart(linked, needs=tmp_path)


def test_on_another_disk_it_is_left_to_the_export(layer: Path, elsewhere: Path) -> None:
    with pytest.raises(link_layers.Entangled, match="cannot be linked"):
        link_layers.take(layer, elsewhere)


def test_a_file_that_means_something_only_with_other_layers_is_left_to_the_export(layer: Path, elsewhere: Path) -> None:
    os.setxattr(layer / "d" / "f", "trusted.overlay.metacopy", b"")
    with pytest.raises(link_layers.Entangled):
        link_layers.take(layer, elsewhere)
