"""Pulls without an engine from a registry that is busy, cuts off, or wants a login: a server that does so by order."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from app.errors import ImageUnavailable
from app.images import registry_client
from app.images.engine_registry import retry_after_s
from app.images.layer_store import ImageStore, StoredImage, layer_name
from app.images.logins import Login, login_for
from app.images.references import Reference
from app.images.registry_client import TRIES, RefusalKind, RegistryRefusal, persist
from app.images.registry_layers import Registry
from app.settings import Settings
from tests.integration.registry_stand import CONTENT, Fault, Stand, after, sha, standing

MANIFESTS = "/v2/x/manifests"


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "home")


def pull(stand: Stand, store: ImageStore, *, within_s: float = 60.0) -> StoredImage:
    """With the logins that this process's own configuration has."""
    login = partial(login_for, Settings(), stand.host)
    return Registry(Reference.parse(f"{stand.host}/x"), time.monotonic() + within_s, login).pull(store)


def is_whole(image: StoredImage, stand: Stand, store: ImageStore) -> bool:
    content = (store.layers / layer_name(sha(stand.layer)) / "file").read_bytes()
    return image.id == stand.image_id and content == CONTENT


def gaps(stand: Stand, path: str) -> list[float]:
    times = [one.at for one in stand.seen(path)]
    return [later - sooner for sooner, later in pairwise(times)]


# --- Busy -----------------------------------------------------------------------------------------------------------


def _soon() -> dict[str, str]:
    return {"Retry-After": format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)}  # 1 to 2 s, whole


@pytest.mark.parametrize("path", [MANIFESTS, "/v2/x/blobs"])
@pytest.mark.parametrize("fault", [Fault(429, after("1")), Fault(503, _soon)], ids=["seconds", "date"])
def test_a_busy_registry_is_not_asked_before_it_said(stand: Stand, store: ImageStore, fault: Fault, path: str) -> None:
    stand.faults[path] = [fault]
    assert is_whole(pull(stand, store), stand, store)
    assert gaps(stand, path)[0] >= 0.9


def test_a_fault_of_the_moment_is_forgotten(stand: Stand, store: ImageStore) -> None:
    stand.faults[MANIFESTS] = [Fault(500), Fault(502)]
    stand.faults[stand.layer_path] = [Fault(503), Fault(504)]
    assert is_whole(pull(stand, store), stand, store)
    assert len(stand.seen(MANIFESTS)) == len(stand.seen(stand.layer_path)) == 3


@pytest.mark.parametrize("path", [MANIFESTS, "/token"])
@pytest.mark.parametrize("wait", ["35", "1e9", "inf"])
def test_who_is_told_to_come_too_late_gives_up_at_once(stand: Stand, store: ImageStore, wait: str, path: str) -> None:
    stand.faults[path] = [Fault(429, after(wait))]
    if path == "/token":
        stand.wants = "Bearer"
    begun = time.monotonic()
    with pytest.raises(ImageUnavailable, match=f"429.*asked again in {float(wait):.0f} s, and this task allows"):
        pull(stand, store, within_s=33)
    assert time.monotonic() - begun < 10
    assert len(stand.seen(path)) == 1
    assert not list(store.layers.parent.glob("images/*.json"))


def test_a_registry_that_stays_busy_is_asked_so_often_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(registry_client, "_FIRST_WAIT_S", 0.01)

    def once() -> None:
        asked.append(time.monotonic())
        raise RegistryRefusal("pull x", "503", RefusalKind.BUSY)

    with pytest.raises(RegistryRefusal, match=r"^pull x: 503$"):
        persist(once, time.monotonic() + 60)
    assert len(asked) == TRIES


def test_a_fleet_that_was_refused_at_once_comes_back_at_many_times(tmp_path: Path) -> None:
    hosts = 8
    with standing() as stand, ThreadPoolExecutor(hosts) as threads:
        stand.faults[MANIFESTS] = [Fault(429, after("1"))] * hosts
        places = [ImageStore(tmp_path / str(number)) for number in range(hosts)]
        begun = time.monotonic()
        for image in threads.map(lambda place: pull(stand, place), places):
            assert image.id == stand.image_id
    again = sorted(one.at - begun for one in stand.seen(MANIFESTS))[hosts:]
    assert again[0] >= 1
    assert again[-1] - again[0] > 0.05


