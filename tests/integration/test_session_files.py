"""Files and trees in and out over a real session helper."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.environments.prebuilt import binary
from app.environments.session.client import SessionClient
from app.errors import DiskFull, EnvironmentFailed, SpecInvalid
from tests.integration.session_fixture import fixture

MEBI = 1 << 20


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionClient]:
    program = binary(tmp_path_factory.mktemp("home"))
    with fixture(program, as_init=False) as made:
        yield made.client()


def tar_of(fill: Callable[[tarfile.TarFile], None], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        fill(tar)
    return buffer.getvalue()


def member(name: str, content: bytes = b"", **fields: object) -> Callable[[tarfile.TarFile], None]:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        for field, value in fields.items():
            setattr(info, field, value)
        tar.addfile(info, io.BytesIO(content))

    return add


def test_a_shorter_file_replaces_a_longer_and_a_running_program_too(client: SessionClient, tmp_path: Path) -> None:
    client.put(f"{tmp_path}/x", b"longer before")
    client.put(f"{tmp_path}/x", b"after")
    assert client.get(f"{tmp_path}/x") == b"after"
    client.put(f"{tmp_path}/sleep", Path("/bin/sleep").read_bytes(), mode=0o755)
    client.run(f"{tmp_path}/sleep 5 > /dev/null 2>&1 &", timeout_s=10)
    client.put(f"{tmp_path}/sleep", b"new")
    assert client.get(f"{tmp_path}/sleep") == b"new"


def test_a_full_disk_is_told_and_what_did_not_fit_is_gone(client: SessionClient) -> None:
    with pytest.raises(EnvironmentFailed):
        client.put("/dev/full", b"x" * MEBI)  # no file
    made = client.run("d=$(mktemp -d) && mount -t tmpfs -o size=1m none $d && echo $d", timeout_s=10)
    if not made.ok:
        pytest.skip("nothing can be mounted here")
    folder = made.stdout.decode().strip()
    try:
        with pytest.raises(DiskFull):
            client.put(f"{folder}/x", b"x" * (3 * MEBI))
        archive = tar_of(member("y", b"x" * (3 * MEBI)))
        with pytest.raises(DiskFull):
            client.put_tree(io.BytesIO(archive), folder)
    finally:
        client.run(f"umount {folder}; rmdir {folder}", timeout_s=10)


def plant(folder: Path) -> None:
    deep = folder / ("d" * 90) / ("e" * 120)
    deep.mkdir(parents=True)
    (deep / ("f" * 130)).write_bytes(os.urandom(70_000))
    (folder / "run.sh").write_bytes(b"echo ran")
    (folder / "run.sh").chmod(0o755)
    (folder / "ünï \n code").write_bytes(b"")
    (folder / "link").symlink_to("run.sh")
    (folder / ("l" * 120)).symlink_to("t" * 150)
    (folder / "empty").mkdir(mode=0o700)
    os.utime(folder / "run.sh", (1_000_000_000, 1_000_000_000))


def picture(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b"",
        )
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_form_of_tar_is_understood(client: SessionClient, tmp_path: Path, form: int) -> None:
    plant(tmp_path / "a")
    if form == tarfile.USTAR_FORMAT:
        (tmp_path / "a" / ("l" * 120)).unlink()
        shutil.rmtree(tmp_path / "a" / ("d" * 90))
        deep = tmp_path / "a" / ("d" * 90) / ("e" * 60)  # name and prefix: as much as this form can say
        deep.mkdir(parents=True)
        (deep / "f").write_bytes(b"deep")
    (tmp_path / "a/hard").hardlink_to(tmp_path / "a/run.sh")
    archive = tar_of(lambda tar: tar.add(tmp_path / "a", arcname="."), form)
    client.put_tree(archive, f"{tmp_path}/b")
    assert picture(tmp_path / "b") == picture(tmp_path / "a")
    assert (tmp_path / "b/hard").stat().st_ino == (tmp_path / "b/run.sh").stat().st_ino


@pytest.mark.parametrize("name", ["../outside", "/../../outside", "a/../../outside", "a/b/../../../x"])
def test_a_name_that_leads_outside_is_refused(client: SessionClient, tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecInvalid, match="outside"):
        client.put_tree(tar_of(member(name, b"x")), f"{tmp_path}/in")
    assert os.listdir(tmp_path) == ["in"]
    assert os.listdir(tmp_path / "in") == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_of_the_archive_leads_nowhere(client: SessionClient, tmp_path: Path, kind: bytes) -> None:
    (tmp_path / "victim").mkdir()

    def fill(tar: tarfile.TarFile) -> None:
        member("way", type=tarfile.SYMTYPE, linkname="../victim")(tar)
        if kind == tarfile.SYMTYPE:
            member("way/x", b"x")(tar)
        else:
            member("taken", type=tarfile.LNKTYPE, linkname="way/x")(tar)

    with pytest.raises(SpecInvalid, match="outside"):
        client.put_tree(tar_of(fill), f"{tmp_path}/in")
    assert os.listdir(tmp_path / "victim") == []


def test_what_is_no_tar_is_refused_and_the_connection_goes_on(client: SessionClient, tmp_path: Path) -> None:
    whole = tar_of(member("x", b"x" * 5000))
    for archive in (b"", b"no tar" * 1000, b"x", os.urandom(4096), whole[:600], whole[:512]):
        with pytest.raises(SpecInvalid, match="tar"):
            client.put_tree(archive, str(tmp_path))
    broken = tar_of(member("x", b"", pax_headers={"comment": "y"})).replace(b" comment=", b" comment ")
    with pytest.raises(SpecInvalid, match="tar"):
        client.put_tree(broken, str(tmp_path))
    assert client.run("true", timeout_s=10).ok


def test_files_whose_size_is_not_known_before_are_read_to_their_end(client: SessionClient) -> None:
    assert b"\nPid:" in client.get("/proc/self/status")


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_what_no_task_needs_is_refused(client: SessionClient, tmp_path: Path, kind: bytes) -> None:
    with pytest.raises(SpecInvalid, match="expected a file"):
        client.put_tree(tar_of(member("x", type=kind)), str(tmp_path))


def test_a_read_only_folder_can_be_filled_first(client: SessionClient, tmp_path: Path) -> None:
    def fill(tar: tarfile.TarFile) -> None:
        member("locked/", type=tarfile.DIRTYPE, mode=0o555)(tar)
        member("locked/x", b"x", mode=0o4711)(tar)

    client.put_tree(tar_of(fill), str(tmp_path))
    assert stat.S_IMODE((tmp_path / "locked").stat().st_mode) == 0o555
    assert stat.S_IMODE((tmp_path / "locked/x").stat().st_mode) == 0o711, "no set-uid from an archive"


def test_more_than_the_limit_is_not_taken(client: SessionClient, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x" * 1001)
    with pytest.raises(EnvironmentFailed, match="at most 1000"):
        client.get(f"{tmp_path}/x", limit_bytes=1000)
    assert len(client.get(f"{tmp_path}/x", limit_bytes=1001)) == 1001
