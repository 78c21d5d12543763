"""Helpers of real sessions for tests: as the init of a pid namespace, or beside other processes of this host."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.environments.session.client import SessionClient
from app.environments.session.connection import unix_connector

NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def may_unshare() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    )


class Fixture:
    """A running helper. `client` may be taken as often as wanted."""

    def __init__(self, program: Path, folder: Path, *, as_init: bool, orphan_exit_s: float = 60) -> None:
        self.socket = folder / "s"
        self._as_init = as_init
        prefix = NAMESPACE if as_init else []
        command = [*prefix, str(program), "--listen", str(self.socket), "--orphan-exit", str(orphan_exit_s)]
        self.process = subprocess.Popen(command)
        self.clients: list[SessionClient] = []

    def client(self, **options: str) -> SessionClient:
        made = SessionClient(unix_connector(self.socket), label="test", **options)
        made.wait_ready(10)
        self.clients.append(made)
        return made

    def end(self) -> None:
        for client in self.clients:
            client.close()
        if self._as_init:
            self.process.kill()  # it takes the namespace with it, and would not hear SIGTERM
        else:
            self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def fixture(program: Path, *, as_init: bool, orphan_exit_s: float = 60) -> Iterator[Fixture]:
    with tempfile.TemporaryDirectory() as folder:
        made = Fixture(program, Path(folder), as_init=as_init, orphan_exit_s=orphan_exit_s)
        try:
            yield made
        finally:
            made.end()


@contextmanager
def over_stdio(argv: list[str]) -> Iterator[SessionClient]:
    """Every lane is a process of its own that speaks over its standard input and output, here a socket."""
    processes: list[subprocess.Popen[bytes]] = []

    def connect() -> socket.socket:
        ours, theirs = socket.socketpair()
        processes.append(subprocess.Popen(argv, stdin=theirs, stdout=theirs))
        theirs.close()
        return ours

    client = SessionClient(connect, label="test")
    try:
        yield client
    finally:
        client.close()
        for process in processes:
            process.wait(10)
