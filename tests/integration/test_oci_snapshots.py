"""Snapshots without a daemon: a true copy while the environment goes on, kept for as long as it is somebody's."""

from __future__ import annotations

import os
import stat
import threading
import time
import uuid
from pathlib import Path

import pytest

from app.environments.contract import Tags
from app.environments.runtimes.oci import OciProvider, Records, copying
from app.environments.runtimes.oci.copying import copy
from app.environments.runtimes.oci.system_layer import HELPER
from app.environments.sweeper import Sweeper
from app.errors import EnvironmentFailed
from app.images.layer_use import forget
from app.models.spec import EnvironmentSpec, Network, Reuse
from app.settings import Settings
from tests.integration.docker_ground import tags_of

# --- The copy -------------------------------------------------------------------------------------------------------


def test_a_copy_has_what_the_kernel_tells_of_each_file(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "folder").mkdir(parents=True)
    (top / "folder" / "file").write_text("content")
    os.link(top / "folder" / "file", top / "same")
    (top / "link").symlink_to("/etc/passwd")
    os.mkfifo(top / "pipe", 0o640)
    os.mknod(top / "removed", stat.S_IFCHR, 0)  # as overlayfs notes a deletion
    os.setxattr(top / "folder", "trusted.overlay.opaque", b"y")
    os.chown(top / "same", 1234, 4321)
    os.chmod(top / "same", 0o4755)
    os.chmod(top / "folder", 0o1777)
    for name in ("folder/file", "folder", "."):
        os.utime(top / name, ns=(1_000_000_001, 2_000_000_002))
    copy(top, tmp_path / "copy")
    assert told(tmp_path / "copy") == told(top)
    assert os.path.samefile(tmp_path / "copy" / "same", tmp_path / "copy" / "folder" / "file")
    assert (tmp_path / "copy" / "same").read_text() == "content"
    assert os.getxattr(tmp_path / "copy" / "folder", "trusted.overlay.opaque") == b"y"
    (top / "same").write_text("changed")
    assert (tmp_path / "copy" / "same").read_text() == "content", "no file is shared"


def told(top: Path) -> dict[str, tuple[object, ...]]:
    found = {}
    for folder, folders, files in os.walk(top):
        for name in (".", *folders, *files):
            path = Path(folder) / name
            about = path.lstat()
            link = os.readlink(path) if path.is_symlink() else ""
            told = (about.st_mode, about.st_uid, about.st_gid, about.st_rdev, link)
            found[os.path.relpath(path, top)] = (*told, about.st_nlink, *([] if link else [about.st_mtime_ns]))
    return found


def test_holes_take_no_room(tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    with open(tmp_path / "top" / "large", "wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 30)
        file.write(b"in the middle")
    copy(tmp_path / "top", tmp_path / "copy")
    about = (tmp_path / "copy" / "large").stat()
    assert about.st_size == 1 << 40
    assert about.st_blocks * 512 < 1 << 20
    with open(tmp_path / "copy" / "large", "rb") as file:
        file.seek(1 << 30)
        assert file.read(14) == b"in the middle\0"


def test_a_folder_that_becomes_a_link_meanwhile_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "secret").write_text("of the host")
    (tmp_path / "top" / "folder").mkdir(parents=True)
    (tmp_path / "top" / "file").write_text("x")
    opened, opened_file = copying.opened, copying._file

    def swapped(name: str, folder: int | None = None) -> object:
        if name == "folder" and not (tmp_path / "top" / "folder").is_symlink():
            (tmp_path / "top" / "folder").rmdir()
            (tmp_path / "top" / "folder").symlink_to(tmp_path / "host")
        return opened(name, folder)

    def swapped_file(name: str, how: int, folder: int) -> object:
        if name == "file" and how & os.O_CREAT == 0:
            (tmp_path / "top" / "file").unlink()
            (tmp_path / "top" / "file").symlink_to(tmp_path / "host" / "secret")
        return opened_file(name, how, folder)

    for part, instead in (("opened", swapped), ("_file", swapped_file)):
        with monkeypatch.context() as patched:
            patched.setattr(copying, part, instead)
            with pytest.raises(OSError, match=r"folder|file"):
                copy(tmp_path / "top", tmp_path / f"copy-{part}")
    copied = [path for path in tmp_path.rglob("copy-*/**/*") if path.is_file() and not path.is_symlink()]
    assert [path for path in copied if path.read_bytes() == b"of the host"] == []


def test_what_lies_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "top" / "/".join(["d"] * 200)).mkdir(parents=True)
    with pytest.raises(OSError, match="128 deep"):
        copy(tmp_path / "top", tmp_path / "copy")


# --- Snapshots ------------------------------------------------------------------------------------------------------


