"""The web server: pages and API over a real ledger; who may see and do what."""

from __future__ import annotations

import json
import re
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

import anyio
import pytest
from sqlalchemy import event
from starlette.requests import HTTPConnection

from app.errors import ExportRefused
from app.ledger import events, limits, names, results, users
from app.ledger.database import Database, sql
from app.ledger.events import Fact
from app.ledger.users import Scope, TokenKind
from app.models.outcome import Verdict
from app.models.states import TaskState
from app.web.access import Access, WebUser
from app.web.bundle import write_bundle
from app.web.pages.run import run_text
from tests.building import a_task, accepted
from tests.integration.rows import a_call, ago, paused
from tests.integration.test_reports import NIGHT, recording, verdict
from tests.integration.web_fixture import Web, csrf_of, error_of, second_of, web

__all__ = ["web"]

HOSTILE = '<script>alert(1)</script>\x1b[31m\x00\u202eevil" onload="x'


def _task(web: Web, run_id: UUID, name: str) -> UUID:
    return names.find(web.database, "tasks", f"{run_id}/{name}")


# --- Pages ----------------------------------------------------------------------------------------------------------


def test_every_page_of_a_run_shows_what_happened(web: Web) -> None:
    run_id = web.reports.run("night", NIGHT)
    task_id = _task(web, run_id, "click-5")
    with web.user() as client:
        run = client.get(f"/runs/{run_id}").text
        assert ('<span class="outcome lost">not scored</span>' in run, ">lost<" in run) == (True, False)
        assert client.post(f"/api/v1/runs/{run_id}/cancel", json={}).json() == {"task_ids": []}  # all had ended
        assert "50.0 %" in run
        assert "click-4" in run
        assert "environment_error" in run
        assert 'data-letters="ssuxl"' in run
        task = client.get(f"/tasks/{task_id}").text
        assert "=no image 17" in task
        attempt = web.reports.attempt(run_id)
        assert "git log" not in client.get(f"/attempts/{attempt.id}/trajectory").text
        assert "+++ b/x" in client.get(f"/attempts/{attempt.id}/files/patch").text
        for path in (
            "/", "/runs", "/models", "/compare", "/quarantine", "/actions", "/submit",
            f"/attempts/{attempt.id}", f"/attempts/{attempt.id}/terminal",
            f"/runs/{run_id}/report", f"/runs/{run_id}/explain", f"/runs/{run_id}/cleanup",
            f"/runs/{run_id}/experience", f"/runs/{run_id}?outcome=lost", f"/compare?first={run_id}&second={run_id}",
        ):  # fmt: skip
            found = client.get(path)
            assert (found.status_code, "text/html" in found.headers["content-type"]) == (200, True), path
            assert "script-src 'self'" in found.headers["content-security-policy"] or "report" in path


def test_a_training_run_shows_reward_solved_and_tokens_a_second(web: Web) -> None:
    run_id = web.reports.run("night", NIGHT)
    with web.database.begin() as connection:
        columns = "run_id, policy, drop_equal, allow_scripted"
        statement = f"INSERT INTO experience_runs ({columns}) VALUES (:run, 'p', false, false)"
        sql(connection, statement, {"run": run_id})
        group = "INSERT INTO experience_groups (group_id, run_id, state, oldest) VALUES (:run, :run, 'ready', 0)"
        sql(connection, group, {"run": run_id})
        versions = "('p', 0, 'a', 'live', now()), ('p', 1, 'b', 'refused', NULL), ('p', 2, 'c', 'live', now())"
        sql(connection, f"INSERT INTO policy_versions (policy, number, version, state, live_at) VALUES {versions}")
    with web.user() as client:
        page = client.get(f"/runs/{run_id}/experience").text
    assert '<td class="n">1</td><td class="n"><a' in page, "a refused version makes nothing stale"
    assert '<td>reward, mean of 4 scored</td><td class="n">+0.500</td>' in page
    assert '<td>solved</td><td class="n">50.0 %</td>' in page
    assert "tokens/s" in page


def test_a_cell_of_the_strip_leads_to_its_attempt(web: Web) -> None:
    run_id = web.reports.run("night", NIGHT)
    second_of(web.database, _task(web, run_id, "click-2"))
    waits = _task(web, run_id, "click-4")
    with web.database.begin() as connection:
        sql(connection, "SET LOCAL session_replication_role = replica")
        sql(connection, "UPDATE tasks SET state = 'pending', end_reason = NULL WHERE id = :id", {"id": waits})
    ids = {one.task_id: [a.id for a in one.attempts] for one in results.results(web.database, [waits])}
    with web.user() as client:
        page = run_text(web.app.state.services, run_id)
        assert ('data-letters="sLsuXwl"' in page, "</span> 2</a>" in page) == (True, True)
        for place, expected in (("3/1", f"/attempts/{ids[waits][0]}"), ("3/2", f"/tasks/{waits}")):
            found = client.get(f"/runs/{run_id}/at/{place}", follow_redirects=False)
            assert found.headers["location"] == expected
        assert client.get(f"/runs/{run_id}/at/99/1").status_code == 404


