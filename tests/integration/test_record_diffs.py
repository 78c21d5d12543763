"""`--record-diffs`: from the submission to the artifact and the trajectory's page; nothing on runs that do not ask."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest

from app.artifacts import open_store
from app.client import MegaFlow
from app.evaluation import demo_tasks
from app.ledger import results
from app.ledger.accept import Accepted
from app.ledger.database import sql
from app.models.endings import EndReason
from app.models.outcome import ArtifactKind
from app.models.spec import EnvironmentKind, Mode
from app.settings import Settings
from app.workers import services
from app.workers.attempt import carry_out
from app.workers.lease import StopToken
from tests.building import claim_of
from tests.integration.command import CommandLine
from tests.integration.test_reports import verdict
from tests.integration.web_fixture import Web, web
from tests.services import MakeSettings

__all__ = ["web"]


@pytest.fixture
def settings(make_settings: MakeSettings, tmp_path: Path) -> Settings:
    return make_settings(artifacts_url=f"file://{tmp_path / 'artifacts'}")


def test_a_run_that_asks_keeps_the_diffs_of_its_attempts_and_its_verdict(settings: Settings) -> None:
    task = next(one for one in demo_tasks(settings, EnvironmentKind.LOCAL) if one.name == "lost-settings")
    here, found = services.build(settings, pooled=True, max_idle=0), {}
    with MegaFlow(settings) as flow:
        for asked in (True, False):
            handle = flow.enqueue(task, agent="oracle", mode=Mode.EPHEMERAL, record_diffs=asked)
            claim = claim_of(flow.database, Accepted(handle.run_id, (handle.task_id,)), Mode.EPHEMERAL)
            assert carry_out(claim, here, StopToken()) is EndReason.SUBMITTED
            (result,) = flow.run(handle.run_id).results(timeout=10)
            assert result.reward == 1.0
            found[asked] = {one.kind: one for one in result.artifacts}
    here.close()
    assert ArtifactKind.STEP_DIFFS not in found[False]
    store = open_store(settings.artifacts())
    kept, patch = (store.get(str(found[True][kind].key)) for kind in (ArtifactKind.STEP_DIFFS, ArtifactKind.PATCH))
    lines, whole = [orjson.loads(line) for line in kept.splitlines()], patch.decode()
    assert whole.count("diff --git") == lines[-1]["diff"].count("diff --git") > 0


def test_the_command_asks_for_them(megaflow: CommandLine, settings: Settings) -> None:
    answer = megaflow.json("submit", "demo", "-a", "nop", "--limit", "1", "--record-diffs")
    with MegaFlow(settings) as flow:
        (task_id,) = results.task_ids(flow.database, answer["run_id"])
        assert results.task_spec(flow.database, task_id).record_diffs


def test_the_trajectory_shows_each_steps_diff_folded_and_else_the_final_patch(web: Web) -> None:
    run_id = web.reports.run("night", {"click-1": verdict(1.0)})
    (attempt,) = results.results(web.database, results.task_ids(web.database, run_id))[0].attempts
    agent = {"source": "agent", "message": "m"}
    times = (datetime.fromtimestamp(100 * n, UTC).isoformat() for n in (1, 2, 3, 4))
    steps = [{"source": "user", "message": "do"}, *({**agent, "step_id": at, "timestamp": at} for at in times)]
    base, path = f"runs/{run_id}/{attempt.id}", f"/attempts/{attempt.id}/trajectory"
    web.reports.store.put(f"{base}/trajectory", json.dumps({"steps": steps}).encode())
    with web.user() as client:
        page = client.get(path).text
        assert ("the final patch" in page, "after this step" in page) == (True, False)
        hostile = "diff --git a/x b/x\n+<script>alert(1)</script>\x1b[31m\n"
        diffs = {50: "", 150: "diff --git a/1 b/1\n+one\n", 250: hostile, 251: f"{hostile}diff --git a/y b/y\n+two\n"}
        entries = [{"at": at, "diff": diff} for at, diff in diffs.items()] + [{"at": 450, "missing": "git was slow"}]
        web.reports.store.put(f"{base}/step_diffs", b"\n".join(map(orjson.dumps, entries)))
        with web.database.begin() as connection:
            values = {"id": attempt.id, "key": f"{base}/step_diffs"}
            sql(connection, "INSERT INTO artifacts (attempt_id, kind, key) VALUES (:id, 'step_diffs', :key)", values)
        page = client.get(path).text
        web.reports.store.put(f"{base}/trajectory", json.dumps({"steps": steps[:1]}).encode())
        assert client.get(path).status_code == 200, "its model never answered"
    first, second, third, fourth = page.split('<article class="step agent"')[1:]
    assert "<summary>the repository after this step: 1 file changed</summary>" in first
    assert '<span class="added">+one</span>' in first
    assert "2 files changed" in second
    assert "after this step" not in third
    assert "no diff after this step</summary>" in fourth
    assert not any(part in page for part in ("the final patch", "<script>alert", "\x1b"))