# --- Tokens ---------------------------------------------------------------------------------------------------------


def test_a_busy_token_service_is_asked_again_when_it_said(stand: Stand, store: ImageStore) -> None:
    stand.wants, stand.faults["/token"] = "Bearer", [Fault(429, after("1")), Fault(503)]
    assert is_whole(pull(stand, store), stand, store)
    assert gaps(stand, "/token")[0] >= 1


def test_a_token_service_that_stays_busy_is_named_and_no_login_asked_for(stand: Stand, store: ImageStore) -> None:
    stand.wants, stand.faults["/token"] = "Bearer", [Fault(503)] * TRIES
    with pytest.raises(ImageUnavailable, match="token service answered 503") as found:
        pull(stand, store, within_s=1)
    assert "docker login" not in str(found.value)


def test_a_token_that_ends_in_the_middle_of_a_pull_is_fetched_anew(stand: Stand, store: ImageStore) -> None:
    stand.wants, stand.uses = "Bearer", 1
    assert is_whole(pull(stand, store), stand, store)
    assert len(stand.seen("/token")) == 3


def test_whom_a_registry_sends_us_on_to_is_not_told_who_we_are(stand: Stand, store: ImageStore, kept: Kept) -> None:
    kept.config(auths={stand.host: {"auth": "bWU6b3BlbiBzZXNhbWU="}})
    stand.wants, stand.login = "Bearer", "me:open sesame"
    with standing() as elsewhere:
        elsewhere.wants, elsewhere.login = "Bearer", stand.login
        stand.faults[stand.layer_path] = [
            Fault(307, lambda: {"Location": f"http://{elsewhere.host}{stand.layer_path}"})
        ]
        with pytest.raises(ImageUnavailable, match="401 for blobs/"):
            pull(stand, store)
        assert [one.path for one in elsewhere.asked] == [stand.layer_path]
        assert len(stand.seen("/token")) == 1


def test_an_identity_token_goes_no_further_than_to_the_token_service(
    stand: Stand, store: ImageStore, kept: Kept
) -> None:
    stand.wants, stand.login = "Bearer", "<token>:open sesame"
    kept.helper("mine", SAYS.replace("USER", "<token>"))
    kept.config(credsStore="mine")
    with standing() as elsewhere:
        stand.faults["/token"] = [Fault(307, lambda: {"Location": f"http://{elsewhere.host}/token"})]
        with pytest.raises(ImageUnavailable, match="expected a token from its token service"):
            pull(stand, store)
        assert elsewhere.asked == []


def test_the_key_to_a_storage_is_in_no_message(stand: Stand, store: ImageStore) -> None:
    stand.faults[stand.layer_path] = [Fault(307, lambda: {"Location": "http://127.0.0.1:1/blob?signature=hush"})] * 9
    with pytest.raises(ImageUnavailable, match="no whole answer") as found:
        pull(stand, store, within_s=1)
    assert "hush" not in str(found.value)


def test_the_engines_pulls_learn_when_to_come_back_behind_a_token(stand: Stand) -> None:
    stand.wants, stand.login = "Bearer", "me:word"
    reference, login = f"{stand.host}/x", Login("me", "word")
    assert retry_after_s(reference, lambda: login) is None
    stand.faults[MANIFESTS] = [Fault(429, after("7"))]
    assert retry_after_s(reference, lambda: login) == 7
    stand.faults["/token"] = [Fault(503, after("8"))]
    assert retry_after_s(reference, lambda: login) == 8
    assert {one.method for one in stand.seen(MANIFESTS)} == {"HEAD"}
    stand.faults[MANIFESTS] = [Fault(429, after("9"))]
    assert retry_after_s(reference) is None, "without a login it says nothing"


# --- Cut off --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [True, False])
def test_a_blob_that_breaks_off_comes_all_the_same(stand: Stand, store: ImageStore, ranges: bool) -> None:
    mib, cuts = 1 << 20, [Fault(cut=3 << 19), Fault(cut=10_000), Fault(503)]
    stand.ranges, stand.faults[stand.layer_path] = ranges, cuts
    assert is_whole(pull(stand, store), stand, store)
    asked = [one.headers.get("Range") for one in stand.seen(stand.layer_path)]
    assert asked == [None, f"bytes={mib}-", *([f"bytes={mib}-"] * 2 if ranges else [None, None])]


