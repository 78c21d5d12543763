"""Moto's server of Amazon's APIs, on loopback, and hooks that break a client's calls on their way to it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ReadTimeoutError
from botocore.httpsession import URLLib3Session

from tests.services import free_port
from tests.waiting import eventually

Send = Callable[..., AWSResponse | None]
"""A handler of botocore's `before-send`: an answer in place of the server's, or None."""


@contextmanager
def serving_http(command: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """A server on loopback, from its first answer on; its URL."""
    endpoint = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        eventually(lambda: server.poll() is not None or _answers(endpoint), within_s=90)
        assert server.poll() is None, log.read_text()[-2000:]
        yield endpoint
    finally:
        server.kill()
        server.wait()


def serving_moto(log: Path) -> AbstractContextManager[str]:
    """The server's URL. What it has is gone with it."""
    port = free_port()
    return serving_http([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port, log)


def _answers(endpoint: str) -> bool:
    try:
        urlopen(endpoint, timeout=1).close()
    except HTTPError:
        return True
    except OSError:
        return False
    return True


def told(endpoint: str, verb: str, **values: Any) -> None:
    """Moto's own verbs: `reset` forgets everything that was made."""
    body, headers = json.dumps(values).encode(), {"Content-Type": "application/json"}
    urlopen(Request(f"{endpoint}/moto-api/{verb}", body, headers), timeout=10).close()


def some_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that are nobody's, and none of the caller's own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


class _Raw(io.BytesIO):
    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self.read()


def refusing(code: str, status: int) -> Send:
    """Answers with an error of EC2, and lets nothing through."""

    def send(request: Any, **_: Any) -> AWSResponse:
        body = (
            f"<Response><Errors><Error><Code>{code}</Code><Message>planted</Message></Error></Errors>"
            "<RequestID>0</RequestID></Response>"
        )
        return AWSResponse(request.url, status, {}, _Raw(body.encode()))

    return send


def losing_reply(request: Any, **_: Any) -> None:
    """Carries the request out, and loses the answer."""
    URLLib3Session().send(request)
    raise ReadTimeoutError(endpoint_url=request.url)
