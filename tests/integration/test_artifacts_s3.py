"""Where an artifact store fails: servers that are away, hang or refuse; disks that are full."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.artifacts import open_store
from app.errors import ArtifactMissing, ArtifactStoreUnavailable, DiskFull
from tests.moto_server import serving_moto, some_credentials
from tests.services import small_disk


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_moto(tmp_path_factory.mktemp("s3") / "server.log") as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    some_credentials(monkeypatch)


def test_a_bucket_is_made_only_when_asked_and_asking_twice_is_fine(endpoint: str) -> None:
    unasked = open_store("s3://not-there-yet", endpoint_url=endpoint)
    for attempt in (
        lambda: unasked.put("k", b"x"),
        unasked.check,
        lambda: unasked.exists("k"),
        lambda: unasked.get("k"),
    ):
        with pytest.raises(ArtifactStoreUnavailable, match=r"(?i)s3://not-there-yet at http.*bucket"):
            attempt()
    for _ in range(2):
        open_store("s3://not-there-yet", endpoint_url=endpoint, create_bucket=True).put("k", b"x")
    assert unasked.get("k") == b"x"


def test_stores_under_two_prefixes_do_not_see_each_other(endpoint: str) -> None:
    one = open_store("s3://shared-bucket/one", endpoint_url=endpoint, create_bucket=True)
    one.put("k", b"x")
    with pytest.raises(ArtifactMissing):
        open_store("s3://shared-bucket/two", endpoint_url=endpoint).get("k")
    assert open_store("s3://shared-bucket", endpoint_url=endpoint).get("one/k") == b"x"


def test_a_server_that_is_away_is_told_in_bounded_time() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    started = time.monotonic()
    with pytest.raises(ArtifactStoreUnavailable, match=f"{address}.*MEGAFLOW_S3_ENDPOINT_URL"):
        open_store("s3://bucket", endpoint_url=address).check()
    assert time.monotonic() - started < 10


def test_a_server_that_takes_calls_and_never_answers_is_told_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.artifacts.s3._READ_TIMEOUT_S", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        started = time.monotonic()
        with pytest.raises(ArtifactStoreUnavailable, match=r"(?i)timeout"):
            open_store("s3://bucket", endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}").get("k")
        assert time.monotonic() - started < 15


def test_a_server_that_answers_rubbish_is_told() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(ArtifactStoreUnavailable):
            open_store("s3://bucket", endpoint_url=f"http://127.0.0.1:{listener.getsockname()[1]}").get("k")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def test_missing_credentials_are_told(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(ArtifactStoreUnavailable, match=r"credentials"):
        open_store("s3://bucket", endpoint_url=endpoint).check()


def test_a_disk_that_is_really_full_is_told(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    with small_disk(mounted, "1m"):
        store = open_store(mounted.as_uri())
        store.put("k", b"old")
        with pytest.raises(DiskFull):
            store.put("k", b"x" * (2 << 20))
        assert store.get("k") == b"old"
        assert [file.name for file in mounted.iterdir()] == ["k"]


def test_a_store_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactStoreUnavailable, match="expected a folder that this user may write to"):
        open_store((tmp_path / "file").as_uri()).check()
