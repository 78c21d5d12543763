"""Source archives come from the index that the user's pip knows, with the right hash, and are never run."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from app.errors import ImageBuildFailed, ImageUnavailable
from app.images.build_sources import fetch_sources


def archive(marker: Path) -> bytes:
    """A source archive whose build code, were it run, would leave a trace."""
    content = f"open({str(marker)!r}, 'w').close()\n".encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        entry = tarfile.TarInfo("quiet_lib-1.0/setup.py")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of one project in an index of our own, to which pip alone is pointed."""
    project = tmp_path / "simple" / "quiet-lib"
    project.mkdir(parents=True)
    data = archive(tmp_path / "was-run")
    (project / "quiet_lib-1.0.tar.gz").write_bytes(data)
    (project / "quiet_lib-1.0-py3-none-any.whl").write_bytes(b"a wheel is not wanted")
    links = "".join(f'<a href="{file.name}">{file.name}</a>\n' for file in sorted(project.iterdir()))
    (project / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    settings = tmp_path / "pip.conf"
    settings.write_text(f"[global]\nindex-url = {(tmp_path / 'simple').as_uri()}\nretries = 0\n")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    return project


def context(tmp_path: Path, listing: str) -> Path:
    folder = tmp_path / "context"
    folder.mkdir()
    (folder / "sources.txt").write_text(listing)
    return folder


def pinned(index: Path) -> str:
    digest = hashlib.sha256((index / "quiet_lib-1.0.tar.gz").read_bytes()).hexdigest()
    return f"# one library\nquiet-lib==1.0 \\\n    --hash=sha256:{digest}\n"


def test_a_listed_archive_is_fetched_and_its_code_is_not_run(tmp_path: Path, index: Path) -> None:
    folder = context(tmp_path, pinned(index))
    assert fetch_sources(folder) == [folder / "sources" / "quiet_lib-1.0.tar.gz"]
    assert (folder / "sources" / "quiet_lib-1.0.tar.gz").read_bytes() == (index / "quiet_lib-1.0.tar.gz").read_bytes()
    assert not (tmp_path / "was-run").exists()


def test_an_archive_with_another_hash_is_refused(tmp_path: Path, index: Path) -> None:
    folder = context(tmp_path, f"quiet-lib==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(ImageBuildFailed, match=r"expected a source archive of quiet-lib==1\.0 with the sha256"):
        fetch_sources(folder)
    assert list((folder / "sources").iterdir()) == []


def test_a_changed_archive_in_the_cache_is_not_trusted(tmp_path: Path, index: Path) -> None:
    folder, cache = context(tmp_path, pinned(index)), tmp_path / "cache"
    cache.mkdir()
    (cache / "quiet_lib-1.0.tar.gz").write_bytes(b"something else")
    (placed,) = fetch_sources(folder, cache=cache)
    assert placed.read_bytes() == (index / "quiet_lib-1.0.tar.gz").read_bytes()


@pytest.mark.parametrize(
    "line", ["quiet-lib", "quiet-lib>=1.0 --hash=sha256:" + "0" * 64, "quiet-lib==1.0", "-r more.txt"]
)
def test_a_requirement_without_version_and_hash_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ImageBuildFailed, match="expected `name==version --hash=sha256") as raised:
        fetch_sources(context(tmp_path, line + "\n"))
    assert line in str(raised.value)


def test_an_index_out_of_reach_is_told_with_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ImageUnavailable, match=r"127\.0\.0\.1:9"):  # retried: the index may come back
        fetch_sources(context(tmp_path, f"quiet-lib==1.0 --hash=sha256:{'0' * 64}\n"))
