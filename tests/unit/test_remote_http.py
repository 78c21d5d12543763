"""The client's side of HTTP, against servers that break off, lie and speak of others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from uuid import uuid4

import pytest

from app import errors
from app.errors import MegaFlowError, NotSignedIn, OptionInvalid, ServerUnavailable, StackNotRunning, TooManyRequests
from app.ledger.stream import StreamedEvent
from app.remote import RemoteInstallation
from app.remote_http import Ask, WebServer, refusal

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = (
    b'{"position": "%d", "id": %d, "at": "2026-01-02T03:04:05+00:00", "kind": "run.paused", "run_id": null,'
    b' "task_id": null, "attempt_id": null, "instance_id": null, "data": {}}'
)


def _event(number: int) -> bytes:
    block = b"id: %d\nevent: run.paused\ndata: %b\n\n" % (number, BODY % (number, number))
    return b"%x\r\n%b\r\n" % (len(block), block)


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[WebServer, list[bytes]]]:
    """A server that gives these answers, one for each connection, the last one to all that follow."""
    requests: list[bytes] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    requests.append(connection.recv(1 << 16))
                    connection.sendall(answers[min(len(requests), len(answers)) - 1])

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield WebServer(f"http://127.0.0.1:{listener.getsockname()[1]}", "token", 5.0), requests
        listener.shutdown(socket.SHUT_RDWR)


def _events(server: WebServer, patience_s: float) -> list[StreamedEvent]:
    installation = RemoteInstallation(server.url, "token", patience_s=patience_s)
    nothing = {"kinds": (), "run_id": None, "task_id": None, "stop": threading.Event(), "outage": None}
    return list(installation.events("start", follow=False, **nothing))  # type: ignore[arg-type]


def _json(status: bytes, content: bytes) -> bytes:
    return b"HTTP/1.1 %b X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(content), content)


def test_a_stream_that_breaks_off_goes_on_after_its_last_whole_event() -> None:
    torn = HEAD + _event(1) + _event(2)[:40]
    with answering(torn, HEAD + _event(2) + _event(3) + b"0\r\n\r\n") as (server, requests):
        found = _events(server, 20)
    assert [(one.position, one.event.id) for one in found] == [("1", 1), ("2", 2), ("3", 3)]
    assert b"Last-Event-ID: 1\r\n" in requests[1]
    assert b"after=start" in requests[0]


@pytest.mark.parametrize("data", [b"{", b"[1]", b'{"id": 1}', b'{"position": "1"}'])
def test_a_malformed_event_is_the_servers_fault(data: bytes) -> None:
    block = b"data: %b\n\n" % data
    answer = HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(block), block)
    with answering(answer) as (server, _), pytest.raises(ServerUnavailable, match="of this release"):
        _events(server, 0)


def test_waiting_asks_no_longer_than_its_timeout() -> None:
    with answering(_json(b"502", b"<html>")) as (server, _):
        begun = time.monotonic()
        with pytest.raises(ServerUnavailable):
            list(RemoteInstallation(server.url, "token", patience_s=60).completions({uuid4()}, 0.1))
    assert time.monotonic() - begun < 3


def test_what_passes_is_asked_again_and_what_does_not_is_raised() -> None:
    busy = _json(b"429", b'{"error": {"type": "TooManyRequests", "message": "wait"}}')
    with answering(busy, _json(b"502", b"<html>"), b"", _json(b"200", b'{"a": 1}')) as (server, requests):
        assert server.json(Ask("GET", "/x")) == {"a": 1}
        assert len(requests) == 4
    with answering(busy, _json(b"502", b"<html>"), _json(b"200", b"{}")) as (server, requests):
        with pytest.raises(ServerUnavailable, match="HTTP 502"):
            server.json(Ask("POST", "/x", body={}))  # may have been done: it is not asked again
        assert len(requests) == 2
    full = _json(b"429", b'{"error": {"type": "QuotaExceeded", "message": "no"}}')
    with answering(full, _json(b"200", b"{}")) as (server, requests):
        with pytest.raises(errors.QuotaExceeded):
            server.json(Ask("POST", "/x", body={}, again=True))
        assert len(requests) == 1


def test_another_programs_answer_is_no_answer() -> None:
    for content in (b"hi", b"[]", b'"x"'):
        with (
            answering(_json(b"200", content)) as (server, _),
            pytest.raises(ServerUnavailable, match="of this release"),
        ):
            server.json(Ask("GET", "/x"))


def test_a_redirection_is_not_followed() -> None:
    with answering(_json(b"200", b"{}")) as (other, asked):
        moved = b"HTTP/1.1 307 X\r\nLocation: %b/x\r\nContent-Length: 0\r\n\r\n" % other.url.encode()
        with answering(moved) as (server, _), pytest.raises(MegaFlowError, match="HTTP 307"):
            server.json(Ask("GET", "/x"))
        assert asked == []


def test_every_error_comes_back_as_its_class() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, MegaFlowError)]
    assert len(kinds) > 50
    for kind in kinds:
        found = refusal(422, b'{"error": {"type": "%b", "message": "why"}}' % kind.__name__.encode(), "http://x")
        expected = ServerUnavailable if kind is errors.DatabaseUnavailable else kind
        assert (type(found), str(found)) == (expected, "why")
    for strange in ("SystemExit", "did_you_mean", "Nothing", "__builtins__"):
        found = refusal(422, b'{"error": {"type": "%b", "message": "why"}}' % strange.encode(), "http://x")
        assert (type(found), str(found)) == (MegaFlowError, "why")
    assert isinstance(refusal(503, b"[]", "http://x"), ServerUnavailable)
    assert issubclass(TooManyRequests, MegaFlowError)
    assert issubclass(OptionInvalid, errors.SpecInvalid)


@pytest.mark.parametrize("token", ["", "a b\r\nX: y", "tök", "\n"])
def test_a_token_that_could_be_none_is_refused_before_it_is_sent(token: str) -> None:
    with pytest.raises(NotSignedIn):
        WebServer("http://127.0.0.1:1", token, 1.0)


def test_a_name_that_nobody_has_is_said_at_once() -> None:
    name = "a" * 64  # longer than a name can be: no server is asked for it
    with pytest.raises(StackNotRunning, match=name):
        WebServer(f"http://{name}", "token", 60.0).json(Ask("GET", "/x"))
