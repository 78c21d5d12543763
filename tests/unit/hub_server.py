"""A loopback server that answers as the hub's API does for datasets: revisions, trees, files with their headers."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class HubServer:
    """Datasets by id and commit; `requests` are those that came: `GET /api/datasets/…`."""

    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)  # id: commit: path: content
    names: dict[str, dict[str, str]] = field(default_factory=dict)  # id: branch or tag: commit
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def publish(self, dataset: str, files: dict[str, bytes], *names: str) -> str:
        """A new commit, also under these names; returns it."""
        content = json.dumps({path: hashlib.sha256(data).hexdigest() for path, data in sorted(files.items())})
        commit = hashlib.sha1(f"{dataset}{content}".encode()).hexdigest()
        self.commits.setdefault(dataset, {})[commit] = files
        self.names.setdefault(dataset, {}).update(dict.fromkeys(("main", *names), commit))
        return commit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *arguments: object) -> None:
        """Quiet."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "datasets"] and len(parts) >= 4:
            return self._about("/".join(parts[2:4]), parts[4:])
        if parts[:1] == ["datasets"] and parts[3:4] == ["resolve"]:
            return self._file("/".join(parts[1:3]), parts[4], "/".join(parts[5:]))
        return self._send(404, b"", "no such page")

    def _commit(self, dataset: str, revision: str) -> str | None:
        """The commit; None: an error was sent."""
        if dataset not in self.hub.commits:
            self._send(404, b"", "Repository not found", "RepoNotFound")
        elif dataset in self.hub.gated:
            self._send(403, b"", "Access to this dataset is restricted", "GatedRepo")
        elif revision in self.hub.commits[dataset]:
            return revision
        elif revision in self.hub.names[dataset]:
            return self.hub.names[dataset][revision]
        else:
            self._send(404, b"", f"Invalid rev id: {revision}", "RevisionNotFound")
        return None

    def _about(self, dataset: str, rest: list[str]) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        if (commit := self._commit(dataset, revision)) is None:
            return
        files = self.hub.commits[dataset][commit]
        if rest[:1] == ["tree"]:
            found: object = [
                {"type": "file", "oid": _etag(data), "size": len(data), "path": path} for path, data in files.items()
            ]
        else:
            found = {"id": dataset, "sha": commit, "siblings": [{"rfilename": path} for path in files]}
        self._send(200, json.dumps(found).encode(), kind="application/json")

    def _file(self, dataset: str, revision: str, path: str) -> None:
        if (commit := self._commit(dataset, revision)) is None:
            return
        data = self.hub.commits[dataset][commit].get(path)
        if data is None:
            self._send(404, b"", "Entry not found", "EntryNotFound")
            return
        self._send(200, data, commit=commit)

    def _send(
        self, status: int, body: bytes, message: str = "", code: str = "", *, kind: str = "text/plain", commit: str = ""
    ) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(body)), "Content-Type": kind, "X-Error-Code": code}
        headers |= {"X-Error-Message": message, "X-Repo-Commit": commit, "ETag": f'"{_etag(body)}"' if commit else ""}
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """One on a port of its own."""
    hub = HubServer()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
