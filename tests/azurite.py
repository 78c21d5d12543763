"""Azurite, the emulator of Azure's stores, installed by npm into a cache folder of the tests."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from urllib.request import Request, urlopen

from tests.moto_server import serving_http
from tests.services import free_port, missing

_RELEASE = "azurite@3.35.0"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The emulator's published account: it opens nothing else."""


def _program() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megaflow-tests" / _RELEASE
    program = cache / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        npm = shutil.which("npm")
        if npm is None:
            missing("npm, which installs Azurite")
        cache.mkdir(parents=True, exist_ok=True)
        command = [str(npm), "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(cache), _RELEASE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        if done.returncode != 0:
            missing(f"Azurite, which npm did not install: {done.stderr[-500:]}")
    return program


@contextmanager
def serving_azurite(folder: Path) -> Iterator[str]:
    """The account's URL. Objects are in memory."""
    port = free_port()
    # Without the last option it refuses clients that are newer than itself.
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck"]
    command = [str(_program()), *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with serving_http(command, port, folder / "azurite.log") as endpoint:
        yield f"{endpoint}/{ACCOUNT}"


def make_container(url: str, name: str) -> None:
    """Obstore makes none. The request is signed with the account's key, as the service documents it."""
    now, version = formatdate(usegmt=True), "2021-08-06"
    headers = f"x-ms-date:{now}\nx-ms-version:{version}"
    what = f"PUT{chr(10) * 12}{headers}\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), what.encode(), hashlib.sha256)).decode()
    request = Request(f"{url}/{name}?restype=container", method="PUT")
    for header, value in {
        "x-ms-date": now,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{signature}",
        "Content-Length": "0",
    }.items():
        request.add_header(header, value)
    urlopen(request, timeout=10).close()
