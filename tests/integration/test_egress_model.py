"""`model-only`: the model's endpoint at a port inside, from networks that have nothing else."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app.environments.networks import MODEL_PORT, Egress, http_proxy, model_port
from tests.integration.egress_servers import Server, certified, listening, serving
from tests.integration.network_fixture import (
    LONGEST_WAIT_S,
    Place,
    eventually,
    forward_threads,
    leaves_nothing,
    place,
)

__all__ = ["leaves_nothing", "place"]


class Inside:
    """A place whose model is at `url`."""

    def __init__(self, place: Place, url: str) -> None:
        self._place = place
        self.url, self.egress = model_port.open_model_egress(place.forward, url)

    def connect(self) -> socket.socket:
        return self._place.connect(MODEL_PORT)

    def http(self) -> http.client.HTTPConnection:
        made = http.client.HTTPConnection("127.0.0.1", MODEL_PORT, timeout=LONGEST_WAIT_S)
        made.sock = self.connect()
        return made

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        with closing(self.http()) as made:
            made.request("GET", path)
            answer = made.getresponse()
            return answer.status, json.load(answer)


@pytest.fixture(params=["plain", "tls"])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """One without and one with TLS, trusted as a host is told to."""
    context = None
    if request.param == "tls":
        context, certificate = certified(tmp_path)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    model_port._verifying.cache_clear()
    with serving(context) as made:
        yield made
    model_port._verifying.cache_clear()


@pytest.fixture
def inside(server: Server, place: Place) -> Iterator[Inside]:
    scheme = "https" if isinstance(server.socket, ssl.SSLSocket) else "http"
    made = Inside(place, f"{scheme}://localhost:{server.port}/v1")
    yield made
    made.egress.close()


def counts(egress: Egress) -> dict[str, int]:
    (found,) = egress.describe()["hosts"].values()
    return dict(found)


def test_the_model_answers_under_its_path_and_everything_is_counted(inside: Inside, server: Server) -> None:
    assert inside.url == f"http://127.0.0.1:{MODEL_PORT}/v1"
    with closing(inside.http()) as connection:
        for _ in range(3):
            connection.request("GET", "/v1/models")
            answer = json.load(connection.getresponse())
            assert answer["path"] == "/v1/models"
    assert len(server.connections) == 1
    eventually(lambda: counts(inside.egress) == {"connections": 1})
    about = inside.egress.describe()
    assert about["policy"] == "model-only"
    assert about["target"] == f"localhost:{server.port}"


def test_a_server_with_tls_hears_its_own_name(inside: Inside, server: Server) -> None:
    inside.get("/")
    named = isinstance(server.socket, ssl.SSLSocket)
    assert server.hosts == [f"localhost:{server.port}" if named else f"127.0.0.1:{MODEL_PORT}"]


@pytest.mark.parametrize("line", ["GET http://elsewhere.example/x HTTP/1.1", "CONNECT elsewhere.example:22 HTTP/1.1"])
def test_a_model_that_is_known_by_name_is_asked_for_nothing_but_its_paths(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    context, certificate = certified(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    model_port._verifying.cache_clear()
    with serving(context) as server:
        inside = Inside(place, f"https://localhost:{server.port}/v1")
        with closing(inside.connect()) as connection:
            connection.sendall(f"{line}\r\nHost: elsewhere.example\r\n\r\n".encode())
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
        inside.egress.close()
        assert server.hosts == []
    model_port._verifying.cache_clear()


def test_an_answer_comes_word_by_word(inside: Inside, server: Server) -> None:
    with closing(inside.http()) as connection:
        connection.request("GET", "/stream")
        answer = connection.getresponse()
        for word in (b"one", b"two", b"three"):
            server.speak.release()
            assert answer.readline() == b"data: " + word + b"\n"
            assert answer.readline() == b"\n"
        assert answer.read() == b""


def test_the_model_hears_when_its_client_goes_away(inside: Inside, server: Server) -> None:
    with inside.connect() as connection:
        connection.sendall(b"GET /thinks HTTP/1.1\r\nHost: x\r\n\r\n")
        assert server.asked.wait(LONGEST_WAIT_S)
    assert server.left.wait(LONGEST_WAIT_S)
    eventually(lambda: forward_threads() == ["forward-accept"])


def test_closing_does_not_wait_for_a_model_that_thinks(inside: Inside, server: Server) -> None:
    with inside.connect() as connection:
        connection.sendall(b"GET /thinks HTTP/1.1\r\nHost: x\r\n\r\n")
        assert server.asked.wait(LONGEST_WAIT_S)
        inside.egress.close()
        assert server.left.wait(LONGEST_WAIT_S)


def test_a_model_may_think_for_longer_than_it_takes_to_ask_it(
    inside: Inside, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_proxy, "SEND_S", 0.2)
    with closing(inside.http()) as connection:
        connection.request("GET", "/stream")
        time.sleep(0.5)
        for _ in range(3):
            server.speak.release()
        assert connection.getresponse().read().count(b"data") == 3


def test_an_unreachable_model_is_said_by_its_policy(place: Place) -> None:
    with listening() as nobody:
        port = nobody.port
    for scheme in ("http", "https"):
        inside = Inside(place, f"{scheme}://127.0.0.1:{port}/v1")
        status, body = inside.get("/v1/models")
        message = body["error"]
        assert (status, message["policy"], message["host"]) == (502, "model-only", f"127.0.0.1:{port}")
        assert "refused" in message["message"]
        assert counts(inside.egress)["failed"] == 1
        inside.egress.close()


def test_a_model_whose_certificate_nobody_vouches_for_is_not_spoken_to(place: Place, tmp_path: Path) -> None:
    context, _ = certified(tmp_path)
    model_port._verifying.cache_clear()
    with serving(context) as server:
        inside = Inside(place, f"https://localhost:{server.port}")
        status, body = inside.get("/")
        assert status == 502
        assert "certificate verify failed" in body["error"]["message"]
        assert server.hosts == []
        inside.egress.close()


def test_a_slow_reader_takes_little_of_our_memory(inside: Inside, server: Server) -> None:
    with inside.connect() as connection:
        connection.sendall(b"GET /endless HTTP/1.0\r\nHost: x\r\n\r\n")
        last = -1
        while server.written_bytes != last:  # until nothing moves any more: the kernel's buffers and ours are full
            last = server.written_bytes
            assert last < 32 << 20
            time.sleep(0.3)
        assert last > 0
