"""A small registry of one image that is busy, cuts off or wants a login, as it is told."""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import tarfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from app.host import kernel

CONTENT = b"what the image has in it\n" * 130_000
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


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
class Stand:
    """`faults`, one for each request, by what its path begins with: `/token`, `/v2/x/manifests`, `/v2/x/blobs`."""

    host: str = ""
    login: str | None = None  # USER:PASSWORD, or `<token>:` and an identity token
    wants: str | None = None  # the scheme of its challenge
    faults: dict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    asked: list[Asked] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            member = tarfile.TarInfo("file")
            member.size = len(CONTENT)
            tar.addfile(member, io.BytesIO(CONTENT))
        self.layer = packed.getvalue()
        config = {"architecture": kernel.machine(), "os": "linux"}
        self.config = json.dumps({**config, "rootfs": {"type": "layers", "diff_ids": [sha(self.layer)]}}).encode()
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "config": _described("application/vnd.oci.image.config.v1+json", self.config),
                "layers": [_described("application/vnd.oci.image.layer.v1.tar", self.layer)],
            }
        ).encode()

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
        known = {f"/v2/x/blobs/{sha(one)}": one for one in (self.config, self.layer)} | {"/v2/": b"{}"}
        return {**known, "/v2/x/manifests/latest": self.manifest}.get(path)

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


def sha(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _described(kind: str, data: bytes) -> dict[str, object]:
    return {"mediaType": kind, "digest": sha(data), "size": len(data)}


def _basic(login: str) -> str:
    return f"Basic {base64.b64encode(login.encode()).decode()}"


class _Handler(http.server.BaseHTTPRequestHandler):
    stand: Stand

    def do_GET(self) -> None:
        asked = Asked(self.path, time.monotonic(), self.command, dict(self.headers), self._body())
        self.stand.asked.append(asked)
        path = urlsplit(self.path).path
        headers: dict[str, str] = {}
        if path == "/token":
            content = self.stand.token(asked)
            status = 200 if content is not None else 401
        elif not self.stand.admits(self.headers.get("Authorization", "")):
            content, status = None, 401
            where = f'realm="http://{self.stand.host}/token",service="s",scope="repository:x:pull"'
            headers["WWW-Authenticate"] = f"{self.stand.wants} {where}"
        else:
            content = self.stand.content(path)
            status = 200 if content is not None else 404
        if "/manifests/" in path:
            headers["Content-Type"] = MANIFEST_TYPE
        fault = self.stand.fault(path) if status != 401 else Fault()
        if fault.status != 200:
            content, status = b"", fault.status
            headers |= fault.headers()
        self._answer(status, headers, content or b"", fault)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size + 2)[:size])
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, headers: dict[str, str], content: bytes, fault: Fault) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content if fault.cut is None else content[: fault.cut])
        self.close_connection = fault.cut is not None

    def log_message(self, *_: object) -> None: ...


@contextmanager
def standing() -> Iterator[Stand]:
    """One that answers."""
    stand = Stand()
    handler = type("_Standing", (_Handler,), {"stand": stand})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        stand.host = f"127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield stand
        finally:
            server.shutdown()
            thread.join()
