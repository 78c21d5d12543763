"""Requests that no handler should see: of strangers, of broken clients, of those who ask for too much."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from app.ledger.users import Scope
from app.live_shell import size_of
from app.web.access import Rates
from tests.building import a_task
from tests.integration.web_ground import Web, error_of, web

__all__ = ["web"]

_LARGE = b"x" * 100_000


def test_a_stranger_sends_no_large_body(web: Web) -> None:
    with TestClient(web.app, base_url="http://127.0.0.1") as client:
        assert client.post("/api/v1/hosts/join", content=_LARGE).status_code == 413
        assert client.post("/sign-in", content=_LARGE).status_code == 413
        assert client.post("/api/v1/runs", content=_LARGE).status_code == 401


def test_what_is_no_address_is_refused_before_signing_in(web: Web) -> None:
    with TestClient(web.app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        found = client.get("/sign-in?next=//%5Bx")
        assert (found.status_code, 'value="/"' in found.text) == (200, True)
        assert client.get("/sign-in?next=/runs?a=//%5Bx").status_code == 200
        assert client.get("/sign-in", headers={"host": "["}).status_code == 421
        assert client.post("/sign-in", data={"token": "x"}, headers={"origin": "http://["}).status_code == 403


def test_times_and_texts_that_nothing_can_hold_are_refused_in_words(web: Web) -> None:
    task = a_task().model_dump(mode="json")
    with web.user() as owner:
        found = owner.get("/api/v1/usage?since=0001-01-01T00:00:00")
        assert found.status_code in (200, 422), found.text  # by the time zone of the machine
        body = {"tasks": [task], "agent": "mini-swe-agent", "model": {"name": "replay:\0"}}
        found = owner.post("/api/v1/runs", json=body)
        assert (found.status_code, error_of(found)[0]) == (422, "SpecInvalid"), found.text
    for size in ([float("inf"), 1], [1, float("nan")]):
        with pytest.raises(ValueError, match="number|NaN"):
            size_of(size)


def test_a_request_that_reads_says_nothing_of_changes_and_a_browser_may_ask_for_heads(web: Web) -> None:
    with web.browser() as client:
        found = client.get("/api/v1/runs?limit=0")
        assert (found.status_code, "changed" in found.text) == (422, False)
        assert client.head("/api/v1/runs").status_code == 200


def test_rates_count_each_request_of_many_threads() -> None:
    rates, start = Rates(0.0, 100.0), threading.Barrier(8)

    def ask(_: int) -> int:
        start.wait(10)
        return sum(rates.allows("one") for _ in range(2000))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, range(8))) == 100
