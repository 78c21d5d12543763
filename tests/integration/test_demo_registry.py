"""The demo's own registry: it stands for as long as the demo, however that ends."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import psutil
import pytest

from app.cli import demo_by_hand
from app.cli.demo_by_hand import REGISTRY, registry
from app.errors import InstallationFailed
from tests.services import missing

DEMO = """
import time
from app.cli.demo_by_hand import registry
from app.cli.orderly import ending_in_order

with ending_in_order(), registry() as address:
    print(address, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _installed() -> None:
    if shutil.which(REGISTRY) is None:
        missing(f"{REGISTRY} (Debian: apt-get install {REGISTRY})")


def test_a_demo_that_is_told_to_end_leaves_no_registry(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DEMO],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
    ) as demo:
        assert demo.stdout is not None
        address = demo.stdout.readline().decode().strip()
        with urllib.request.urlopen(f"http://{address}/v2/", timeout=10) as answer:
            assert answer.status == 200
        (server,) = psutil.Process(demo.pid).children()
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(20) == 128 + signal.SIGTERM
    assert not server.is_running()
    assert list(tmp_path.iterdir()) == []


def test_a_registry_that_does_not_come_up_is_told_with_its_words_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken-registry"
    broken.write_text("#!/bin/sh\necho no room for images >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(demo_by_hand, "REGISTRY", str(broken))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(InstallationFailed, match="no room for images"), registry():
        pytest.fail("it is not there")
    assert list(tmp_path.iterdir()) == [broken]
