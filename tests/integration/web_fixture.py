"""The web server over a real ledger and store, with a client for each user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest
from starlette.testclient import TestClient
from uuid_utils import compat as uuids

from app.ledger import users
from app.ledger.database import Database
from app.ledger.users import Scope
from app.settings import Settings
from app.web.server import application
from tests.integration.test_reports import Reports


class Web:
    """The server, and users who ask it."""

    def __init__(self, settings: Settings, database: Database, reports: Reports) -> None:
        self.settings, self.database, self.reports = settings, database, reports
        self.app = application(settings, database)

    def stranger(self, **options: Any) -> TestClient:
        """A client that has not signed in."""
        return TestClient(self.app, base_url="http://127.0.0.1", **options)

    @contextmanager
    def user(self, name: str = "default", scope: Scope = Scope.ADMINISTER) -> Iterator[TestClient]:
        """A program with a token."""
        secret, _ = users.add_token(self.database, name, scope)
        with self.stranger() as client:
            client.headers["authorization"] = f"Bearer {secret}"
            yield client

    @contextmanager
    def browser(self, name: str = "default", scope: Scope = Scope.ADMINISTER) -> Iterator[TestClient]:
        """A browser that signed in with a token."""
        secret, _ = users.add_token(self.database, name, scope)
        with self.stranger() as client:
            found = client.post("/sign-in", data={"token": secret, "next": "/"}, follow_redirects=False)
            assert found.status_code == 303
            yield client

    def owned_by(self, run_id: UUID, user_name: str) -> None:
        """Have the run be of another user."""
        with self.database.begin() as connection:
            for table, column in (("runs", "id"), ("tasks", "run_id")):
                statement = f"UPDATE {table} SET user_name = :user WHERE {column} = :id"
                users.sql(connection, statement, {"user": user_name, "id": run_id})


def csrf_of(page: str) -> str:
    """What a page's forms carry."""
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', page)
    assert found is not None
    return found[1]


@pytest.fixture
def web(settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch) -> Web:
    return Web(settings, database, Reports(settings, database, monkeypatch))


def second_of(database: Database, task_id: UUID) -> None:
    """Have the task's one attempt be its second, after one that was lost."""
    with database.begin() as connection:
        users.sql(connection, "SET LOCAL session_replication_role = replica")
        users.sql(connection, "UPDATE attempts SET number = 2 WHERE task_id = :id", {"id": task_id})
        users.sql(connection, "UPDATE tasks SET attempts = 2 WHERE id = :id", {"id": task_id})
        users.sql(connection, _LOST, {"id": task_id, "attempt": uuids.uuid7()})


_LOST = """
INSERT INTO attempts (id, task_id, number, state, user_name, mode, resource_class, finished_at, end_reason)
SELECT :attempt, task_id, 1, 'lost', user_name, mode, resource_class, finished_at, 'lost'
FROM attempts WHERE task_id = :id"""


def error_of(reply: Any) -> tuple[str, str]:
    """The class and the message of a refused request."""
    found = reply.json()["error"]
    return found["type"], found["message"]