def test_hostile_text_is_shown_and_does_nothing(web: Web) -> None:
    run_id = web.reports.run("night", {"click-1": Verdict(reward=0.0, counts=True, detail=HOSTILE)})
    task_id = _task(web, run_id, "click-1")
    steps = [
        {"step_id": HOSTILE, "source": HOSTILE, "message": [HOSTILE], "tool_calls": HOSTILE, "metrics": 7, "extra": []},
        "no step",
        {"step_id": 2, "source": "agent", "message": HOSTILE, "observation": {"results": [{"content": HOSTILE}, 3]}},
    ]
    hostile = json.dumps({"steps": steps, "subagent_trajectories": [HOSTILE, {"trajectory_id": HOSTILE}]})
    attempt = web.reports.keep(run_id, "trajectory", hostile.encode())
    with web.user() as client:
        for path in (f"/tasks/{task_id}", f"/runs/{run_id}", f"{attempt}/trajectory"):
            page = client.get(path).text
            assert "alert(1)" in page, path
            assert "<script>alert" not in page, path
            assert not any(letter in page for letter in "\x1b\x00\u202e"), path
            assert '" onload="x' not in page, path
        web.reports.keep(run_id, "trajectory", b"[" * 100_000)
        assert "expected a trajectory in JSON" in client.get(f"{attempt}/trajectory").text


def _with(web: Web, kind: str, content: bytes) -> str:
    """The page of an attempt that has this artifact."""
    return web.reports.keep(web.reports.run("night", {"click-1": verdict(1.0)}), kind, content)


