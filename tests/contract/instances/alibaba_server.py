"""A server by hand that answers as ECS documents it: client tokens, release times, lists in pages, as far as asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PAGE = 4


@dataclass
class EcsMachine:
    """One machine, and how it was asked for."""

    id: str
    asked: dict[str, str]
    tags: dict[str, str]
    created: float = field(default_factory=time.time)
    status: str = "Pending"

    def shown(self) -> dict[str, Any]:
        """As DescribeInstances shows it."""
        tags = [{"TagKey": key, "TagValue": value} for key, value in self.tags.items()]
        created = datetime.fromtimestamp(self.created, UTC).strftime("%Y-%m-%dT%H:%MZ")
        return {"InstanceId": self.id, "Status": self.status, "CreationTime": created, "Tags": {"Tag": tags}}


class Refusal(Exception):
    """An error as ECS says it."""

    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code
        super().__init__(code)


@dataclass
class Ecs:
    """The account's machines. Faults: types that are `sold_out`, and `lose`: launches without an answer."""

    machines: dict[str, EcsMachine] = field(default_factory=dict)
    launches: list[dict[str, str]] = field(default_factory=list)
    sold_out: set[str] = field(default_factory=set)  # types
    lose: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    def answer(self, action: str, asked: dict[str, str]) -> dict[str, Any]:
        """Raises: Refusal."""
        with self.lock:
            for machine in self.machines.values():
                machine.status = "Running" if machine.status == "Pending" else machine.status
            known = {"RunInstances": self._run, "DescribeInstances": self._describe}
            return {"RequestId": "0", **known.get(action, self._delete)(asked)}

    def _run(self, asked: dict[str, str]) -> dict[str, Any]:
        self.launches.append(asked)
        if asked.get("InstanceType") in self.sold_out:
            raise Refusal(403, "OperationDenied.NoStock")
        if "AutoReleaseTime" in asked:
            end = datetime.strptime(asked["AutoReleaseTime"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
            if end < time.time() + 1800:
                raise Refusal(400, "InvalidAutoReleaseTime.Malformed")
        token = asked["ClientToken"]
        for machine in self.machines.values():
            if machine.asked["ClientToken"] == token:
                if machine.asked != asked:
                    raise Refusal(400, "IdempotentParameterMismatch")
                return {"InstanceIdSets": {"InstanceIdSet": [machine.id]}}
        tags = _numbered(asked, "Tag")
        made = EcsMachine(f"i-{len(self.launches):08x}", asked, {one["Key"]: one["Value"] for one in tags})
        self.machines[made.id] = made
        return {"InstanceIdSets": {"InstanceIdSet": [made.id]}}

    def _describe(self, asked: dict[str, str]) -> dict[str, Any]:
        wanted = _numbered(asked, "Tag")
        found = [m for m in self.machines.values() if all(m.tags.get(t["Key"]) == t["Value"] for t in wanted)]
        begin = int(asked.get("NextToken") or 0)
        following = begin + min(PAGE, int(asked["MaxResults"]))
        page = [machine.shown() for machine in reversed(found)][begin:following]  # the newest first
        return {"Instances": {"Instance": page}, "NextToken": str(following) if following < len(found) else ""}

    def _delete(self, asked: dict[str, str]) -> dict[str, Any]:
        ids = [value for name, value in asked.items() if name.startswith("InstanceId.")]
        if any(one not in self.machines for one in ids):
            raise Refusal(404, "InvalidInstanceId.NotFound")
        for one in ids:
            del self.machines[one]
        return {}


def _numbered(asked: dict[str, str], name: str) -> list[dict[str, str]]:
    """`Tag.1.Key`, `Tag.1.Value` …"""
    found: dict[str, dict[str, str]] = {}
    for full, value in asked.items():
        if full.startswith(f"{name}."):
            _, number, part = full.split(".")
            found.setdefault(number, {})[part] = value
    return list(found.values())


@contextmanager
def serving_ecs() -> Iterator[tuple[Ecs, str]]:
    """The account, and HOST:PORT of its API on loopback."""
    ecs = Ecs()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Says nothing."""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
            action = self.headers["x-acs-action"]
            try:
                status, said = 200, ecs.answer(action, asked)
            except Refusal as error:
                status, said = error.status, {"Code": error.code, "Message": "planted", "RequestId": "0"}
            if ecs.lose and action == "RunInstances" and status == 200:
                return  # the connection closes without an answer
            content = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield ecs, f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
