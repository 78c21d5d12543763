"""What every artifact store does, held against each of them: S3 and Azure by emulators, GCS by a small stub."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from app.artifacts import ArtifactStore, open_store
from app.errors import ArtifactMissing, SettingsInvalid, SpecInvalid
from tests.azurite import ACCOUNT, KEY, make_container, serving_azurite
from tests.gcs_stub import serving_gcs
from tests.moto_server import serving_moto, some_credentials


@pytest.fixture(scope="module")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_moto(tmp_path_factory.mktemp("s3") / "server.log") as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_azurite(tmp_path_factory.mktemp("azurite")) as url:
        yield url


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    some_credentials(monkeypatch)


STORES = ["folder", "s3", "gs"]
MORE = [
    pytest.param(name, marks=pytest.mark.extra)
    for name in ("s3 with a prefix", "gs with a prefix", "az", "az with a prefix")
]


@pytest.fixture(params=[*STORES, *MORE])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ArtifactStore]:
    if request.param == "folder":
        yield open_store((tmp_path / "a store").as_uri())
        return
    bucket = re.sub(r"[^a-z0-9]+", "-", tmp_path.name.lower()).strip("-")[-50:].strip("-")
    prefix = "/deep/down" if "prefix" in request.param else ""
    if request.param.startswith("s3"):
        endpoint = request.getfixturevalue("s3_endpoint")
        yield open_store(f"s3://{bucket}{prefix}", endpoint_url=endpoint, create_bucket=True)
    elif request.param.startswith("az"):
        url = request.getfixturevalue("azurite")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", url)
        make_container(url, bucket)
        yield open_store(f"az://{bucket}{prefix}")
    else:
        with serving_gcs(bucket) as account:
            monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", account)
            yield open_store(f"gs://{bucket}{prefix}")


def test_what_was_put_is_got(store: ArtifactStore) -> None:
    for content in (b"", b"text\n", bytes(range(256))):
        store.put("runs/1/patch.diff", content)
        assert store.get("runs/1/patch.diff") == content


def test_put_tells_the_url_where_the_object_is(store: ArtifactStore) -> None:
    url = store.put("runs/1/a b#é.txt", b"x")
    assert url == store.url("runs/1/a b#é.txt")
    assert url.split("://")[0] in ("file", "s3", "az", "gs")
    assert store.get("runs/1/a b#é.txt") == b"x"


def test_a_missing_key_is_missing(store: ArtifactStore) -> None:
    assert store.exists("runs/1/none") is False
    with pytest.raises(ArtifactMissing, match="runs/1/none"):
        store.get("runs/1/none")


def test_a_key_that_is_only_the_beginning_of_another_is_missing(store: ArtifactStore) -> None:
    store.put("runs/1/patch", b"x")
    assert store.exists("runs/1") is False
    with pytest.raises(ArtifactMissing):
        store.get("runs/1")


def test_the_last_put_counts(store: ArtifactStore) -> None:
    store.put("k", b"a longer first content")
    store.put("k", b"second")
    assert store.exists("k")
    assert store.get("k") == b"second"


def test_of_several_who_create_one_wins(store: ArtifactStore) -> None:
    contents = [bytes([number]) * 1000 for number in range(6)]
    at_once = 1 if type(store).__name__ == "S3Store" else len(contents)  # moto looks first and writes then; S3 does not
    with ThreadPoolExecutor(at_once) as threads:
        won = list(threads.map(lambda content: store.create("bundles/one", content), contents))
    assert sorted(won) == [False] * 5 + [True]
    assert store.get("bundles/one") == contents[won.index(True)]
    assert not store.create("bundles/one", b"late")
    assert store.get("bundles/one") == contents[won.index(True)]


def test_a_link_gives_the_object_to_who_has_it_and_as_a_file(store: ArtifactStore) -> None:
    store.put("runs/1/agent_log.txt", b"<script>alert(1)</script>")
    link = store.link("runs/1/agent_log.txt", 60)
    if link is None:
        assert "://" in store.url("runs/1/agent_log.txt")
        assert type(store).__name__ == "FolderStore" or store.url("x").startswith("gs://")  # its stub has no key
        return
    with urlopen(link, timeout=10) as reply:
        assert reply.read() == b"<script>alert(1)</script>"
        assert reply.headers["Content-Type"] == "application/octet-stream"
        assert reply.headers["Content-Disposition"] == "attachment"
    if "sig=" in link:  # moto looks at no signature
        with pytest.raises(HTTPError):
            urlopen(link.replace("sig=", "sig=0"), timeout=10)


def test_twenty_megabytes_come_back_whole(store: ArtifactStore) -> None:
    content = os.urandom(1 << 20) * 20
    store.put("large", content)
    assert store.get("large") == content


def test_a_file_is_put_as_its_content_is(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "given").write_bytes(content := os.urandom(1 << 20) * 3)
    url = store.put_file("logs/all", tmp_path / "given")
    assert url == store.url("logs/all")
    assert store.get("logs/all") == content
    (tmp_path / "given").write_bytes(b"")
    store.put_file("logs/all", tmp_path / "given")
    assert store.get("logs/all") == b""


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a//b",
        "a/./b",
        "a/",
        ".",
        "a\\..\\b",
        "a\x00b",
        "a\nb",
        "k" * 256,
        "k/" * 501,
    ],
)
def test_a_key_that_leaves_the_store_is_refused_by_every_method(store: ArtifactStore, key: str) -> None:
    for attempt in (
        lambda: store.put(key, b"x"),
        lambda: store.put_file(key, Path(__file__)),
        lambda: store.create(key, b"x"),
        lambda: store.link(key, 60),
        lambda: store.get(key),
        lambda: store.exists(key),
        lambda: store.url(key),
    ):
        with pytest.raises(SpecInvalid, match="expected an artifact key"):
            attempt()


def test_a_check_leaves_nothing_behind(store: ArtifactStore, tmp_path: Path) -> None:
    store.check()
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_readers_never_see_half_an_object(store: ArtifactStore) -> None:
    contents = [bytes([number]) * 200_000 for number in range(8)]
    store.put("shared", contents[0])
    done = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not done.is_set():
            seen.add(store.get("shared"))

    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=store.put, args=("shared", content)) for content in contents * 2]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    done.set()
    reader.join()
    assert seen
    assert seen <= set(contents)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "artifacts",
        "/srv/artifacts",
        "http://x/y",
        "file://host/x",
        "file:x",
        "s3://",
        "s3:///x",
        "az://",
        "gs:///x",
        "gs://b?x=1",
        "s3://b?x=1",
        "s3://u:p@b/x",
    ],
)
def test_what_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(SettingsInvalid, match="expected artifacts at file:///folder, s3://bucket/prefix, az://"):
        open_store(url)