_FIFTY = 50_000_000
_LARGE = {
    "one message": lambda: [
        {"step_id": 1, "source": "agent", "message": HOSTILE * (_FIFTY // len(json.dumps(HOSTILE)))}
    ],
    "many steps": lambda: [{"step_id": n, "source": "agent", "message": HOSTILE} for n in range(_FIFTY // 110)],
}


@pytest.mark.parametrize("shape", _LARGE)
def test_a_trajectory_of_50_mb_costs_a_bounded_page_time_and_memory(web: Web, shape: str) -> None:
    content = json.dumps({"steps": _LARGE[shape]()}).encode()
    assert 0.8 * _FIFTY < len(content) < 1.2 * _FIFTY
    path = _with(web, "trajectory", content)
    del content
    with web.user() as client:
        Path("/proc/self/clear_refs").write_text("5")  # the highest memory counts from here on
        before, begun = _memory_mib("VmRSS"), time.monotonic()
        found = client.get(f"{path}/trajectory")
        assert (found.status_code, len(found.content) < 100_000) == (200, True)
        assert ("more characters" in found.text) == (shape == "one message")
        took, grown = time.monotonic() - begun, _memory_mib("VmHWM") - before
    assert (took < 20, grown < 500) == (True, True), (took, grown)


def _memory_mib(name: str) -> float:
    """Of this process, as `/proc` calls it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024


def test_a_recording_is_played_by_our_own_script_and_is_text_without_it(web: Web) -> None:
    path = _with(web, "terminal", recording("ls -l", f"echo '{HOSTILE}'"))
    with web.user() as client:
        found = client.get(f"{path}/terminal?at=1.5")
        policy = found.headers["content-security-policy"]
        assert ("'wasm-unsafe-eval'" in policy, "script-src 'self' 'unsafe-inline'" in policy) == (True, False)
        assert f'data-recording="/api/v1{path}/artifacts/terminal" data-at="1.5"' in found.text
        assert "agent $ ls -l\ndone\n" in found.text
        assert "/terminal?at=" in found.text
        assert "<script>alert" not in found.text
        assert not any(letter in found.text for letter in "\x1b\x00\u202e")
        assert "wasm-unsafe-eval" not in client.get(path).headers["content-security-policy"]
        for name in ("terminal.js", "vendor/asciinema-player.min.js", "vendor/asciinema-player.css"):
            assert f"/static/{name}" in found.text
            assert client.get(f"/static/{name}").status_code == 200
        page = client.get(path).text
        assert page.count('<rect class="command"') == 2
        assert "<title>agent: 0.10 s: ls -l</title>" in page
        assert "<script>alert" not in page


def _with_samples(web: Web, samples: object) -> str:
    """The path of an attempt that has recorded this."""
    attempt = web.reports.attempt(web.reports.run("night", {"click-1": verdict(1.0)}))
    statement = (
        "UPDATE attempts SET environment = environment || jsonb_build_object('samples', CAST(:samples AS jsonb))"
    )
    with web.database.begin() as connection:
        sql(connection, statement, {"samples": json.dumps(samples)})
    return f"/attempts/{attempt.id}"


def test_memory_and_processors_are_lines_with_their_limits(web: Web) -> None:
    rows = [[5, 100, 0.5], [10, 4000, None], [15, None, 6.0]]
    marks = [[10, "killed"], [15, "throttled"], [16, "throttled"]]
    path = _with_samples(
        web,
        {
            "agent": {"since": 1, "rows": rows, "marks": marks},
            "<script>alert(1)": {"since": 1, "rows": [[1, 2, 3]], "marks": []},
        },
    )
    with web.user() as client:
        page = client.get(path).text
        memory, processors = map(json.loads, re.findall(r'<script type="application/json">(.*?)</script>', page))
        assert "Memory: at most 4000 MiB, limit 6144; 1 times killed for memory" in page
        assert "Processors: at most 6 in use, limit 6; 2 times held up by its limit" in page
        assert [(one["limit"], len(one["marks"])) for one in (memory, processors)] == [(6144, 1), (6, 2)]
        drawn = [[[value for _, value in line["points"]] for line in one["lines"]] for one in (memory, processors)]
        assert drawn == [[[100, 4000], [2]], [[0.5, 6], [3]]], "two environments, twice"
        assert "<script>alert" not in page


def test_what_held_an_attempt_up_is_drawn_when_it_did(web: Web) -> None:
    rows = [[5, 100, 0.5], [10, 100, 1.0]]
    path = _with_samples(web, {"agent": {"since": time.time(), "rows": rows, "marks": [[0, "throttled"]]}})
    attempt_id = UUID(path.rpartition("/")[2])
    with web.database.begin() as connection:
        sql(
            connection,
            "INSERT INTO bindings (limit_name, user_name, mode, resource_class, since, until)"
            " SELECT 'capacity', t.user_name, t.requested_mode, t.resource_class, t.accepted_at, a.dispatched_at"
            " FROM attempts a JOIN tasks t ON t.id = a.task_id WHERE a.id = :id",
            {"id": attempt_id},
        )
    a_call(
        web.database, attempt_id=attempt_id, cost_usd=None, started_at=ago(0), waited={"model:<script>alert(1)": 0.25}
    )
    with web.user() as client:
        page = client.get(path).text
    held = re.findall(
        r'<rect class="limit" x="([0-9.]+)" y="29" width="([0-9.]+)" height="5"><title>(.*?)</title>', page
    )
    words = [title for _, _, title in held]
    assert re.fullmatch(r"[0-9.]+ s for capacity", words[0]), words
    assert any("0.2 s for model:&lt;script&gt;" in one for one in words), words
    assert words[-1] == "agent: held up by its limit of processors"
    assert all(float(x) + float(width) <= 1001 for x, width, _ in held), "within the drawing"
    assert "<script>alert" not in page


HEADER = b'{"version": 2, "width": 80, "height": 24, "timestamp": 1, "commands": []}\n'


def test_a_recording_that_might_break_a_player_is_not_given_to_one(web: Web) -> None:
    run_id = web.reports.run("night", {"click-1": verdict(1.0)})
    path = f"/attempts/{web.reports.attempt(run_id).id}"
    with web.user() as client:
        for content in (
            b"", b"[" * 100_000, b"[]\n", b"null", b"\xff\xfe", HEADER + b"[1", HEADER + b"7", HEADER + b"[" * 100_000,
            HEADER + b'[1, "o", "\\u001b[8;9999;9999t"]', HEADER + b'[1, "o", "x\\u001b[99999b"]',
            HEADER + b'[1, "o", "' + b"\\u001b[999S" * 600 + b'"]', HEADER + b"x" * (50 << 20),
        ):  # fmt: skip
            web.reports.keep(run_id, "terminal", content)
            found = client.get(f"{path}/terminal")
            shown = ('class="problem"' in found.text, "data-recording" in found.text)
            assert (found.status_code, shown) == (200, (True, False)), content[:200]
            assert len(found.content) < 4_000_000
            assert client.get(path).status_code == 200


# --- Signing in -----------------------------------------------------------------------------------------------------


def test_a_link_signs_the_owner_in_once(web: Web) -> None:
    link = users.owner_link(web.database)
    with web.stranger() as client:
        assert client.head("/sign-in", params={"once": link}).status_code == 200, "a preview does not use it up"
        found = client.get("/sign-in", params={"once": link, "next": "/runs"})
        assert (found.status_code, str(found.url)) == (200, "http://127.0.0.1/runs")
        assert client.get("/sign-in", params={"once": link, "next": "/models"}).status_code == 200
        assert (
            client.post("/sign-in", data={"token": "x"}, headers={"origin": "http://evil.example"}).status_code == 403
        )
    with web.stranger() as other:
        assert other.get("/sign-in", params={"once": link}).status_code == 401
        assert str(other.get("/runs").url).startswith("http://127.0.0.1/sign-in?next=%2Fruns")


def test_signing_in_leads_nowhere_else(web: Web) -> None:
    secret, _ = users.add_token(web.database, "alice", Scope.READ)
    with web.stranger() as client:
        for path in ("//evil.example", "https://evil.example/", "/\\evil.example", "javascript:x"):
            found = client.post("/sign-in", data={"token": secret, "next": path}, follow_redirects=False)
            assert found.headers["location"] == "/"
            assert "httponly" in found.headers["set-cookie"].lower()


def test_guessing_tokens_is_stopped(web: Web) -> None:
    with web.stranger() as client:
        statuses = [client.post("/sign-in", data={"token": f"mf_{n}"}).status_code for n in range(15)]
    assert (statuses[0], statuses[-1]) == (401, 429)


def test_a_session_ends_with_its_token_and_by_signing_out(web: Web) -> None:
    secret, token = users.add_token(web.database, "alice", Scope.READ)
    with web.stranger() as client:
        client.post("/sign-in", data={"token": secret})
        csrf = csrf_of(client.get("/runs").text)
        assert client.post("/sign-out", data={"csrf": csrf}, follow_redirects=False).status_code == 303
        assert users.all_tokens(web.database)[0].kind is TokenKind.TOKEN
        client.post("/sign-in", data={"token": secret})
        assert users.revoke(web.database, "alice", str(token.id)[-12:]) == 2
        assert users.all_tokens(web.database) == []


# --- Scopes ---------------------------------------------------------------------------------------------------------


def test_two_users_neither_see_nor_stop_each_others_runs(web: Web) -> None:
    run_id = web.reports.run("night", NIGHT)
    web.owned_by(run_id, "alice")
    task_id, attempt = _task(web, run_id, "click-1"), web.reports.attempt(run_id)
    with web.user("bob", Scope.SUBMIT) as bob:
        assert bob.get("/api/v1/runs").json() == []
        for path in (
            f"/runs/{run_id}", f"/tasks/{task_id}", f"/attempts/{attempt.id}", f"/attempts/{attempt.id}/trajectory",
            f"/live/runs/{run_id}", f"/api/v1/runs/{run_id}", "/api/v1/runs/night", f"/api/v1/tasks/{task_id}",
            f"/api/v1/attempts/{attempt.id}/artifacts/patch", f"/api/v1/events?run={run_id}&follow=false",
            f"/api/v1/runs/{run_id}/export?format=csv", f"/compare?first={run_id}&second={run_id}",
        ):  # fmt: skip
            assert bob.get(path).status_code == 404, path
        assert bob.post(f"/api/v1/runs/{run_id}/cancel", json={}).status_code == 404
        assert bob.post("/api/v1/tasks/cancel", json={"task_ids": [str(task_id)]}).status_code == 404
        assert bob.post("/api/v1/tasks/results", json={"task_ids": [str(task_id)]}).status_code == 404
        assert bob.get("/api/v1/events?follow=false").status_code == 403
    with web.user("alice", Scope.READ) as alice:
        assert [run["name"] for run in alice.get("/api/v1/runs").json()] == ["night"]
        kind, message = error_of(alice.post(f"/api/v1/runs/{run_id}/cancel", json={}))
        assert (kind, "scope 'submit'" in message) == ("NotAllowed", True)
        assert alice.get("/api/v1/quotas").status_code == 403


def test_nobody_submits_on_anothers_account(web: Web) -> None:
    task = a_task().model_dump(mode="json")
    with web.user("bob", Scope.SUBMIT) as bob:
        refused = bob.post("/api/v1/runs", json={"tasks": [task], "agent": "nop", "user_name": "alice"})
        assert (refused.status_code, "only an administrator" in error_of(refused)[1]) == (422, True)
        made = bob.post("/api/v1/runs", json={"tasks": [task], "agent": "nop"})
        assert made.status_code == 200, made.text
        assert bob.get(f"/api/v1/runs/{made.json()['run_id']}").json()["user_name"] == "bob"
        submission = {"dataset": "demo", "agent": "nop", "user_name": "default"}
        refused = bob.post("/api/v1/runs", json={"submission": submission})
        assert (refused.status_code, "only an administrator" in error_of(refused)[1]) == (422, True)
    assert [one.user_name for one in users.actions(web.database)] == ["bob"]


def test_runs_come_after_tasks_of_the_same_user_alone(web: Web) -> None:
    asked = {"tasks": [a_task().model_dump(mode="json")], "agent": "nop"}
    with web.user("bob", Scope.SUBMIT) as bob, web.user("alice", Scope.SUBMIT) as alice:
        (first,) = bob.post("/api/v1/runs", json=asked).json()["task_ids"]
        later = {"after": [{"task_id": first}], "inputs": {"/in/a": {"task_id": first, "kind": "patch"}}}
        refused = alice.post("/api/v1/runs", json=asked | later)
        assert "expected tasks of user 'alice' to come after" in error_of(refused)[1]
        named = {"inputs": {"/in/a": {"task_id": first, "kind": "patch", "mode": "0600"}}}
        assert "mode" in error_of(bob.post("/api/v1/runs", json=asked | named))[1], "an unknown key is no input"
        made = bob.post("/api/v1/runs", json=asked | later)
        assert made.status_code == 200, made.text
        (second,) = made.json()["task_ids"]
        assert f"waits for task example-1 ({first}), which is pending" in bob.get(f"/tasks/{second}").text
        assert f"waits for task example-1 ({first})" in bob.get(f"/runs/{made.json()['run_id']}/explain").text
        assert bob.post("/api/v1/tasks/cancel", json={"task_ids": [first]}).status_code == 200
        assert bob.get(f"/api/v1/tasks/{second}").json()["state"] == "cancelled"


def test_a_lapsed_or_unknown_token_is_refused(web: Web) -> None:
    secret, _ = users.add_token(web.database, "alice", Scope.READ, expires_s=3600)
    with web.database.begin() as connection:
        sql(connection, "UPDATE user_tokens SET expires_at = expires_at - :past", {"past": timedelta(hours=2)})
    with web.stranger() as client:
        for given in (secret, "nonsense", ""):
            found = client.get("/api/v1/runs", headers={"authorization": f"Bearer {given}"})
            assert (found.status_code, error_of(found)[0]) == (401, "NotSignedIn")
            assert found.headers["www-authenticate"] == "Bearer"


def test_forms_need_their_secret_and_their_own_site(web: Web) -> None:
    run = accepted(web.database, 2)
    with web.browser() as client:
        path = f"/runs/{run.run_id}/cancel"
        assert client.post(path, data={"reason": "x"}).status_code == 403
        assert client.post(path, data={"csrf": "0" * 64}).status_code == 403
        csrf = csrf_of(client.get(f"/runs/{run.run_id}").text)
        other = client.post(path, data={"csrf": csrf}, headers={"origin": "http://evil.example"})
        assert other.status_code == 403
        api = client.post(f"/api/v1{path}", json={}, headers={"sec-fetch-site": "cross-site"})
        assert api.status_code == 403
        assert client.post(f"/api/v1{path}", json={}).status_code == 403, "an API call needs the secret, too"
        done = client.post(path, data={"csrf": csrf, "reason": "wrong dataset"})
        assert done.status_code == 200
        assert "wrong dataset" in done.text
    assert {results.state_of(web.database, one) for one in run.task_ids} == {TaskState.CANCELLED}
    (action,) = users.actions(web.database, subjects=[str(run.run_id)])
    assert (action.user_name, action.action, action.reason) == ("default", "run.cancelled", "wrong dataset")


def test_forms_do_what_they_say_and_put_it_on_record(web: Web) -> None:
    run = accepted(web.database, 2)
    first = run.task_ids[0]
    mine, states = f"/runs/{run.run_id}", lambda: [results.state_of(web.database, one) for one in run.task_ids]
    with web.browser("erin") as client:
        csrf = csrf_of(client.get(mine).text)

        def press(path: str, **fields: str) -> str:
            """Where it leads to."""
            found = client.post(path, data={"csrf": csrf, **fields}, follow_redirects=False)
            assert found.status_code == 303, found.text
            return str(found.headers["location"])

        def page() -> str:
            return client.get(mine).text

        assert press(f"{mine}/pause", reason="disk is full") == mine
        assert (bool(paused(web.database)), "Paused since" in page(), 'action="/r' in page()) == (True,) * 3
        assert press(f"{mine}/resume") == mine
        assert (paused(web.database), "Paused since" in page()) == ([], False)
        assert press(f"/tasks/{first}/cancel", reason="wrong image") == f"/tasks/{first}"
        assert states() == [TaskState.CANCELLED, TaskState.PENDING]
        assert press(f"/tasks/{first}/retry", reason="right image") == f"/tasks/{first}"
        assert states() == [TaskState.PENDING] * 2
        press(f"{mine}/cancel", reason="all wrong")
        assert press(f"{mine}/retry", reason="all right") == mine
        assert states() == [TaskState.PENDING] * 2
        assert press("/limits", name="image_builds:*", capacity="3", reason="slow disk") == "/"
        assert {use.name: use.capacity for use in limits.show(web.database, web.settings)}["image_builds:*"] == 3
        made = press("/submit", dataset="demo", agent="nop", replicas="2", name="from the page")
        assert results.run_status(web.database, UUID(made.removeprefix("/runs/"))).name == "from the page"
        trail, shown = client.get("/actions").text, page()
    found = [(one.action, one.subject, one.reason) for one in users.actions(web.database) if one.user_name == "erin"]
    assert found[::-1] == [
        ("run.paused", str(run.run_id), "disk is full"), ("run.resumed", str(run.run_id), ""),
        ("task.cancelled", str(first), "wrong image"), ("task.retried", str(first), "right image"),
        ("run.cancelled", str(run.run_id), "all wrong"), ("run.retried", str(run.run_id), "all right"),
        ("limit.set", "image_builds:*", "slow disk"), ("run.submitted", made.removeprefix("/runs/"), ""),
    ]  # fmt: skip
    assert [reason for *_, reason in found if reason and reason not in trail] == []
    assert [one in shown for one in ("disk is full", "all right", "wrong image")] == [True, True, False]


# --- The API --------------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_named_and_changes_nothing(web: Web) -> None:
    with web.user() as client:
        for body, words in (
            ({"tasks": [], "agent": "nop"}, "tasks"),
            ({"agent": "nop"}, "expected"),
            ({"submission": {"dataset": "no-such", "agent": "nop"}}, "no-such"),
            ({"tasks": [a_task().model_dump(mode="json")], "agent": "nob"}, "did you mean nop?"),
        ):
            found = client.post("/api/v1/runs", json=body)
            assert (found.status_code in (404, 422), words in found.text) == (True, True), found.text
        assert client.post("/api/v1/runs", content=b"{").status_code == 422
        assert client.get("/api/v1/runs?limit=0").status_code == 422
        assert client.get("/api/v1/nothing").json()["error"]["type"] == "UnknownName"
        assert client.put("/api/v1/limits/image_builds", json={"capacity": -1}).status_code == 422
        assert client.get("/api/v1/runs").json() == []


def test_an_artifact_comes_whole_or_in_ranges(web: Web) -> None:
    attempt = web.reports.attempt(web.reports.run("night", {"click-1": verdict(1.0)}))
    path = f"/api/v1/attempts/{attempt.id}/artifacts/patch"
    with web.user() as client:
        whole = client.get(path).content
        for asked, expected in (("bytes=0-3", whole[:4]), ("bytes=5-", whole[5:]), ("bytes=-4", whole[-4:])):
            found = client.get(path, headers={"range": asked})
            assert (found.status_code, found.content) == (206, expected)
        assert found.headers["content-range"] == f"bytes {len(whole) - 4}-{len(whole) - 1}/{len(whole)}"
        for asked in ("bytes=9999-", "bytes=3-2", "bytes=-0", "bytes=-", "bytes=a-b"):
            found = client.get(path, headers={"range": asked})
            assert (found.status_code, found.headers["content-range"]) == (416, f"bytes */{len(whole)}"), asked
            assert error_of(found)[0] == "SpecInvalid"
        assert client.get(path, headers={"range": "lines=1-2"}).content == whole
        assert client.get(f"/api/v1/attempts/{attempt.id}/artifacts/agent_log").status_code == 410


def test_events_go_on_from_where_a_reader_was(web: Web) -> None:
    run = accepted(web.database, 2)
    path = f"/api/v1/events?run={run.run_id}&follow=false"
    with web.user() as client:
        first = client.get(path, params={"run": str(run.run_id), "follow": "false", "after": "start"}).text
        assert first.count("event: task.accepted") + first.count("event: run.accepted") >= 1
        position = [line for line in first.splitlines() if line.startswith("id: ")][-1][4:]
        client.post(f"/api/v1/runs/{run.run_id}/cancel", json={})
        second = client.get(path, headers={"last-event-id": position}).text
        assert "task.cancel_requested" in second
        assert "accepted" not in second
        for wrong in (str(2**63 - 1), str(10**15), f"0-{10**15}-0", f"0-1-{10**18}"):
            assert client.get(path, headers={"last-event-id": wrong}).status_code == 422


# --- Live -----------------------------------------------------------------------------------------------------------


def test_viewers_cost_one_transaction_a_second_whatever_happens(web: Web) -> None:
    run = accepted(web.database, 3)
    services, statements = web.app.state.services, []
    live = services.live
    event.listen(services.database.engine, "begin", lambda connection: statements.append(1))

    async def viewer() -> None:
        async for _ in live.texts(f"run {run.run_id}", lambda: run_text(services, run.run_id)):
            pass

    async def watched(viewers: int, *, busy: bool) -> tuple[float, float]:
        """Transactions and looks per second."""
        async with anyio.create_task_group() as group:
            for _ in range(viewers):
                group.start_soon(viewer)
            await anyio.sleep(1.0)
            before, looks = len(statements), live.looks
            for _ in range(6):
                await anyio.sleep(0.5)
                if busy:
                    await anyio.to_thread.run_sync(_beat, web.database, run.run_id)
            own = 6 if busy else 0
            rates = (len(statements) - before - own) / 3, (live.looks - looks) / 3
            group.cancel_scope.cancel()
        return rates

    async def watch() -> list[tuple[float, float]]:
        live.start()
        try:
            return [await watched(20, busy=False), await watched(20, busy=True)]
        finally:
            live.stop()

    for made, looks in anyio.run(watch):
        assert looks >= 0.5
        assert made <= 1.34, "at most one more in three seconds"


def _beat(database: Database, run_id: UUID) -> None:
    """An event, with the message that wakes the dispatcher."""
    with database.begin() as connection:
        events.append(connection, Fact("run.paused", run_id))
        events.wake_dispatcher(connection)


def test_open_streams_are_checked_in_one_query_of_a_look(web: Web) -> None:
    secrets = [users.add_token(web.database, name, Scope.READ)[0] for name in ("carol", "dave")]
    access, live, seen = Access(web.database), web.app.state.services.live, Counter[str]()
    begun: list[int] = []
    event.listen(web.database.engine, "begin", lambda connection: begun.append(1))

    async def pieces() -> AsyncIterator[int]:
        for number in range(400):
            await anyio.sleep(0.01)
            yield number

    async def stream(secret: str) -> None:
        request = HTTPConnection({"type": "http", "headers": [(b"authorization", f"Bearer {secret}".encode())]})
        async for _ in access.lasting(request, WebUser("carol", frozenset()), pieces()):
            seen[secret] += 1

    async def watch() -> None:
        live.start(access.check_streams)
        async with anyio.create_task_group() as group:
            for secret in [*secrets] * 10:
                group.start_soon(stream, secret)
            await anyio.sleep(0.5)
            await anyio.to_thread.run_sync(users.revoke, web.database, "carol")
        live.stop()

    anyio.run(watch)
    assert len(begun) <= live.looks + 1, "the revocation, and the looks"
    assert 0 < seen[secrets[0]] < 3000
    assert seen[secrets[1]] == 4000


# --- Without a server -----------------------------------------------------------------------------------------------


def test_a_bundle_holds_all_of_a_run_and_nothing_else(web: Web, tmp_path: Path) -> None:
    run_id, other = web.reports.run("night", NIGHT), web.reports.run("other", {"click-9": verdict(1.0)})
    assert write_bundle(web.settings, web.database, run_id, tmp_path / "night", print) > 20
    pages = {file.relative_to(tmp_path / "night").as_posix(): file for file in (tmp_path / "night").rglob("*.html")}
    whole = "".join(file.read_text() for file in pages.values())
    assert f"runs/{run_id}.html" in pages
    assert "no image 17" in whole
    assert str(other) not in whole
    assert "click-9" not in whole
    assert "<form" not in whole
    assert 'href="/' not in whole
    for name, file in pages.items():
        for link in re.findall(r'(?:href|src)="([^"#]+)', file.read_text()):
            assert (file.parent / link).is_file(), f"{name}: {link}"
    assert list((tmp_path / "night").glob("api/v1/attempts/*/artifacts/patch.txt"))
    assert len((tmp_path / "night" / "results.jsonl").read_text().splitlines()) == 5
    with pytest.raises(ExportRefused):
        write_bundle(web.settings, web.database, run_id, tmp_path / "night", print)


@pytest.mark.parametrize("leaves", [False, True])
def test_an_export_is_sent_in_pieces_and_leaves_nothing(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    run_id = web.reports.run("night", {f"click-{n}": verdict(1.0) for n in range(6)})
    for one in results.results(web.database, results.task_ids(web.database, run_id)):
        web.reports.store.put(f"runs/{run_id}/{one.attempts[0].id}/trajectory", b" " * (8 << 20))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    secret, _ = users.add_token(web.database, "default", Scope.ADMINISTER)
    headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {secret}".encode())]
    scope = {"type": "http", "method": "GET", "path": f"/api/v1/runs/{run_id}/export", "headers": headers}
    sizes: list[int] = []

    async def receive() -> NoReturn:
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        sizes.append(len(message.get("body", b"")))
        if leaves and len(sizes) > 3:
            raise OSError("gone")

    tracemalloc.start()
    try:
        with suppress(OSError):
            anyio.run(web.app, scope | {"query_string": b"format=atif"}, receive, send)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (sum(sizes) > 48 << 20, max(sizes) <= 1 << 20, peak < 24 << 20) == (not leaves, True, True), (sizes, peak)
    assert list(tmp_path.glob("megaflow-export-*")) == []


# --- What a reader of the pages found -------------------------------------------------------------------------------


def test_a_stream_ends_with_the_token_and_a_user_has_a_bounded_number(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = accepted(web.database, 1)
    monkeypatch.setattr("app.web.live._ALIVE_S", 0.2)
    secret, _ = users.add_token(web.database, "carol", Scope.ADMINISTER)
    with web.stranger(headers={"authorization": f"Bearer {secret}"}) as client:
        threading.Timer(1.0, users.revoke, (web.database, "carol")).start()
        client.get(f"/api/v1/events?run={run.run_id}")  # returns when the stream ends
    monkeypatch.setattr("app.web.access._MOST_OPEN", 0)
    with web.user() as client:
        assert client.get(f"/live/runs/{run.run_id}").status_code == 429


def test_a_user_has_a_bounded_number_of_waits(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.web.access._MOST_OPEN", 2)
    run = accepted(web.database, 1)
    asked = {"task_ids": [str(run.task_ids[0])], "timeout_s": 2}
    with web.user() as client, ThreadPoolExecutor(5) as several:
        replies = list(several.map(lambda _: client.post("/api/v1/tasks/wait", json=asked), range(5)))
        assert sorted(one.status_code for one in replies) == [200, 200, 429, 429, 429]
        refused = next(one for one in replies if one.status_code == 429)
        assert "expected at most 2 open waits of default, found as many" in error_of(refused)[1]
        asked["timeout_s"] = 0
        assert client.post("/api/v1/tasks/wait", json=asked).status_code == 200, "an end gives its place back"


def test_another_host_is_refused(web: Web) -> None:
    with web.stranger() as client:
        for host in ("evil.example", "flow.example.org:80", "127.0.0.1.evil.example"):
            assert client.get("/runs", headers={"host": host}, follow_redirects=False).status_code == 421
        found = client.get("/runs", follow_redirects=False)
        assert found.headers["location"] == "/sign-in?next=%2Fruns"


def test_a_user_sees_no_limits_of_others(web: Web) -> None:
    limits.set_limit(web.database, "model_requests:user:bob", 3)
    limits.set_limit(web.database, "model_requests:user:alice", 4)
    with web.user("alice", Scope.READ) as alice:
        shown = {one["name"] for one in alice.get("/api/v1/limits").json()}
        assert "model_requests:user:bob" not in shown
        assert "bob" not in alice.get("/models").text
        assert "model_requests:user:alice" in shown


def test_names_and_numbers_beyond_all_bounds_are_refused_in_words(web: Web) -> None:
    run = accepted(web.database, 1)
    task = a_task().model_dump(mode="json")
    with web.user("bob", Scope.SUBMIT) as bob:
        assert bob.get("/api/v1/events", params={"task": "a/" * 500, "follow": "false"}).status_code == 404
        for changes in ({"agent": "x" * 1_000_000}, {"idempotency_key": "k" * 100_000}, {"max_running": 10**30}):
            found = bob.post("/api/v1/runs", json={"tasks": [task], "agent": "nop", **changes})
            assert (found.status_code, len(found.text) < 2000) == (422, True)
        far = bob.post("/api/v1/runs", json={"tasks": [task], "agent": "nop", "available_at": "9999-12-31T23:59:59Z"})
        assert (far.status_code, "ten years" in far.text) == (422, True)
        task["environment"]["tools"] = ["../../../etc"]
        path = bob.post("/api/v1/runs", json={"tasks": [task], "agent": "nop"})
        assert (path.status_code, "tools" in path.text) == (422, True)
    with web.user() as client:
        assert client.get(f"/runs/{run.run_id}/at/{'9' * 30}/1").status_code == 404
        assert client.get(f"/runs/{run.run_id}/at/0/{'9' * 5000}").status_code == 404


@pytest.mark.parametrize(
    "samples",
    [
        7, [], {"agent": None}, {"agent": {"rows": 7, "marks": [[]]}},
        {"agent": {"rows": [[1], "x", [None, 1, 1], [-1, 1e300, "x"]]}},
        {"agent": {"since": "x", "rows": [[1, True, None]], "marks": [["x", 1], 7]}},
    ],
)  # fmt: skip
def test_samples_of_another_shape_are_left_out(web: Web, samples: object) -> None:
    path = _with_samples(web, samples)
    with web.user() as client:
        found = client.get(path)
        assert (found.status_code, "uPlot" in found.text) == (200, False)


def test_commands_of_another_shape_are_left_out(web: Web) -> None:
    rows = [[0, 1, "agent", "", "ls"], [2, 1, "agent", "", "x"], [0, 1e99, "a", "", "x"], "row", [0, 1, None, "", "x"]]
    header = json.loads(HEADER) | {"commands": rows}
    path = _with(web, "terminal", json.dumps(header).encode() + b'\n[0, "o", "hello"]\n')
    with web.user() as client:
        found = client.get(f"{path}/terminal").text
        assert (found.count("/terminal?at="), "data-recording" in found) == (1, True)
