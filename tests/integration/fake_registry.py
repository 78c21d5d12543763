"""Registries: Debian's own, and a small one of one image that is busy, cuts off or wants a login, as it is told."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

import pytest

from app.host import kernel
from megaflow.contract.environments.fixture import tar_of
from tests.integration.http_server import Handler, served
from tests.services import missing, serving, short_folder
from tests.waiting import eventually

CONTENT = b"what the image has in it\n" * 130_000
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True)
class Fault:
    """What comes in place of the right answer: a status with headers, or the right one, cut off after `cut` bytes."""

    status: int = 200
    headers: Callable[[], Mapping[str, str]] = dict
    cut: int | None = None


def after(wait: str) -> Callable[[], Mapping[str, str]]:
    return lambda: {"Retry-After": wait}


@dataclass
class Asked:
    """One request. `at`: monotonic seconds."""

    path: str
    at: float
    method: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class FakeRegistry:
    """`faults`, one for each request, by what its path begins with: `/token`, `/v2/x/manifests`, `/v2/x/blobs`."""

    host: str = ""
    login: str | None = None  # USER:PASSWORD, or `<token>:` and an identity token
    wants: str | None = None  # the scheme of its challenge
    faults: dict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    asked: list[Asked] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.layer = tar_of({"file": CONTENT})
        config = {"architecture": kernel.machine(), "os": "linux"}
        self.config = json.dumps({**config, "rootfs": {"type": "layers", "diff_ids": [sha(self.layer)]}}).encode()
        parts = {"config": _part("config.v1+json", self.config), "layers": [_part("layer.v1.tar", self.layer)]}
        self.manifest = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, **parts}).encode()

    @property
    def image_id(self) -> str:
        return sha(self.config)

    @property
    def layer_path(self) -> str:
        return f"/v2/x/blobs/{sha(self.layer)}"

    def seen(self, path: str) -> list[Asked]:
        return [one for one in self.asked if one.path.startswith(path)]

    def fault(self, path: str) -> Fault:
        with self.lock:
            return next(
                (left.pop(0) for start, left in self.faults.items() if path.startswith(start) and left), Fault()
            )

    def content(self, path: str) -> bytes | None:
        known = {f"/v2/x/blobs/{sha(one)}": one for one in (self.config, self.layer)}
        named = {f"/v2/x/manifests/{name}": self.manifest for name in ("latest", sha(self.manifest))}
        return {"/v2/": b"{}", **known, **named}.get(path)

    def admits(self, said: str) -> bool:
        """Whether a request of the repository shows what it must."""
        if self.wants == "Basic":
            return said == _basic(self.login or "")
        return self.wants is None or said.removeprefix("Bearer ") in self.tokens

    def token(self, one: Asked) -> bytes | None:
        """A new token. None: not for those."""
        user, _, word = (self.login or "").partition(":")
        form = {name: values[0] for name, values in parse_qs(one.body.decode()).items()}
        if user == "<token>":
            good = (form.get("grant_type"), form.get("refresh_token")) == ("refresh_token", word)
        else:
            good = self.login is None or one.headers.get("Authorization") == _basic(self.login)
        if not good:
            return None
        with self.lock:
            name = f"t{len(self.tokens)}"
            self.tokens.add(name)
        return json.dumps({"token": name}).encode()


def _part(kind: str, content: bytes) -> dict[str, object]:
    return {"mediaType": f"application/vnd.oci.image.{kind}", "size": len(content), "digest": sha(content)}


def sha(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _basic(login: str) -> str:
    return f"Basic {base64.b64encode(login.encode()).decode()}"


class _Handler(Handler):
    fake: FakeRegistry

    def respond(self) -> None:
        asked = Asked(self.path, time.monotonic(), self.command, dict(self.headers), self.body())
        self.fake.asked.append(asked)
        path = urlsplit(self.path).path
        headers = {"Content-Type": MANIFEST} if "/manifests/" in path else {}
        if path == "/token":
            content = self.fake.token(asked)
            status = 200 if content is not None else 401
        elif not self.fake.admits(self.headers.get("Authorization", "")):
            content, status = None, 401
            where = f'realm="http://{self.fake.host}/token",service="s",scope="repository:x:pull"'
            headers["WWW-Authenticate"] = f"{self.fake.wants} {where}"
        else:
            content = self.fake.content(path)
            status = 200 if content is not None else 404
        fault = self.fake.fault(path) if status != 401 else Fault()
        if fault.status != 200:
            content, status = b"", fault.status
            headers |= fault.headers()
        self._answer(status, headers, content or b"", fault)

    def _answer(self, status: int, headers: dict[str, str], content: bytes, fault: Fault) -> None:
        headers["Content-Length"] = str(len(content))
        self.answer(status, content if fault.cut is None else content[: fault.cut], headers)
        self.close_connection = fault.cut is not None


@contextmanager
def standing() -> Iterator[FakeRegistry]:
    """One that answers."""
    fake = FakeRegistry()
    handler = type("_Standing", (_Handler,), {"fake": fake})
    with served(handler) as fake.host:
        yield fake


@contextmanager
def registry_server(more: str = "") -> Iterator[str]:
    """`127.0.0.1:PORT` of Debian's registry server; `more`: of its configuration."""
    program = shutil.which("docker-registry")
    if program is None:
        missing("docker-registry (Debian: apt-get install docker-registry)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with short_folder() as folder:
        storage = f"{{filesystem: {{rootdirectory: {folder}/data}}}}"
        (folder / "config.yml").write_text(
            f"version: 0.1\nstorage: {storage}\nhttp: {{addr: '127.0.0.1:{port}'}}\n{more}"
        )
        command = (str(program), "serve", str(folder / "config.yml"))
        with serving(command, logfile=folder / "log", user=None, stop=signal.SIGTERM):
            eventually(lambda: _listens(port), "the registry to listen")
            yield f"127.0.0.1:{port}"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    with standing() as made:
        yield made


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    """A registry that wants no login."""
    with registry_server() as host:
        yield host
