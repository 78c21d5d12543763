"""A web server on a real port, clients of it, and a connection that loses answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from urllib.request import urlopen

import pytest
import uvicorn

from app.client import MegaFlow
from app.ledger import users
from app.ledger.database import Database
from app.ledger.users import Scope
from app.model_service.serving import bounded
from app.settings import Settings
from app.web.server import application
from tests.services import free_port
from tests.waiting import eventually

NOWHERE = "postgresql://absent@127.0.0.1:1/absent"
"""No server listens there: what connects to it fails."""


class Site:
    """The server of a ledger."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.settings, self.database, self.port = settings, database, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._server: uvicorn.Server | None = None

    def start(self) -> None:
        """Serve in a thread of this process, which takes a tenth of the time of a process."""
        self._own_database = Database(self.database.url)
        config = uvicorn.Config(
            application(self.settings, self._own_database),
            port=self.port,
            http=bounded(),
            ws="websockets-sansio",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        eventually(self._answers, "the web server's answer")

    def start_process(self) -> None:
        """Serve as `megaflow up` does, in a process that may be killed."""
        variables = {
            "MEGAFLOW_HOME": str(self.settings.home),
            "MEGAFLOW_DATABASE_URL": self.database.url,
            "MEGAFLOW_BROKER_URL": self.settings.broker(),
            "MEGAFLOW_INSTALLATION": self.settings.installation,
            "MEGAFLOW_ARTIFACTS_URL": self.settings.artifacts(),
        }
        command = [sys.executable, "-m", "app.web", "--port", str(self.port)]
        self._process = subprocess.Popen(command, env=os.environ | variables)
        eventually(self._answers, "the web server's answer")

    def _answers(self) -> bool:
        with suppress(OSError), urlopen(f"{self.url}/sign-in", timeout=5) as reply:
            return bool(reply.status == 200)
        return False

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """how: the signal for a process; a server of this process stops by itself."""
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join(30)
            self._own_database.close()
            self._server = None
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None

    def token(self, name: str = "default", scope: Scope = Scope.ADMINISTER) -> str:
        return users.add_token(self.database, name, scope)[0]

    def client(self, name: str = "default", scope: Scope = Scope.ADMINISTER, *, url: str = "") -> MegaFlow:
        """A client that could reach no database."""
        elsewhere = Settings(
            home=self.settings.home / "elsewhere", database_url=NOWHERE, broker_url="redis://127.0.0.1:1"
        )
        return MegaFlow(elsewhere, server=url or self.url, token=self.token(name, scope))

    def command(
        self, *arguments: object, token: str | None = None, server: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """The `megaflow` command as a process: with `--server` and no database, or with the ledger itself."""
        variables = {"MEGAFLOW_HOME": str(self.settings.home), "COLUMNS": "200"}
        if server:
            variables |= {"MEGAFLOW_DATABASE_URL": NOWHERE, "MEGAFLOW_BROKER_URL": "redis://127.0.0.1:1"}
            variables |= {"MEGAFLOW_TOKEN": self.token() if token is None else token}
        else:
            variables |= {"MEGAFLOW_DATABASE_URL": self.database.url, "MEGAFLOW_BROKER_URL": self.settings.broker()}
            variables |= {"MEGAFLOW_ARTIFACTS_URL": self.settings.artifacts()}
        options = ["--server", self.url] if server else []
        return subprocess.run(
            [sys.executable, "-m", "megaflow", *options, *map(str, arguments)],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def site(settings: Settings, database: Database) -> Iterator[Site]:
    found = Site(settings, database)
    try:
        found.start()
        yield found
    finally:
        found.end(signal.SIGTERM)


class LosesAnswers:
    """Passes requests on to a server, and closes the connection in place of the first answers."""

    def __init__(self, port: int, losses: int) -> None:
        self._to, self._losses, self.requests = port, losses, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(ours,), daemon=True).start()

    def _pass_on(self, ours: socket.socket) -> None:
        with closing(ours), closing(socket.create_connection(("127.0.0.1", self._to))) as theirs:
            ours.settimeout(0.3)
            with suppress(OSError):
                while piece := ours.recv(1 << 16):
                    theirs.sendall(piece)
            answer = theirs.recv(1 << 16)
            self.requests += 1
            if self.requests > self._losses:
                ours.sendall(answer)

    def close(self) -> None:
        self._listener.close()
