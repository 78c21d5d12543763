"""`allowlist`: the proxy inside reaches the allowed hosts, says no to the others, and counts both."""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.environments.networks import PROXY_PORT, Egress, addresses, allowlist, http_proxy, open_egress
from app.models.spec import EnvironmentSpec, Network
from tests.integration.egress_servers import Server, certified, listening, serving
from tests.integration.network_fixture import LONGEST_WAIT_S, Place, everything, forward_threads, leaves_nothing, place
from tests.waiting import eventually

__all__ = ["leaves_nothing", "place"]


Open = Callable[..., Egress]


@pytest.fixture
def allow(place: Place) -> Iterator[Open]:
    """Opens the egress of a task with these allowed hosts."""
    made: list[Egress] = []

    def opened(*hosts: str) -> Egress:
        spec = EnvironmentSpec(image="any", network=Network.ALLOWLIST, allowed_hosts=hosts)
        found = open_egress(spec, place.forward)
        assert found is not None
        made.append(found)
        return found

    yield opened
    for egress in made:
        egress.close()


def get(place: Place, url: str, method: str = "GET") -> tuple[http.client.HTTPResponse, bytes]:
    """A request of a URL, as clients ask a proxy."""
    with closing(http.client.HTTPConnection("127.0.0.1", PROXY_PORT, timeout=LONGEST_WAIT_S)) as made:
        made.sock = place.connect(PROXY_PORT)
        made.request(method, url)
        answer = made.getresponse()
        return answer, answer.read()


def say(place: Place, text: bytes) -> tuple[int, str, dict[str, Any]]:
    """Status, its line and the error of an answer to raw bytes."""
    with place.connect(PROXY_PORT) as connection:
        connection.sendall(text)
        head, _, body = everything(connection).partition(b"\r\n\r\n")
        line = head.split(b"\r\n")[0].decode()
        return int(line.split()[1]), line, json.loads(body)["error"]


def counts(egress: Egress, name: str) -> dict[str, int]:
    return dict(egress.describe()["hosts"].get(name, {}))


def test_an_allowed_host_answers_a_plain_request(place: Place, server: Server, allow: Open) -> None:
    egress = allow(f"localhost:{server.port}")
    answer, body = get(place, f"http://LOCALHOST.:{server.port}/simple/pip/?a=1")
    assert answer.status == 200
    found = json.loads(body)
    assert found["path"] == "/simple/pip/?a=1"
    assert found["headers"]["Host"] == f"localhost:{server.port}"
    name = f"localhost:{server.port}"
    eventually(lambda: counts(egress, name) == {"connections": 1})
    assert egress.describe()["allowed_hosts"] == [name]


def test_the_clients_own_words_to_the_proxy_stay_with_it(place: Place, server: Server, allow: Open) -> None:
    allow(f"localhost:{server.port}")
    with place.connect(PROXY_PORT) as connection:
        connection.sendall(
            b"GET http://localhost:%d/ HTTP/1.1\r\nHost: elsewhere\r\nProxy-Authorization: secret\r\n"
            b"Connection: X-Own, close\r\nX-Own: 1\r\nX-Kept: 1\r\n\r\n" % server.port
        )
        _, _, body = everything(connection).partition(b"\r\n\r\n")
    headers = json.loads(body)["headers"]
    assert headers["X-Kept"] == "1"
    assert not {"X-Own", "Proxy-Authorization", "Connection"} & set(headers)
    assert headers["Host"] == f"localhost:{server.port}"


def test_a_tunnel_carries_tls_that_ends_at_the_server(place: Place, allow: Open, tmp_path: Path) -> None:
    context, certificate = certified(tmp_path)
    with serving(context) as server:
        egress = allow(f"localhost:{server.port}")
        made = http.client.HTTPSConnection(
            "127.0.0.1", PROXY_PORT, timeout=LONGEST_WAIT_S, context=ssl.create_default_context(cafile=str(certificate))
        )
        made._create_connection = lambda *_: place.connect(PROXY_PORT)  # type: ignore[attr-defined]
        made.set_tunnel("localhost", server.port)
        with closing(made):
            made.request("GET", "/wheel")
            assert json.load(made.getresponse())["path"] == "/wheel"
        assert counts(egress, f"localhost:{server.port}") == {"connections": 1}


def test_a_refused_host_is_told_what_to_do_in_the_line_that_clients_show(place: Place, allow: Open) -> None:
    egress = allow("index.test", "*.example.org")
    for text in (
        b"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"GET http://evil.test:443/ HTTP/1.1\r\nHost: index.test\r\n\r\n",
        b"POST http://evil.test:443/ HTTP/1.1\r\nHost: index.test\r\nContent-Length: 3\r\n\r\nabc",
    ):
        status, line, error = say(place, text)
        assert status == 403
        assert "evil.test:443 is not among the task's allowed_hosts (index.test, *.example.org)" in line
        assert error["message"] in line
        assert error["allowed_hosts"] == ["index.test", "*.example.org"]
    assert egress.describe()["hosts"] == {"evil.test:443": {"refused": 3}}


