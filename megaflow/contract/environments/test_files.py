"""Contract of files: single files and trees."""

from __future__ import annotations

import io
import tarfile

import pytest

from app.environments.contract import Environment
from app.errors import SpecInvalid
from megaflow.contract.environments.fixture import tar_of


def test_a_file_comes_back_as_it_went_with_its_folders_and_mode(shared: Environment) -> None:
    content = bytes(range(256)) * 5000
    shared.put("/data/a b/ü/x.bin", content, mode=0o750)
    assert shared.get("/data/a b/ü/x.bin") == content
    assert shared.run("stat -c %a x.bin .", cwd="/data/a b/ü", timeout_s=20).stdout == b"750\n755\n"


def test_a_file_is_replaced(shared: Environment) -> None:
    shared.put("/data/twice", b"longer before")
    shared.put("/data/twice", b"after")
    assert shared.get("/data/twice") == b"after"


def test_what_a_command_wrote_can_be_read_also_through_a_link(shared: Environment) -> None:
    shared.run("printf 'not utf-8: \\377' > out; ln -s out link", timeout_s=20)
    assert shared.get("/testbed/link") == b"not utf-8: \xff"


@pytest.mark.parametrize("path", ["/not/there", "/testbed", "/testbed/dangling"])
def test_what_is_no_file_is_not_found(shared: Environment, path: str) -> None:
    shared.run("ln -sf /nowhere/at/all dangling", timeout_s=20)
    with pytest.raises(FileNotFoundError):
        shared.get(path)


def test_a_tree_is_unpacked_into_a_new_and_into_an_old_folder(shared: Environment) -> None:
    for version in (b"one", b"two"):
        shared.put_tree(tar_of({"a/b.txt": version, "run.sh": b"echo ran"}), "/tree/deep")
        assert shared.get("/tree/deep/a/b.txt") == version
    assert shared.run("./run.sh", cwd="/tree/deep", timeout_s=20).stdout == b"ran\n"


def test_a_tree_comes_back_as_it_went(shared: Environment) -> None:
    shared.run(
        "mkdir -p back/deep; cd back; printf a > a; printf 'b\\377' > deep/b; chmod 750 deep/b; ln -s a l", timeout_s=20
    )
    with tarfile.open(fileobj=io.BytesIO(shared.get_tree("/testbed/back"))) as tar:
        members = {
            member.name.removeprefix("./").rstrip("/"): member for member in tar if member.name not in (".", "./")
        }
        assert set(members) == {"a", "deep", "deep/b", "l"}
        assert (members["l"].linkname, members["deep/b"].mode, members["deep"].isdir()) == ("a", 0o750, True)
        content = tar.extractfile(members["deep/b"])
        assert content is not None
        assert content.read() == b"b\xff"
    shared.put_tree(shared.get_tree("/testbed/back"), "/tree/again")
    assert shared.get("/tree/again/deep/b") == b"b\xff"


@pytest.mark.parametrize("path", ["/not/there", "/testbed/no-folder"])
def test_what_is_no_folder_is_not_found(shared: Environment, path: str) -> None:
    shared.put("/testbed/no-folder", b"x")
    with pytest.raises(FileNotFoundError):
        shared.get_tree(path)


@pytest.mark.parametrize("name", ["../outside", "/../../outside", "a/../../outside"])
def test_a_tree_that_leads_outside_is_refused(shared: Environment, name: str) -> None:
    with pytest.raises(SpecInvalid, match="outside"):
        shared.put_tree(tar_of({name: b"x"}), "/tree/checked")


def test_what_is_no_archive_is_refused(shared: Environment) -> None:
    with pytest.raises(SpecInvalid, match="tar"):
        shared.put_tree(b"no tar" * 1000, "/tree")


@pytest.mark.parametrize("path", ["relative", "", "/", "/.."])
def test_a_path_that_is_not_absolute_is_a_programming_error(shared: Environment, path: str) -> None:
    with pytest.raises(ValueError, match="absolute"):
        shared.put(path, b"")
