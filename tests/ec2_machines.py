"""What moto leaves out: machines that run, events of their ends, and a cloud that refuses or loses its answers.

`Machines` starts a local process for each running machine, by the last command of its user data, and powers the machine
off when that has ended. `FaultyCloud` stands between a client and moto.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs
from urllib.request import Request, urlopen

import boto3

from app.instances.cloud import INSTANCE_TAG
from app.instances.ec2.provider import STATES

REGION = "us-east-1"
_LOOK_S = 0.3

Boot = Callable[[Sequence[str], str], "subprocess.Popen[bytes]"]
"""Starts what a machine runs, in a session of its own: the words after `docker run … IMAGE`, the machine's id."""


def client(service: str, endpoint: str) -> Any:
    """A client that does what an account's owner would do by hand."""
    return boto3.client(
        service, endpoint_url=endpoint, region_name=REGION, aws_access_key_id="an", aws_secret_access_key="owner"
    )


class Account:
    """What an owner of the account sees and does."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.ec2, self.events = client("ec2", endpoint), client("events", endpoint)

    def machines(self, *states: str, **tags: str) -> list[Any]:
        """Every machine in these states, as EC2 describes it."""
        wanted = {
            **({"instance-state-name": list(states)} if states else {}),
            **{f"tag:{n}": [v] for n, v in tags.items()},
        }
        filters = [{"Name": name, "Values": values} for name, values in wanted.items()]
        pages = self.ec2.get_paginator("describe_instances").paginate(Filters=filters)
        return [machine for page in pages for group in page["Reservations"] for machine in group["Instances"]]

    def standing(self, **tags: str) -> list[Any]:
        """Machines that cost money now."""
        return self.machines("pending", "running", "stopping", "stopped", **tags)

    def user_data(self, handle: str) -> str:
        """The script of its first boot."""
        found = self.ec2.describe_instance_attribute(InstanceId=handle, Attribute="userData")
        return base64.b64decode(found["UserData"]["Value"]).decode()

    def tell(self, kind: str, handle: str, **detail: str) -> None:
        """Put an event, as EC2 does itself on the real thing."""
        entry = {"Source": "aws.ec2", "DetailType": kind, "Detail": json.dumps({"instance-id": handle, **detail})}
        assert self.events.put_events(Entries=[entry])["FailedEntryCount"] == 0


class Machines(Account):
    """Looks at all machines again and again; `started` counts processes by instance."""

    def __init__(self, endpoint: str, image: str, boot: Boot) -> None:
        super().__init__(endpoint)
        self._image, self._boot = image, boot
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.started: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machines")
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for process in self._running.values():
            _end(process)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            with suppress(OSError):
                self._look()

    def _look(self) -> None:
        standing = {machine["InstanceId"]: machine for machine in self.standing()}
        for handle, machine in standing.items():
            if machine["State"]["Name"] == "running" and handle not in self._running:
                tags = {tag["Key"]: tag["Value"] for tag in machine["Tags"]}
                self.started[tags[INSTANCE_TAG]] += 1
                words = shlex.split(self.user_data(handle).splitlines()[-1])
                self._running[handle] = self._boot(words[words.index(self._image) + 1 :], handle)
        for handle, process in list(self._running.items()):
            if handle not in standing or process.poll() is not None:
                _end(process)  # what is left of it goes with its machine
                del self._running[handle]
                self.ec2.terminate_instances(InstanceIds=[handle])
                self.tell(STATES, handle, state="shutting-down")


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def machines(endpoint: str, image: str, boot: Boot) -> Iterator[Machines]:
    """For the block, machines run. Their processes are ended with it."""
    found = Machines(endpoint, image, boot)
    try:
        yield found
    finally:
        found.close()


@dataclass
class CloudFault:
    """code, status: the answer to `action`; none: it is carried out and its answer is lost. times: how often."""

    action: str  # "" for all
    code: str = ""
    status: int = 0
    times: int = 1 << 30


@dataclass
class FaultyCloud:
    """A relay to moto, at `endpoint`; `faults` are struck in their order, and counted."""

    endpoint: str
    faults: list[CloudFault] = field(default_factory=list)
    struck: list[tuple[float, str]] = field(default_factory=list)  # unix seconds, what
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def strike(self, action: str) -> CloudFault | None:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and fault.action in ("", action):
                    fault.times -= 1
                    self.struck.append((time.time(), f"{action}: {fault.code or 'reply lost'}"))
                    return fault
        return None


@contextmanager
def faulty_cloud(target: str) -> Iterator[FaultyCloud]:
    """For the block, moto at `target` is reached through a relay that can refuse and lose answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Says nothing."""

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            action = parse_qs(body.decode(errors="replace")).get("Action", [""])[0]
            fault = cloud.strike(action) if action else None
            if fault is not None and fault.code:
                error = f"<Error><Code>{fault.code}</Code><Message>planted</Message></Error>"
                self._answer(fault.status, f"<Response><Errors>{error}</Errors></Response>".encode(), "text/xml")
                return
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            status, content, kind = _passed_on(f"{target}{self.path}", body, headers)
            if fault is None:
                self._answer(status, content, kind)
            else:
                self.close_connection = True

        def _answer(self, status: int, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that has gone
    cloud = FaultyCloud(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield cloud
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _passed_on(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, str]:
    try:
        with urlopen(Request(url, body, headers), timeout=60) as reply:
            return reply.status, reply.read(), reply.headers.get("Content-Type", "")
    except HTTPError as error:
        return error.code, error.read(), error.headers.get("Content-Type", "")
