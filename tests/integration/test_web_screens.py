"""What the screens say of tasks, and that their counts lead to the rows behind them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import unescape
from pathlib import Path

from starlette.testclient import TestClient
from uuid_utils import compat as uuids

from app.ledger import instances, model_replicas, pressure, results, validations
from app.ledger.database import sql
from app.ledger.instances import InstanceDemand
from app.ledger.model_replicas import NewReplica
from app.ledger.pressure import EngineLoad
from app.ledger.users import Scope
from app.models.instance import InstanceMode
from app.models.outcome import Failure
from app.models.validation import ValidationState
from app.web.server import application
from tests.building import accepted, claimed, ready_instance
from tests.integration.rows import a_call
from tests.integration.test_reports import NIGHT, SUSPECT, verdict
from tests.integration.test_validations import known
from tests.integration.web_fixture import Web, web

__all__ = ["web"]


def _text(page: str) -> str:
    """Without tags and with single spaces."""
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def test_replicas_that_disagree_are_flaky_and_others_are_not(web: Web) -> None:
    run_id = web.reports.run("night", {"click-1": verdict(1.0)}, replicas=3)
    first, second, third = results.task_ids(web.database, run_id)
    with web.user() as client:
        assert "flaky" not in client.get(f"/tasks/{first}").text
        with web.database.begin() as connection:
            wrong = "UPDATE tasks SET verdict = jsonb_set(verdict, '{reward}', '0') WHERE id = :id"
            sql(connection, wrong, {"id": second})
        for task_id in (first, second, third):
            assert "flaky : 2 of 3 scored replicas solved it" in _text(client.get(f"/tasks/{task_id}").text)


def test_a_task_says_whether_its_score_may_be_counted_on(web: Web) -> None:
    run_id = web.reports.run("night", {"click-1": verdict(1.0)})
    (task_id,) = results.task_ids(web.database, run_id)
    task = results.task_spec(web.database, task_id).task
    with web.user() as client:
        assert "not validated : whether its score may be counted on is unknown" in _text(
            client.get(f"/tasks/{task_id}").text
        )
        validations.record(web.database, [known(task, ValidationState.QUARANTINED, "sha256:a", "nop got 1")])
        page = _text(client.get(f"/tasks/{task_id}").text)
        assert "quarantined : nop got 1" in page
        assert "flaky tests : t::a" in page


def test_each_attempt_is_listed_with_its_reason(web: Web) -> None:
    broken = Failure(error="ImageUnavailable", message="no image 17")
    outcomes = {"click-1": verdict(0.0), "click-2": broken, "click-3": SUSPECT}
    reasons = ["reward 0", "ImageUnavailable: no image 17", "suspect: conftest-hook; reward 0"]
    with web.user() as client:
        for task_id, reason in zip(
            results.task_ids(web.database, web.reports.run("night", outcomes)), reasons, strict=True
        ):
            attempts = client.get(f"/tasks/{task_id}").text.partition("<h2>Attempts</h2>")[2].partition("</table>")[0]
            assert reason in _text(attempts)


def _rows(client: TestClient, path: str) -> set[str]:
    """Names of the tasks that a page lists."""
    return set(re.findall(r'<td><a href="/tasks/[-0-9a-f]+">([^<]+)</a></td>', client.get(path).text))


def test_counts_of_the_fleet_and_of_a_run_lead_to_their_rows(web: Web) -> None:
    run_id = web.reports.run("night", NIGHT)
    claim = claimed(web.database)
    accepted(web.database, 2)
    mine, night = f"/runs/{run_id}", {f"click-{n}" for n in range(1, 6)}
    links = {
        "/tasks?state=pending": {"example-0", "example-1"},
        "/tasks?hour=ended": night,
        "/tasks?hour=lost": {"click-5"},
        f"/tasks?instance={claim.instance_id}": {"example-0"},
        "/tasks?holds=slots%3Apersistent.standard": {"example-0"},
        f"{mine}?outcome=scored#tasks": night - {"click-5"},
        f"{mine}?end=environment_error#tasks": {"click-5"},
    }
    with web.user() as client:
        pages = client.get("/").text + client.get(mine).text
        for path, names in links.items():
            assert (_rows(client, path), f'href="{path}"' in pages) == (names, True), path
        assert _rows(client, "/tasks?state=pending&user=default&mode=persistent&class=large") == set()
    with web.user("alice", Scope.READ) as client:
        assert _rows(client, "/tasks?user=default") == set()


def test_the_fleet_tells_what_stands_where_and_what_it_costs(web: Web, tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("process: {types: {standard: 0.25}}\n")
    web.app = application(web.settings.model_copy(update={"instance_prices": prices}), web.database)
    claim = claimed(web.database)
    ready_instance(web.database)
    unpriced = InstanceDemand("docker", InstanceMode.PERSISTENT, "standard", 2, 1, None)
    with web.database.begin() as connection:
        sql(connection, "UPDATE instances SET host = 'host-b' WHERE id = :id", {"id": claim.instance_id})
        instances.request(connection, unpriced)
    rows = "/tasks?mode=persistent&amp;class=standard&amp;host=host-b"
    with web.user() as client:
        page = client.get("/").text
        hosts = _text(page.partition('id="hosts"')[2].partition("<h2>")[0])
        assert "host-b persistent standard 1 process 1 4 $0.2500 unknown persistent standard" in hosts
        assert "1 process 0 4 $0.2500" in hosts
        assert "1 docker 0 2 unknown" in hosts
        assert "$0.5000 for instances by the hour, without those of unknown price" in _text(page)
        assert (f'href="{rows}"' in page, _rows(client, unescape(rows))) == (True, {"example-0"})
        prices.write_text("process: cheap")
        assert "unknown for instances by the hour" in _text(client.get("/").text)
    with web.user("alice", Scope.READ) as client:
        assert "host-b" not in client.get("/").text


def test_models_tell_what_each_engine_does_now(web: Web) -> None:
    for name in ("full", "idle"):
        model_replicas.add(web.database, NewReplica(name, f"http://{name}.test/v1", policy_version=f"of-{name}"))
    load = EngineLoad("http://full.test/v1", ("full",), inside=7, waiting=2, queued=3, refused=4, kv_use=0.93)
    pressure.report_engines(web.database, "gateway", [load])
    call = {"replica": load.url, "model": "full"}
    a_call(web.database, cost_usd=None, **call, status=429, end_kind="upstream_busy", retries=5, waited={"model": 61.0})
    with web.user() as client:
        rows = client.get("/models").text.partition("<h2>Limits")[0].split("<tr>")[2:]
    assert "full any http://full.test/v1 active of-full 7 5 93.0 % 1 1 and 4 just now 5 1m01s" in _text(rows[0])
    assert "idle any http://idle.test/v1 active of-idle none reported none reported unknown 0 0 0" in _text(rows[1])


def test_counts_of_models_limits_and_comparisons_lead_to_their_rows(web: Web) -> None:
    first = web.reports.run("one", {"click-1": verdict(1.0), "click-2": verdict(0.0)})
    second = web.reports.run("two", {"click-1": verdict(0.0), "click-2": verdict(0.0)})
    model_replicas.add(web.database, NewReplica("full", "http://full.test/v1"))
    claim, waits = claimed(web.database), claimed(web.database)
    call = {"replica": "http://full.test/v1", "model": "full", "id": uuids.uuid7(), "user_name": "bob"}
    a_call(web.database, cost_usd=None, **call, task_id=claim.task_id, run_id=claim.run_id)
    holders = """INSERT INTO semaphore_holders (limit_name, holder, attempt_id, granted_at, expires_at)
        VALUES ('image_builds:h', :id, :id, :granted, clock_timestamp() + interval '1 minute')"""
    with web.database.begin() as connection:
        sql(connection, "UPDATE tasks SET name = 'waits' WHERE id = :id", {"id": waits.task_id})
        sql(connection, holders, {"id": claim.attempt_id, "granted": datetime.now(UTC)})
        sql(connection, holders, {"id": waits.attempt_id, "granted": None})
    both, flips = {"click-1", "click-2"}, f"/compare?first={first}&second={second}"
    links = {
        "/models": {
            "/tasks?model=full": {"example-0"}, "/tasks?engine=http%3A//full.test/v1": {"example-0"},
            "/tasks?user=bob": set(),
        },
        "/": {"/tasks?waits=image_builds%3Ah": {"waits"}, "/tasks?holds=image_builds%3Ah": {"example-0"}},
        f"/runs/{first}": {f"/runs/{first}?outcome=scored#tasks": both},
        flips: {
            f"/runs/{first}?outcome=scored#tasks": both, f"/runs/{second}?outcome=scored#tasks": both,
            f"/runs/{first}?name=click-1#tasks": {"click-1"}, f"/runs/{second}?name=click-1#tasks": {"click-1"},
        },
    }  # fmt: skip
    with web.user() as client:
        for place, expected in links.items():
            page = unescape(client.get(place).text)
            for path, names in expected.items():
                assert (f'href="{path}"' in page, _rows(client, path)) == (True, names), (place, path)
        assert ('href="#flips"' in page, 'id="flips"' in page) == (True, True)
        assert f'<a href="/runs/{first}?outcome=scored#tasks"><b>50.0 %' in client.get(f"/runs/{first}").text
