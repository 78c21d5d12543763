"""Frameworks are installed from the index that pip was told of, and an image's own bundles are found: real uv."""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from app.agents.installation import Installer, indexes
from app.errors import AgentUnavailable

NAME = "megaflow-toy-of-this-test"  # on no public index
WHEEL = "megaflow_toy_of_this_test-1.0-py3-none-any.whl"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """The URL of a package index with one package."""
    page = tmp_path / "www" / "simple" / NAME
    page.mkdir(parents=True)
    about = WHEEL.removesuffix("-py3-none-any.whl") + ".dist-info"
    with zipfile.ZipFile(page / WHEEL, "w") as wheel:
        wheel.writestr("megaflow_toy_of_this_test.py", "WORD = 'toy'\n")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    (page / "index.html").write_text(f'<a href="{WHEEL}">{WHEEL}</a>')
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path / "www"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


@pytest.fixture
def lock(tmp_path: Path, index: str) -> Path:
    digest = hashlib.sha256((tmp_path / "www" / "simple" / NAME / WHEEL).read_bytes()).hexdigest()
    file = tmp_path / "requirements.lock"
    file.write_text(f"{NAME}==1.0 --hash=sha256:{digest}\n")
    return file


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Nothing is told to pip and uv but by the test."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_NO_CACHE", "1")
    return monkeypatch


USE = ("-c", "import megaflow_toy_of_this_test")


@pytest.mark.parametrize("by", ["variable", "file"])
def test_what_pip_was_told_suffices(by: str, told: pytest.MonkeyPatch, index: str, lock: Path, tmp_path: Path) -> None:
    if by == "variable":
        told.setenv("PIP_INDEX_URL", index)
    else:
        file = tmp_path / "pip.conf"
        file.write_text(f"[global]\nindex-url = {index}\n")
        told.setenv("PIP_CONFIG_FILE", str(file))
    made = Installer(tmp_path / "tools").venv("toy", lock, first_use=USE)
    assert list(made.folder.glob("lib/python*/site-packages/megaflow_toy_of_this_test.py"))


def test_what_uv_was_told_comes_first(told: pytest.MonkeyPatch, index: str, lock: Path, tmp_path: Path) -> None:
    told.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    told.setenv("UV_DEFAULT_INDEX", index)
    assert indexes.environment()["UV_DEFAULT_INDEX"] == index
    Installer(tmp_path / "tools").venv("toy", lock, first_use=USE)


def test_certificates_of_pip_are_for_uv_and_node_too(told: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"):
        told.delenv(name, raising=False)
    told.setenv("PIP_CERT", "/somewhere/authorities.pem")
    found = indexes.environment()
    assert found["SSL_CERT_FILE"] == found["NODE_EXTRA_CA_CERTS"] == "/somewhere/authorities.pem"


def test_bundles_that_are_ready_are_used_and_never_written_to(
    told: pytest.MonkeyPatch, index: str, lock: Path, tmp_path: Path
) -> None:
    told.setenv("PIP_INDEX_URL", index)
    ready, own = tmp_path / "ready", tmp_path / "own"
    made = Installer(ready).venv("toy", lock).folder
    assert Installer(own, may_install=False, ready=ready).venv("toy", lock).folder == made
    assert not own.exists()
    (made / ".complete").unlink()
    before = sorted(made.rglob("*"))
    with pytest.raises(AgentUnavailable, match="installed on this host"):
        Installer(own, may_install=False, ready=ready).venv("toy", lock)
    assert Installer(own, ready=ready).venv("toy", lock).folder.parent == own
    assert sorted(made.rglob("*")) == before
