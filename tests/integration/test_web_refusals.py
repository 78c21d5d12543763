"""Requests that no handler should see: of strangers, of broken clients, of those who ask for too much."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from app.ledger import attempts, limits, semaphores, users
from app.ledger.database import Database, sql
from app.ledger.users import Scope
from app.live_shell import size_of
from app.web.__main__ import _IDLE_ANSWER_S
from app.web.server import application
from tests.building import a_task, accepted, dispatched, ready_instance
from tests.integration.web_fixture import Web, csrf_of, error_of, web

__all__ = ["web"]

_LARGE = b"x" * 100_000


def test_a_stranger_sends_no_large_body(web: Web) -> None:
    with web.stranger() as client:
        assert client.post("/api/v1/hosts/join", content=_LARGE).status_code == 413
        assert client.post("/sign-in", content=_LARGE).status_code == 413
        assert client.post("/api/v1/runs", content=_LARGE).status_code == 401


def test_strangers_behind_our_proxy_are_counted_by_their_own_addresses(web: Web) -> None:
    app = application(web.settings.model_copy(update={"web_proxies": ("10.0.0.0/8",)}), web.database)

    def guesses(peer: str, addresses: list[str]) -> set[int]:
        headers = [{"authorization": "Bearer mf_wrong", "x-forwarded-for": one} for one in addresses]
        with TestClient(app, base_url="http://127.0.0.1", client=(peer, 1)) as client:
            return {client.get("/api/v1/me", headers=one).status_code for one in headers}

    assert guesses("10.1.2.3", ["192.0.2.1"] * 12) == {401, 429}
    assert guesses("10.1.2.3", ["192.0.2.2"]) == {401}, "another address"
    assert guesses("198.51.100.7", [f"192.0.2.{n}" for n in range(10, 22)]) == {401, 429}, "no proxy of ours"


def test_texts_and_sizes_that_nothing_can_hold_are_refused_in_words(web: Web) -> None:
    task = a_task().model_dump(mode="json")
    with web.user() as owner:
        body = {"tasks": [task], "agent": "mini-swe-agent", "model": {"name": "replay:\0"}}
        found = owner.post("/api/v1/runs", json=body)
        assert (found.status_code, error_of(found)[0]) == (422, "SpecInvalid"), found.text
    for size, words in (([float("inf"), 1], "expected finite"), ([1, float("nan")], "cannot convert")):
        with pytest.raises(ValueError, match=words):
            size_of(size)


def test_only_an_administrator_ends_the_pause_of_an_administrator(web: Web) -> None:
    run = accepted(web.database, 1).run_id
    web.owned_by(run, "alice")
    with web.user("alice", Scope.SUBMIT) as alice, web.user("bob") as bob:
        assert alice.post(f"/api/v1/runs/{run}/pause", json={}).json()["changed"]
        assert alice.post(f"/api/v1/runs/{run}/resume", json={}).json()["changed"]
        alice.post(f"/api/v1/runs/{run}/pause", json={})
        bob.post(f"/api/v1/runs/{run}/pause", json={"reason": "too dear"})
        found = alice.post(f"/api/v1/runs/{run}/resume", json={})
        assert (found.status_code, "administrator" in found.text) == (403, True)
        assert bob.post(f"/api/v1/runs/{run}/resume", json={}).json()["changed"]
        alice.post(f"/api/v1/runs/{run}/pause", json={})
        assert alice.post(f"/api/v1/runs/{run}/resume", json={}).json()["changed"]


def test_a_user_sees_neither_who_else_waits_nor_limits_of_others_runs(web: Web) -> None:
    own, other = accepted(web.database, 1), accepted(web.database, 1)
    web.owned_by(own.run_id, "alice")
    web.owned_by(other.run_id, "bob")
    for run in (own, other):
        limits.set_limit(web.database, f"model_requests:run:{run.run_id}", 3)
    path = f"/api/v1/tasks/{own.task_ids[0]}/explanation"
    with web.user("alice", Scope.READ) as alice:
        assert "bob" not in alice.get(path).text
        shown = alice.get("/api/v1/limits").text
        assert (str(own.run_id) in shown, str(other.run_id) in shown) == (True, False)
    with web.user() as owner:
        assert str(other.run_id) in owner.get("/api/v1/limits").text


def test_a_user_sees_neither_who_holds_what_it_waits_for_nor_others_of_its_name(web: Web) -> None:
    own, other = accepted(web.database, 1), accepted(web.database, 1)
    web.owned_by(own.run_id, "alice")
    web.owned_by(other.run_id, "bob")
    instance = ready_instance(web.database)
    for run in (other, own):
        claim = attempts.claim(web.database, dispatched(web.database, run)[0].message, instance, lease_s=30)
        assert claim is not None
        place = {"capacity_default": 1, "lease_s": 30, "attempt_id": claim.attempt_id}
        semaphores.ask(web.database, "image_pulls:docker.io", claim.attempt_id, **place)
    task, holder = own.task_ids[0], str(other.task_ids[0])[-12:]
    with web.user("alice", Scope.READ) as alice:
        (found,) = alice.get(f"/api/v1/tasks/{task}/explanation").json()["now"]["bounds"]
        assert (found["limit"], found["why"]) == ("image_pulls:docker.io", "")
        assert holder not in alice.get(f"/tasks/{task}").text
    with web.user() as owner:
        (found,) = owner.get(f"/api/v1/tasks/{task}/explanation").json()["now"]["bounds"]
        assert found["why"] == f"held by task {holder}"


def test_limits_and_forms_out_of_bounds_are_refused_in_words(web: Web) -> None:
    task, run = a_task().model_dump(mode="json"), accepted(web.database, 1)
    with web.user() as owner:
        for more in ({"agent_timeout_s": 1e9}, {"max_steps": 10**12}):
            found = owner.post("/api/v1/runs", json={"tasks": [task], "agent": "nop", "limits": more})
            assert (found.status_code, next(iter(more)) in found.text) == (422, True), found.text
    with web.browser() as client:
        csrf = csrf_of(client.get(f"/runs/{run.run_id}").text)
        for path, form in (
            ("/limits", {"name": "model_requests:x", "capacity": "-1"}),
            ("/limits", {"name": "model_requests:x", "capacity": "nan"}),
            (f"/runs/{run.run_id}/cancel", {"reason": "a\0b"}),
            (f"/tasks/{run.task_ids[0]}/cancel", {"reason": "a\0b"}),
        ):
            found = client.post(path, data={"csrf": csrf, **form}, follow_redirects=False)
            assert (found.status_code, "nothing was changed" in found.text) == (422, True), (path, found.text)


def test_a_database_that_stands_still_is_an_error_within_ten_seconds(web: Web) -> None:
    database = Database(web.database.url, idle_answer_s=_IDLE_ANSWER_S)
    secret, _ = users.add_token(database, "default", Scope.READ)
    with database.begin() as connection:
        folder = sql(connection, "SHOW data_directory").scalar_one()
        backends = sql(connection, "SELECT pid FROM pg_stat_activity").scalars()
        pids = [int((Path(folder) / "postmaster.pid").read_text().split()[0]), *backends]
    headers = {"authorization": f"Bearer {secret}"}
    with TestClient(application(web.settings, database), base_url="http://127.0.0.1", headers=headers) as client:
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            begun = time.monotonic()
            found = client.get("/api/v1/runs")
            took_s = time.monotonic() - begun
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert (found.status_code, error_of(found)[0], took_s < 10) == (503, "DatabaseUnavailable", True), took_s
        assert client.get("/api/v1/runs").status_code == 200
    database.close()


def test_what_is_no_address_is_refused_before_signing_in(web: Web) -> None:
    with web.stranger(raise_server_exceptions=False) as client:
        found = client.get("/sign-in?next=//%5Bx")
        assert (found.status_code, 'value="/"' in found.text) == (200, True)
        assert client.get("/sign-in?next=/runs?a=//%5Bx").status_code == 200
        assert client.get("/sign-in", headers={"host": "["}).status_code == 421
        assert client.post("/sign-in", data={"token": "x"}, headers={"origin": "http://["}).status_code == 403