def test_a_blob_of_which_more_was_promised_than_there_is_comes_whole(stand: Stand, store: ImageStore) -> None:
    stand.faults[stand.layer_path] = [Fault(longer=10)]
    assert is_whole(pull(stand, store), stand, store)


def test_a_manifest_that_breaks_off_is_asked_for_again(stand: Stand, store: ImageStore) -> None:
    stand.faults[MANIFESTS] = [Fault(cut=20)]
    assert is_whole(pull(stand, store), stand, store)


def test_a_blob_that_always_breaks_off_leaves_nothing(stand: Stand, store: ImageStore) -> None:
    stand.faults[stand.layer_path] = [Fault(cut=0)] * (2 * TRIES)
    with pytest.raises(ImageUnavailable, match="no whole answer"):
        pull(stand, store, within_s=2)
    assert not list(store.layers.glob("*"))


# --- What `docker login` keeps --------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("way", ["auths", "credHelpers", "credsStore", "both"])
def test_a_closed_registry_opens_to_what_docker_login_keeps(
    stand: Stand, store: ImageStore, kept: Kept, way: str, wants: str
) -> None:
    stand.wants, stand.login = wants, "me:open sesame"
    kept.helper("mine", SAYS.replace("USER", "me") + f' && echo "$server" >> {kept.folder}/servers')
    kept.helper("empty", "echo 'credentials not found in native keychain'; exit 1")
    match way:
        case "auths":
            kept.config(auths={stand.host: {"auth": "bWU6b3BlbiBzZXNhbWU="}})
        case "credHelpers":
            kept.config(credHelpers={stand.host: "mine"}, credsStore="no-such")
        case "credsStore":
            kept.config(auths={stand.host: {}}, credsStore="mine")
        case _:
            kept.config(auths={stand.host: {"auth": "bWU6b3BlbiBzZXNhbWU="}}, credsStore="empty")
    assert is_whole(pull(stand, store), stand, store)
    if way.startswith("cred"):
        assert set((kept.folder / "servers").read_text().split()) == {stand.host}


def test_an_identity_token_of_a_helper_is_exchanged(stand: Stand, store: ImageStore, kept: Kept) -> None:
    stand.wants, stand.login = "Bearer", "<token>:open sesame"
    kept.helper("mine", SAYS.replace("USER", "<token>"))
    kept.config(credsStore="mine")
    assert is_whole(pull(stand, store), stand, store)
    assert [one.method for one in stand.seen("/token")] == ["POST"]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo the keyring is locked; exit 1", r"docker-credential-broken failed \(the keyring is locked\)"),
        ("echo open sesame", "expected a name and a secret of docker-credential-broken, found another answer"),
        (None, "expected a program docker-credential-broken on PATH, found none"),
    ],
)
def test_a_helper_that_fails_is_named_where_a_login_is_wanted_and_no_obstacle_elsewhere(
    stand: Stand, store: ImageStore, kept: Kept, script: str | None, why: str
) -> None:
    if script:
        kept.helper("broken", script)
    kept.config(credsStore="broken")
    stand.wants, stand.login = "Bearer", "me:open sesame"
    with pytest.raises(ImageUnavailable, match=f"401.*{why}") as found:
        pull(stand, store)
    assert "sesame" not in str(found.value)
    stand.login = None
    assert is_whole(pull(stand, store), stand, store)


@pytest.mark.parametrize("content", ["no json", "[]", '{"auths": {"HOST": {"auth": "nonsense"}}}', '{"auths": [1]}'])
def test_a_configuration_that_cannot_be_read_is_no_login_and_not_shown(
    stand: Stand, store: ImageStore, kept: Kept, content: str
) -> None:
    (kept.folder / "config.json").write_text(content.replace("HOST", stand.host))
    stand.wants, stand.login = "Basic", "me:open sesame"
    with pytest.raises(ImageUnavailable, match="wants a login") as found:
        pull(stand, store)
    assert "nonsense" not in str(found.value)
