"""What a submitter may not reach through a submission: files of the server, its keys, its hosts, others' runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from httpx import Response
from starlette.testclient import TestClient

from app.ledger import model_replicas, results
from app.ledger.model_replicas import NewReplica
from app.ledger.users import Scope
from app.models.spec import EnvironmentKind, EnvironmentSpec, TestsGoal
from app.settings import Settings
from tests.building import a_task
from tests.integration.test_reports import NIGHT
from tests.integration.web_fixture import Web, error_of, web
from tests.services import MakeSettings

__all__ = ["web"]

ENGINE = "http://engine.example.org:8000/v1"


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(model_base_url=ENGINE, model_api_key_env="SERVER_KEY")


def _refused(client: TestClient, body: object, status: int, word: str) -> Response:
    """The answer to a submission, with this status and this word, which may be the error's class."""
    found = client.post("/api/v1/runs", json=body)
    assert (found.status_code, word in found.text) == (status, True), (body, found.text)
    return found


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of the server that only an administrator may name."""
    file = tmp_path / "rows.jsonl"
    row = {"instance_id": "x", "problem_statement": "p", "test_cmd": "t", "log_parser": "pytest", "image_name": "i"}
    file.write_text(json.dumps(row))
    return file


def test_a_path_of_the_server_is_for_administrators(web: Web, rows: Path) -> None:
    paths = [rows, rows.parent, f"swe-gym={rows}", f"demo,{rows}", "/etc/passwd", "~", "./demo", "swe-gym@../../x"]
    with web.user("bob", Scope.SUBMIT) as bob:
        for path in paths:
            found = _refused(bob, {"submission": {"dataset": str(path), "agent": "nop"}}, 422, "DatasetUnknown")
            assert "No such" not in found.text  # and not whether it is there
            assert "nothing at" not in found.text
        page = bob.post("/submit", data={"dataset": str(rows), "agent": "nop"})
        assert (page.status_code, "only administrators" in page.text) == (422, True)
    with web.user() as owner:
        found = owner.post("/api/v1/runs", json={"submission": {"dataset": str(rows), "agent": "nop"}})
        assert "only administrators" not in found.text
        assert bob.get("/api/v1/runs").json() == []


def test_the_servers_key_goes_to_no_url_of_a_submitter(web: Web) -> None:
    task = a_task().model_dump(mode="json")
    mine = "http://bob.example.org:8000/v1"
    models = [
        {"name": "m", "base_url": mine},
        {"name": "m", "base_url": mine, "api_key_env": "SERVER_KEY"},
        {"name": "m", "api_key_env": "OTHER_KEY"},
        {"name": "m", "base_url": "http://127.0.0.1:6379"},
    ]
    with web.user("bob", Scope.SUBMIT) as bob:
        for model in models:
            for body in (
                {"tasks": [task], "agent": "mini-swe-agent", "model": model},
                {"submission": {"dataset": "demo", "agent": "mini-swe-agent", "model": model}},
            ):
                _refused(bob, body, 422, "registered")
        named = {"tasks": [task], "agent": "mini-swe-agent", "model": "m"}
        assert bob.post("/api/v1/runs", json=named).status_code == 200
        model_replicas.add(web.database, NewReplica("bobs", mine))
        listed = named | {"model": {"name": "m", "base_url": mine}}
        assert bob.post("/api/v1/runs", json=listed).status_code == 200
    with web.user() as owner:
        own = {"name": "m", "base_url": "http://owner.example.org:8000/v1"}
        made = owner.post("/api/v1/runs", json={"tasks": [task], "agent": "mini-swe-agent", "model": own})
        assert made.status_code == 200, made.text


def test_environments_that_are_not_configured_are_refused_with_those_that_are(web: Web) -> None:
    pod = EnvironmentSpec(kind=EnvironmentKind.KUBERNETES, image="none")
    task = a_task().model_copy(update={"environment": pod}).model_dump(mode="json")
    bodies = (
        {"tasks": [task], "agent": "nop"},
        {"submission": {"dataset": "demo", "agent": "nop", "environment": "kubernetes"}},
    )
    for scope in (Scope.SUBMIT, Scope.ADMINISTER):
        with web.user("bob", scope) as bob:
            for body in bodies:
                found = _refused(bob, body, 422, "OptionInvalid")
                assert "this installation has ('docker', 'oci'), found 'kubernetes'" in error_of(found)[1]


def test_no_submitter_runs_commands_on_the_workers_host(web: Web) -> None:
    here = EnvironmentSpec(kind=EnvironmentKind.LOCAL, image="none")
    task = a_task().model_copy(update={"environment": here}).model_dump(mode="json")
    with web.user("bob", Scope.SUBMIT) as bob:
        for body in (
            {"tasks": [task], "agent": "nop"},
            {"submission": {"dataset": "demo", "agent": "nop", "environment": "local"}},
        ):
            _refused(bob, body, 403, "NotAllowed")
    with web.user() as owner:
        assert owner.post("/api/v1/runs", json={"tasks": [task], "agent": "nop"}).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost", "169.254.169.254", "[::1]:80", "[64:ff9b::7f00:1]"])
def test_no_submitters_task_reaches_an_inner_network(web: Web, host: str) -> None:
    names = {"network": "allowlist", "allowed_hosts": ["*.example.org", "example.com:8443"]}
    inner = names | {"allowed_hosts": ["example.org", host]}
    task, image = a_task().model_dump(mode="json"), a_task().environment.model_dump(mode="json")
    with web.user("bob", Scope.SUBMIT) as bob:
        for changes in (
            {"environment": image | inner},
            {"environment": image | {"grading": inner}},
            {"goal": {**task["goal"], "environment": image | inner}},
        ):
            found = _refused(bob, {"tasks": [task | changes], "agent": "nop"}, 403, "NotAllowed")
            assert host in found.json()["error"]["message"]
        for asked in (
            {"tasks": [task], "agent": "nop", "overrides": inner},
            {"submission": {"dataset": "demo", "agent": "nop", "overrides": inner}},
        ):
            _refused(bob, asked, 403, "NotAllowed")
        outer = {"tasks": [task | {"environment": image | names}], "agent": "nop"}
        assert bob.post("/api/v1/runs", json=outer).status_code == 200
    with web.user() as owner:
        meant = {"tasks": [task | {"environment": image | inner}], "agent": "nop"}
        assert owner.post("/api/v1/runs", json=meant).status_code == 200


def test_a_nul_anywhere_in_a_task_is_refused_and_its_six_characters_are_text(web: Web) -> None:
    goal = TestsGoal(base_commit="HEAD", test_command="true", fail_to_pass=("t",), pass_to_pass=())
    task = a_task().model_dump(mode="json")
    for text, status in (("a\0b", 422), ("a\\u0000b", 200), ("a\\\0b", 422)):
        row = goal.model_copy(update={"row": {"x": [text]}}).model_dump(mode="json")
        with web.user("bob", Scope.SUBMIT) as bob:
            found = bob.post("/api/v1/runs", json={"tasks": [task | {"goal": row}], "agent": "nop"})
            assert found.status_code == status, found.text
            assert ("NUL" in found.text) is (status == 422)


def test_a_submission_reads_no_run_of_another_user(web: Web) -> None:
    night = web.reports.run("night", NIGHT)
    rates = {"pass_rate": "0<=p", "pass_rate_from": "night"}
    bodies = (
        {"submission": {"dataset": "demo", "agent": "nop", "selection": rates}},
        {"tasks": [a_task().model_dump(mode="json")], "agent": "replay", "model": "recording:night"},
        {"submission": {"dataset": "demo", "agent": "replay", "model": {"name": "recording:night"}}},
    )
    with web.user("bob", Scope.SUBMIT) as bob:
        for body in bodies:
            _refused(bob, body, 404, "UnknownName")
        web.owned_by(night, "bob")
        made = bob.post("/api/v1/runs", json=bodies[1])
        assert made.status_code == 200, made.text
    (kept,) = results.results(web.database, [UUID(made.json()["task_ids"][0])])
    assert kept.model == f"recording:{night}"


def test_a_recording_is_played_to_its_own_user_alone(web: Web) -> None:
    night = web.reports.run("night", NIGHT)
    task = a_task().model_dump(mode="json")

    def asked(name: str, *beside: str) -> dict[str, object]:
        return {"tasks": [task], "agent": "mini-swe-agent", "model": {"name": name, "side_models": list(beside)}}

    with web.user("bob", Scope.SUBMIT) as bob:
        for name in ("night", "no-such", str(night)):
            for body in (asked(f"replay:{name}"), asked(f"x/replay:{name}"), asked("replay", f"replay:{name}")):
                found = _refused(bob, body, 404, "UnknownName")
                assert error_of(found)[1].replace(name, "") == error_of(found)[1].partition(name)[0] + (
                    "': expected a recorded run of your own after 'replay:', found none; scripts go by the"
                    " name 'scenario-SCRIPT'; nothing was submitted"
                )
        assert bob.post("/api/v1/runs", json=asked("replay")).status_code == 200
        web.owned_by(night, "bob")
        assert bob.post("/api/v1/runs", json=asked("replay:night")).status_code == 404
        (web.settings.recordings / str(night)).mkdir(parents=True)
        made = bob.post("/api/v1/runs", json=asked("replay:night"))
        assert made.status_code == 200, made.text
    (kept,) = results.results(web.database, [UUID(made.json()["task_ids"][0])])
    assert kept.model == f"replay:{night}"


def test_replicas_and_priority_are_bounded_for_inline_tasks_and_datasets_alike(web: Web) -> None:
    inline: dict[str, Any] = {"tasks": [a_task().model_dump(mode="json")], "agent": "nop"}
    dataset = {"dataset": "demo", "agent": "nop"}
    with web.user("bob", Scope.SUBMIT) as bob:
        for replicas in (2_000_000_000, 60_000, [2, 2_000_000_000]):
            _refused(bob, {**inline, "replicas": replicas, "purpose": "training"}, 422, "10000")
        assert bob.post("/api/v1/runs", json={"submission": {**dataset, "replicas": 60_000}}).status_code == 422
        _refused(bob, {**inline, "tasks": inline["tasks"] * 101, "replicas": 10_000}, 422, "1010000")
        for body in ({**inline, "priority": 1}, {"submission": {**dataset, "priority": 1_000_000}}):
            _refused(bob, body, 403, "at most 0")
        assert bob.post("/api/v1/runs", json={**inline, "priority": -1}).status_code == 200
    with web.user() as owner:
        assert owner.post("/api/v1/runs", json={**inline, "priority": 1}).status_code == 200


def test_a_name_means_the_users_own_run(web: Web) -> None:
    own = web.reports.run("night", NIGHT)
    web.owned_by(own, "bob")
    other = web.reports.run("night", NIGHT)
    with web.user("bob", Scope.SUBMIT) as bob:
        for name in ("night", "latest", str(own)[-12:]):
            assert bob.get(f"/api/v1/runs/{name}").json()["id"] == str(own)
        assert bob.get("/api/v1/tasks/click-1").json()["run_id"] == str(own)
        found = bob.get(f"/api/v1/runs/{other}")
        assert found.status_code == 404
        web.reports.run("secretly", NIGHT)
        assert "secretly" not in bob.get("/api/v1/runs/secretl").text.replace("'secretl'", "")
    with web.user() as owner:
        assert owner.get("/api/v1/runs/night").json()["id"] == str(other)


def test_what_clients_ask_is_of_the_users_own_runs(web: Web) -> None:
    night = web.reports.run("night", NIGHT)
    task = results.task_ids(web.database, night)[0]
    web.owned_by(night, "alice")
    paths = (
        f"find?run={night}", f"find?task={task}", "find?task=night/click-1", f"progress?run={night}",
        f"runs/{night}/notes", f"runs/{night}/transcripts", f"tasks/{task}/events",
        f"usage?run={night}",
    )  # fmt: skip
    waited = {"task_ids": [str(task)], "timeout_s": 0.1}
    with web.user("bob", Scope.SUBMIT) as bob:
        for path in paths:
            assert bob.get(f"/api/v1/{path}").status_code == 404, path
        assert bob.post("/api/v1/tasks/wait", json=waited).status_code == 404
        assert bob.get("/api/v1/usage").json() == []
        assert bob.get("/api/v1/usage?user=alice").status_code == 403
        bob.headers.pop("authorization")
        for path in paths:
            assert bob.get(f"/api/v1/{path}").status_code == 401, path
    with web.user("alice", Scope.READ) as alice:
        for path in paths:
            assert alice.get(f"/api/v1/{path}").status_code == 200, path
        assert alice.post("/api/v1/tasks/wait", json=waited).json() == {"task_ids": [str(task)]}
        assert alice.post("/api/v1/tasks/results", json={"task_ids": [str(task)]}).json()[0]["name"] == "click-1"
        assert [one["key"] for one in alice.get("/api/v1/usage?by=user").json()] == ["alice"]
        assert alice.get("/api/v1/find?run=night").json() == str(night)
        assert alice.get("/api/v1/find").status_code == 422