def test_an_allowed_host_is_refused_on_other_ports(place: Place, server: Server, allow: Open) -> None:
    allow("localhost", f"localhost:{server.port}")
    status, _, _ = say(place, b"CONNECT localhost:22 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status == 403
    assert get(place, f"http://localhost:{server.port}/")[0].status == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7", "169.254.169.254", "::1", "64:ff9b::a9fe:a9fe"])
def test_a_name_that_is_made_to_point_inwards_is_refused(
    place: Place, allow: Open, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    egress = allow("index.test")
    monkeypatch.setattr(addresses, "resolve", lambda host, port: [ipaddress.ip_address(address)])
    for text in (
        b"CONNECT index.test:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://index.test/ HTTP/1.1\r\nHost: x\r\n\r\n",
    ):
        status, _, error = say(place, text)
        assert status == 403
        assert f"index.test is at {address}, which is not a public one" in error["message"]
    assert egress.describe()["hosts"] == {"index.test:443": {"refused": 1}, "index.test:80": {"refused": 1}}


def test_an_allowed_name_at_an_address_that_is_listed_itself_is_reached(
    place: Place, server: Server, allow: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(f"mirror.internal:{server.port}", f"127.0.0.1:{server.port}")
    monkeypatch.setattr(addresses, "resolve", lambda host, port: [ipaddress.ip_address("127.0.0.1")])
    assert get(place, f"http://mirror.internal:{server.port}/")[0].status == 200
    assert server.hosts == [f"mirror.internal:{server.port}"]


def test_an_allowed_host_that_does_not_answer_is_told_apart(place: Place, allow: Open) -> None:
    with listening() as nobody:
        port = nobody.port
    egress = allow(f"localhost:{port}")
    for text in (
        b"CONNECT localhost:%d HTTP/1.1\r\nHost: x\r\n\r\n" % port,
        b"GET http://localhost:%d/ HTTP/1.1\r\nHost: x\r\n\r\n" % port,
    ):
        status, _, error = say(place, text)
        assert status == 502
        assert "refused" in error["message"]
    assert counts(egress, f"localhost:{port}") == {"failed": 2}


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: index.test\r\n\r\n", 400),
        (b"GET https://index.test/ HTTP/1.1\r\nHost: index.test\r\n\r\n", 400),
        (b"GET http://user@index.test/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT index.test HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT 0x7f000001:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT evil.test#.index.test:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"\x16\x03\x01 this is TLS\r\n\r\n", 400),
        (b"GET http://index.test/ HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", 431),
    ],
)
def test_what_no_proxy_can_serve_gets_an_answer_and_nothing_else(
    place: Place, allow: Open, text: bytes, status: int
) -> None:
    allow("index.test", "*.index.test")
    assert say(place, text)[0] == status


@pytest.fixture
def tunnel(place: Place, allow: Open, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of an open tunnel, with a short limit of idleness: the client's and the server's."""
    monkeypatch.setattr(allowlist, "IDLE_S", 0.2)
    with listening() as server:
        allow(f"localhost:{server.port}")
        with place.connect(PROXY_PORT) as connection:
            connection.sendall(b"CONNECT localhost:%d HTTP/1.1\r\nHost: x\r\n\r\n" % server.port)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
            yield connection, server.accept()


def test_an_idle_tunnel_is_ended(tunnel: tuple[socket.socket, socket.socket]) -> None:
    connection, far = tunnel
    begun = time.monotonic()
    assert connection.recv(1) == b""
    assert time.monotonic() - begun >= 0.1
    assert far.recv(1) == b""


def test_a_tunnel_whose_client_does_not_read_is_ended(tunnel: tuple[socket.socket, socket.socket]) -> None:
    _, far = tunnel
    far.settimeout(20)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        far.sendall(b"x" * (64 << 20))


def test_a_request_that_trickles_is_ended(place: Place, allow: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_proxy, "HEADERS_S", 0.3)
    allow("index.test")
    with place.connect(PROXY_PORT) as connection:
        connection.sendall(b"GET http://index.test/ HTTP/1.1\r\nX-Slow: ")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            _trickle(connection)
        eventually(lambda: forward_threads() == ["forward-accept"])


def test_a_list_of_all_hosts_is_refused_before_anything_is_made() -> None:
    with pytest.raises(ValidationError, match="network `open`"):
        EnvironmentSpec(image="any", network=Network.ALLOWLIST, allowed_hosts=("*",))


def _trickle(connection: socket.socket) -> None:
    for _ in range(100):
        connection.sendall(b"x")
        time.sleep(0.02)


def test_made_up_names_do_not_fill_our_memory(place: Place, allow: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.environments.networks.egress._MOST_HOSTS", 3)
    egress = allow("index.test")
    for number in range(6):
        say(place, b"CONNECT host%d.test:443 HTTP/1.1\r\nHost: x\r\n\r\n" % number)
    hosts = egress.describe()["hosts"]
    assert len(hosts) == 4
    assert hosts["(others)"] == {"refused": 3}
