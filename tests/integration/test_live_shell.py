"""A live shell over the web server: a real attempt, its worker, a real socket; who may have one, and when it ends."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis.asyncio
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from app.artifacts import open_store
from app.ledger import users
from app.ledger.users import Scope, TokenKind, UserAction
from app.live_shell import ShellKeys, ShellLink, ShellRequest
from app.models.outcome import ArtifactKind
from app.models.spec import EnvironmentKind
from app.settings import Settings
from app.web.access import WebUser
from app.web.pages.shell import _first_of
from tests.building import new_id
from tests.integration.live_shell_fixture import AtWork, at_work, manifest
from tests.integration.remote_fixture import Site, site
from tests.services import MakeSettings
from tests.waiting import eventually

__all__ = ["site"]


@pytest.fixture
def settings(make_settings: MakeSettings, tmp_path: Path) -> Settings:
    return make_settings(artifacts_url=f"file://{tmp_path / 'artifacts'}", agent_manifests=(manifest(tmp_path / "a"),))


@pytest.fixture
def attempt(settings: Settings, tmp_path: Path) -> Iterator[AtWork]:
    with at_work(settings, tmp_path / "a") as found:
        yield found


def _open(site: Site, attempt: AtWork, host: str = "127.0.0.1", **headers: str) -> ClientConnection:
    url = f"ws://{host}:{site.port}/attempts/{attempt.id}/shell/socket"
    to = socket.create_connection(("127.0.0.1", site.port))
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return connect(url, sock=to, additional_headers=named, compression=None, proxy=None)


def _bearer(site: Site, user: str = "default", scope: Scope = Scope.ADMINISTER) -> str:
    return f"Bearer {site.token(user, scope)}"


@contextmanager
def _shell(site: Site, attempt: AtWork, csrf: str = "", **headers: str) -> Iterator[ClientConnection]:
    with _open(site, attempt, **(headers or {"Authorization": _bearer(site)})) as opened:
        opened.send(json.dumps({"csrf": csrf, "size": [30, 100]}))
        yield opened


def _until(opened: ClientConnection, wanted: str) -> str:
    """What is shown until then."""
    shown = ""
    while wanted not in shown:
        message = opened.recv(timeout=30)
        assert isinstance(message, bytes), message
        shown += message.decode(errors="replace")
    return shown


def _end(opened: ClientConnection) -> str:
    """Why the server ended it."""
    while not isinstance(message := opened.recv(timeout=30), str):
        pass
    return str(json.loads(message)["end"])


def _refused(site: Site, attempt: AtWork, host: str = "127.0.0.1", **headers: str) -> str:
    with pytest.raises(InvalidStatus) as error:
        _open(site, attempt, host, **headers)
    return f"{error.value.response.status_code} {error.value.response.body.decode()}"


def _trail(site: Site, attempt: AtWork) -> Sequence[UserAction]:
    return users.actions(site.database, subjects=[str(attempt.id)])


def test_a_person_works_in_the_environment_and_all_of_it_is_on_record(site: Site, attempt: AtWork) -> None:
    with _shell(site, attempt) as opened:
        opened.send(b"stty size; echo $((6*7))\n")
        assert "30 100" in _until(opened, "42\r\n")
        opened.send(json.dumps({"size": [20, 90]}))
        opened.send(b"stty size\n")
        _until(opened, "20 90")
        opened.send(b"exit\n")
        assert _end(opened) == "the shell has ended"
    eventually(lambda: len(_trail(site, attempt)) == 2)
    assert [(one.action, one.user_name) for one in _trail(site, attempt)] == [
        ("shell.close", "default"),
        ("shell.open", "default"),
    ]
    with _shell(site, attempt) as later:
        later.send(b"echo $((6*7)); sleep 100\n")
        _until(later, "42\r\n")
        result = attempt.end()
        assert "the agent has ended" in _end(later)
    assert "found one that is" in _refused(site, attempt, Authorization=_bearer(site))
    assert result.verdict is not None
    assert result.attempt is not None
    assert "a shell was opened in the agent's environment by default" in result.verdict.suspect
    assert result.attempt.environment["shells"] == ["default", "default"]
    kept = next(one.key for one in result.attempt.artifacts if one.kind is ArtifactKind.TERMINAL)
    recording = open_store(site.settings.artifacts()).get(str(kept))
    assert b"shell of default" in recording
    assert b"20 90" in recording


def test_it_ends_when_the_page_is_left_and_its_programs_too(site: Site, attempt: AtWork, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    with _shell(site, attempt) as opened:
        opened.send(f"(while :; do date +%N > {alive}; sleep 0.1; done)\n".encode())
        eventually(alive.exists)

    def still() -> bool:
        before = alive.stat().st_mtime_ns
        time.sleep(0.5)
        return alive.stat().st_mtime_ns == before

    eventually(still)


def test_who_may_have_one(site: Site, attempt: AtWork) -> None:
    """No other user, no reader, only an administrator where there is no isolation; three at once; no other page."""
    assert "isolation" in _refused(site, attempt, Authorization=_bearer(site, "default", Scope.SUBMIT))
    assert "scope 'submit'" in _refused(site, attempt, Authorization=_bearer(site, "default", Scope.READ))
    assert "unknown attempt" in _refused(site, attempt, Authorization=_bearer(site, "alice", Scope.SUBMIT))
    assert "403" in _refused(site, attempt)
    assert "421" in _refused(site, attempt, "evil.example", Authorization=_bearer(site))
    assert _trail(site, attempt) == []
    _cookie_alone_does_not_suffice(site, attempt)
    with _shell(site, attempt), _shell(site, attempt), _shell(site, attempt) as third:
        third.send(b"echo $((6*7))\n")
        _until(third, "42\r\n")
        assert "at most 3 open shells" in _refused(site, attempt, Authorization=_bearer(site))


@pytest.mark.docker
def test_an_owner_who_submits_has_one_where_there_is_isolation(site: Site, settings: Settings, tmp_path: Path) -> None:
    with at_work(settings, tmp_path / "a", "alice", EnvironmentKind.DOCKER) as attempt:
        with _shell(site, attempt, Authorization=_bearer(site, "alice", Scope.SUBMIT)) as opened:
            opened.send(b"tty\n")
            _until(opened, "/dev/pts/")
        assert "unknown attempt" in _refused(site, attempt, Authorization=_bearer(site, "bob", Scope.SUBMIT))


def _cookie_alone_does_not_suffice(site: Site, attempt: AtWork) -> None:
    """A browser needs the page's origin, and the secret of a page of ours."""
    session, _ = users.add_token(site.database, "default", Scope.ADMINISTER, kind=TokenKind.SESSION, expires_s=600)
    own = {"Cookie": f"megaflow_session={session}"}
    for origin in ({}, {"Origin": "http://evil.example"}, {"Origin": site.url, "Sec_Fetch_Site": "cross-site"}):
        assert "another site" in _refused(site, attempt, **own, **origin)
    with _shell(site, attempt, "0" * 64, **own, Origin=site.url) as opened:
        assert "without its secret" in _end(opened)
    assert _trail(site, attempt) == []
    with _shell(site, attempt, WebUser("default", frozenset(), session).csrf, **own, Origin=site.url) as opened:
        opened.send(b"echo $((6*7))\n")
        _until(opened, "42\r\n")
        users.end_session(site.database, session)
        assert "signed out" in _end(opened)


def test_a_request_that_was_not_answered_is_taken_back(settings: Settings) -> None:
    request = ShellRequest(str(new_id()), "alice", 30, 100)

    async def left() -> int:
        async with ShellLink(settings, request).open():
            pass
        async with redis.asyncio.Redis.from_url(settings.redis()) as client:
            return int(await client.exists(ShellKeys(settings.installation).requests(request.attempt_id)))

    assert asyncio.run(left()) == 0


def test_a_task_that_loses_a_cancellation_is_cancelled_once_more() -> None:
    async def goes_on() -> None:
        with suppress(asyncio.CancelledError):  # as a client of redis whose answer comes at the same moment
            await asyncio.sleep(30)
        await asyncio.sleep(30)

    asyncio.run(asyncio.wait_for(_first_of(asyncio.sleep(0), goes_on()), 10))
