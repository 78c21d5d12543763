"""What every artifact store does, held against each of them; S3 is a real server process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from app.artifacts import ArtifactStore, open_store
from app.errors import ArtifactMissing, SettingsInvalid, SpecInvalid
from tests.services import free_port
from tests.waiting import eventually


@pytest.fixture(scope="module")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("s3") / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=output, stderr=output
        )
    try:
        eventually(lambda: server.poll() is not None or _answers(endpoint))
        assert server.poll() is None, log.read_text()[-2000:]
        yield endpoint
    finally:
        server.kill()
        server.wait()


def _answers(endpoint: str) -> bool:
    try:
        urlopen(endpoint, timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(params=["folder", "s3", "s3 with a prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    if request.param == "folder":
        return open_store((tmp_path / "a store").as_uri())
    endpoint = request.getfixturevalue("s3_endpoint")
    bucket = re.sub(r"[^a-z0-9]+", "-", tmp_path.name.lower()).strip("-")[-50:].strip("-")
    prefix = "/deep/down" if "prefix" in request.param else ""
    return open_store(f"s3://{bucket}{prefix}", endpoint_url=endpoint, create_bucket=True)


def test_what_was_put_is_got(store: ArtifactStore) -> None:
    for content in (b"", b"text\n", bytes(range(256))):
        store.put("runs/1/patch.diff", content)
        assert store.get("runs/1/patch.diff") == content


def test_put_tells_the_url_where_the_object_is(store: ArtifactStore) -> None:
    url = store.put("runs/1/a b#é.txt", b"x")
    assert url == store.url("runs/1/a b#é.txt")
    assert url.split("://")[0] in ("file", "s3")
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
    ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "a/", ".", "a\\..\\b", "a\x00b", "a\nb", "k" * 1001],
)
def test_a_key_that_leaves_the_store_is_refused_by_every_method(store: ArtifactStore, key: str) -> None:
    for attempt in (
        lambda: store.put(key, b"x"),
        lambda: store.put_file(key, Path(__file__)),
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
        "s3://b?x=1",
        "s3://u:p@b/x",
    ],
)
def test_what_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(SettingsInvalid, match="expected artifacts at file:///folder or s3://bucket/prefix"):
        open_store(url)
