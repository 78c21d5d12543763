"""Servers that an egress leads to, for tests: they say what reached them, and speak on demand."""

from __future__ import annotations

import datetime
import ipaddress
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.integration.http_server import Handler, running
from tests.integration.network_fixture import LONGEST_WAIT_S


class Server(ThreadingHTTPServer):
    """HTTP at this host's loopback; knows what it was asked and from how many connections. `host`: another of it."""

    request_queue_size = 64

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), _Handler)
        self.port: int = self.server_address[1]
        self.hosts: list[str] = []
        self.connections: set[object] = set()
        self.speak = threading.Semaphore(0)  # one word of a stream each
        self.written_bytes = 0  # of what never ends
        self.asked = threading.Event()
        self.left = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are what tests do."""


class _Handler(Handler):
    protocol_version = "HTTP/1.1"
    server: Server

    def handle(self) -> None:
        self.server.connections.add(self.client_address)
        super().handle()

    def respond(self) -> None:
        if self.command == "POST":
            self.answer(200, self.body())
            return
        self.server.hosts.append(self.headers["Host"])
        match self.path:
            case "/stream":
                self._stream()
            case "/thinks":
                self._thinks()
            case "/endless":
                self._endless()
            case _:
                self.answer(200, json.dumps({"path": self.path, "headers": dict(self.headers)}).encode())

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return super().body()
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for word in (b"one", b"two", b"three"):
            assert self.server.speak.acquire(timeout=LONGEST_WAIT_S)
            self.wfile.write(b"%x\r\ndata: %s\n\n\r\n" % (len(word) + 8, word))
        self.wfile.write(b"0\r\n\r\n")

    def _thinks(self) -> None:
        self.server.asked.set()
        self.connection.settimeout(LONGEST_WAIT_S)
        if self.connection.recv(1) == b"":
            self.server.left.set()
        self.close_connection = True

    def _endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(b"x" * (1 << 16))
            self.server.written_bytes += 1 << 16


@contextmanager
def serving(context: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> Iterator[Server]:
    server = Server(host)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with running(server):
        yield server


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


@dataclass
class Tcp:
    """A server without a protocol."""

    listener: socket.socket
    accepted: list[socket.socket] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(LONGEST_WAIT_S)
        self.accepted.append(connection)
        return connection


@contextmanager
def listening() -> Iterator[Tcp]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LONGEST_WAIT_S)
        server = Tcp(listener)
        try:
            yield server
        finally:
            for connection in server.accepted:
                connection.close()


def certified(folder: Path, name: str = "localhost") -> tuple[ssl.SSLContext, Path]:
    """What a server of that name speaks TLS with, and the certificate that whoever trusts it needs."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName(name), x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public, private = folder / f"{name}.pem", folder / f"{name}.key"
    public.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, private)
    return context, public