def test_what_was_deleted_and_replaced_is_so_in_what_is_made_from_it(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    environment = oci.create(tiny, tags_of(oci_settings.installation), timeout_s=30)
    environment.run("rm /bin/hostname; rm -r /root; mkdir /root; echo x > /root/x; chown 1234 /root/x", timeout_s=20)
    environment.run("mkdir /a; echo a > /a/a; chmod u+s /bin/id; mv /bin/date /bin/dated", timeout_s=20)
    made = oci.create_from(environment.snapshot(tags_of(oci_settings.installation)), tiny, tags_of("x"), timeout_s=30)
    tell = "ls /bin; ls -ln /root /a; ls -l /bin/id; /bin/dated -d @0 +%s"
    assert made.run(tell, timeout_s=20).stdout == environment.run(tell, timeout_s=20).stdout
    assert not made.run("test -e /bin/hostname -o -e /bin/date", timeout_s=20).ok
    for one in (made, environment):
        one.destroy()


def test_a_changed_helper_is_no_part_of_it(oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec) -> None:
    environment = oci.create(tiny, tags_of(oci_settings.installation), timeout_s=30)
    assert environment.run(f"cat /bin/sh > /new && mv /new /{HELPER} && echo x > /x", timeout_s=20).ok
    snapshot = environment.snapshot(tags_of(oci_settings.installation))
    kept = oci.store.snapshot(snapshot.id)
    assert kept is not None
    written = os.listdir(oci.store.layers / kept.layers[-1])
    assert "x" in written
    assert HELPER not in written
    made = oci.create_from(snapshot, tiny, tags_of(oci_settings.installation), timeout_s=30)
    assert made.run("cat /x", timeout_s=20).stdout == b"x\n"
    for one in (made, environment):
        one.destroy()


def test_a_read_only_environment_stands_on_a_snapshot(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    environment = oci.create(tiny, tags_of(oci_settings.installation), timeout_s=30)
    environment.put("/kept", b"kept")
    shared = tiny.model_copy(update={"reuse": Reuse.SHARED_READONLY})
    snapshot = environment.snapshot(tags_of(oci_settings.installation))
    made = oci.create_from(snapshot, shared, tags_of(oci_settings.installation), timeout_s=30)
    assert made.get("/kept") == b"kept"
    assert not made.run("touch /new", timeout_s=20).ok
    with pytest.raises(EnvironmentFailed, match="use `docker`"):
        oci.create_from(snapshot, tiny.model_copy(update={"network": Network.OPEN}), tags_of("x"), timeout_s=30)
    for one in (made, environment):
        one.destroy()


def test_the_image_that_it_stands_on_may_be_forgotten(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    environment = oci.create(tiny, tags_of(oci_settings.installation), timeout_s=30)
    environment.put("/kept", b"kept")
    snapshot = environment.snapshot(tags_of(oci_settings.installation))
    environment.destroy()
    forget(oci_settings.home, snapshot.image_id)
    assert oci.store.image(snapshot.image_id) is None
    made = oci.create_from(snapshot, tiny, tags_of(oci_settings.installation), timeout_s=30)
    assert made.run("cat /kept", timeout_s=20).stdout == b"kept"
    made.destroy()
    oci.remove_snapshot(snapshot)
    assert own_layers(oci) == [], "the last to stand on them"


def own_layers(oci: OciProvider) -> list[str]:
    return [one.name for one in oci.store.layers.iterdir() if not one.name.startswith("y")]


def test_the_sweeper_takes_those_of_the_dead_and_the_overdue_and_what_was_removed_in_use(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    owner = tags_of(oci_settings.installation)
    environment = oci.create(tiny, owner, timeout_s=30)
    dead, late = (
        tags_of(oci_settings.installation),
        Tags.without_attempt(oci_settings.installation, uuid.uuid4(), time.time() - 1),
    )
    in_use, kept, *_ = [environment.snapshot(one) for one in (owner, owner, dead, late)]
    sweeper = Sweeper(oci_settings)
    assert sweeper.sweep({owner.instance_id}, ended=[dead.instance_id]).removed == 2
    made = oci.create_from(in_use, tiny, owner, timeout_s=30)
    oci.remove_snapshot(in_use)
    assert sweeper.sweep({owner.instance_id}).removed == 0
    assert {one.key: one.removed for one in oci.store.owned()} == {in_use.id: True, kept.id: False}
    made.destroy()
    sweeper.sweep({owner.instance_id})
    assert [one.key for one in oci.store.owned()] == [kept.id]
    environment.destroy()


def test_an_environment_can_be_ended_while_it_is_copied(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = oci.create(tiny, tags_of(oci_settings.installation), timeout_s=30)
    environment.run("for n in 1 2 3 4 5 6 7 8; do echo x > /$n; done", timeout_s=20)
    begun, dress, dressed = threading.Event(), copying._dress, []

    def slow(source: int, target: int) -> None:
        begun.set()
        dressed.append(target)
        time.sleep(0.2)
        dress(source, target)

    monkeypatch.setattr(copying, "_dress", slow)
    ending = threading.Thread(target=lambda: begun.wait(20) and environment.destroy())
    ending.start()
    with pytest.raises(EnvironmentFailed, match="destroyed"):
        environment.snapshot(tags_of(oci_settings.installation))
    ending.join(20)
    assert len(dressed) < 8, "nobody waits for the whole copy"
    assert oci.store.owned() == []
    assert list(Records(oci_settings.home).all()) == []
    assert list(oci.store.layers.glob(".new-*")) == []
