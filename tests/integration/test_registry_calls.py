"""Pulls without an engine from a registry that is busy, cuts off, or wants a login: a server that does so by order."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from app.errors import ImageDenied, ImageMissing, ImageUnavailable
from app.images import registry_refusals
from app.images.layer_store import ImageStore, StoredImage, layer_name
from app.images.logins import login_for
from app.images.references import Reference
from app.images.registry_pull import pull
from app.images.registry_refusals import TRIES, RefusalKind, RegistryRefusal, kind_of, persist
from app.settings import Settings
from tests.integration.fake_registry import CONTENT, FakeRegistry, Fault, after, sha, standing

MANIFESTS = "/v2/x/manifests"


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "home")


def pulled(fake: FakeRegistry, store: ImageStore, *, within_s: float = 60.0, name: str = "x") -> StoredImage:
    """With the logins that this process's own configuration has."""
    login = login_for(Settings(), fake.host)
    return pull(Reference.parse(f"{fake.host}/{name}"), store, time.monotonic() + within_s, login)


def is_whole(image: StoredImage, fake: FakeRegistry, store: ImageStore) -> bool:
    content = (store.layers / layer_name(sha(fake.layer)) / "file").read_bytes()
    return image.id == fake.image_id and content == CONTENT


def test_a_busy_registry_is_not_asked_before_it_said(fake: FakeRegistry, store: ImageStore) -> None:
    fake.faults[MANIFESTS] = [Fault(429, after("3"))]
    assert is_whole(pulled(fake, store), fake, store)
    first, second = (one.at for one in fake.seen(MANIFESTS))
    assert second - first >= 2.9


def test_a_registry_that_stays_busy_is_asked_so_often_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(registry_refusals, "_FIRST_WAIT_S", 0.01)

    def once() -> None:
        asked.append(time.monotonic())
        raise RegistryRefusal("pull x", "503", RefusalKind.BUSY)

    with pytest.raises(RegistryRefusal, match=r"^pull x: 503$"):
        persist(once, time.monotonic() + 60)
    assert len(asked) == TRIES


def test_a_pull_ends_at_its_deadline_and_leaves_nothing(fake: FakeRegistry, store: ImageStore) -> None:
    fake.faults[fake.layer_path] = [Fault(503)] * 100
    begun = time.monotonic()
    with pytest.raises(ImageUnavailable):
        pulled(fake, store, within_s=2)
    assert time.monotonic() - begun < 10
    assert not list(store.layers.glob("*"))
    assert store.images() == []


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        (MANIFESTS, 403, ImageDenied),
        (MANIFESTS, 404, ImageMissing),
        (MANIFESTS, 400, ImageUnavailable),
        ("/v2/x/blobs", 404, ImageUnavailable),  # a registry that is being filled
    ],
)
def test_what_a_registry_has_not_is_told_from_what_it_does_not_give(
    fake: FakeRegistry, store: ImageStore, path: str, status: int, kind: type[ImageUnavailable]
) -> None:
    fake.faults[path] = [Fault(status)] * 20
    with pytest.raises(ImageUnavailable, match="cannot be pulled") as found:
        pulled(fake, store)
    assert kind_of(found.value) is kind


@pytest.mark.parametrize("manifest", [b"no json", b"[]", b'{"config": {"digest"', b"{}"])
def test_an_answer_that_is_none_is_the_images_fault(fake: FakeRegistry, store: ImageStore, manifest: bytes) -> None:
    fake.manifest = manifest
    with pytest.raises(ImageUnavailable, match=r"/x:latest cannot be pulled"):
        pulled(fake, store)


def test_the_key_to_a_storage_is_in_no_message(fake: FakeRegistry, store: ImageStore) -> None:
    fake.faults[fake.layer_path] = [Fault(307, lambda: {"Location": "http://127.0.0.1:1/blob?signature=hush"})] * 9
    with pytest.raises(ImageUnavailable, match="connection refused") as found:
        pulled(fake, store, within_s=5)
    assert "hush" not in str(found.value)


def test_a_layer_that_is_here_is_not_fetched_again_until_it_goes(fake: FakeRegistry, store: ImageStore) -> None:
    image = pulled(fake, store)
    assert is_whole(pulled(fake, store), fake, store)
    assert len(fake.seen(fake.layer_path)) == 1
    store.remove(image.id, keep=set)
    assert is_whole(pulled(fake, store), fake, store)
    assert len(fake.seen(fake.layer_path)) == 2
    store.remove(image.id, keep=set)
    store.tidy(keep=set)
    assert [one for one in store.blobs.glob("**/*") if not one.is_dir()] == []


class Kept:
    """A folder with docker's configuration and the helpers that it names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def config(self, **content: object) -> None:
        (self.folder / "config.json").write_text(json.dumps(content))

    def helper(self, name: str, script: str) -> None:
        program = self.folder / f"docker-credential-{name}"
        program.write_text(f"#!/bin/sh\nread -r server\n{script}\n")
        program.chmod(0o755)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    folder = tmp_path / "docker"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return Kept(folder)


SAYS = """[ "$1" = get ] && echo '{"ServerURL": "'$server'", "Username": "USER", "Secret": "open sesame"}'"""


@pytest.mark.parametrize("wants", ["Basic", "Bearer"])
@pytest.mark.parametrize("way", ["auths", "credHelpers", "credsStore"])
def test_a_closed_registry_opens_to_what_docker_login_keeps(
    fake: FakeRegistry, store: ImageStore, kept: Kept, way: str, wants: str
) -> None:
    fake.wants, fake.login = wants, "me:open sesame"
    with pytest.raises(ImageUnavailable) as found:
        pulled(fake, store)
    assert kind_of(found.value) is ImageDenied
    kept.helper("mine", SAYS.replace("USER", "me"))
    match way:
        case "auths":
            kept.config(auths={fake.host: {"auth": "bWU6b3BlbiBzZXNhbWU="}})
        case "credHelpers":
            kept.config(credHelpers={fake.host: "mine"}, credsStore="no-such")
        case _:
            kept.config(auths={fake.host: {}}, credsStore="mine")
    assert is_whole(pulled(fake, store), fake, store)


def test_whom_a_registry_sends_us_on_to_is_not_told_who_we_are(
    fake: FakeRegistry, store: ImageStore, kept: Kept
) -> None:
    kept.config(auths={fake.host: {"auth": "bWU6b3BlbiBzZXNhbWU="}})
    fake.wants, fake.login = "Bearer", "me:open sesame"
    with standing() as elsewhere:
        moved = f"http://localhost:{elsewhere.host.rpartition(':')[2]}{fake.layer_path}"
        fake.faults[fake.layer_path] = [Fault(307, lambda: {"Location": moved})]
        assert is_whole(pulled(fake, store), fake, store)
        assert [one.headers.get("Authorization") for one in elsewhere.asked] == [None]
