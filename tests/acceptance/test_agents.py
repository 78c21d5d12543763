"""Any agent, any model, as a user runs them: real frameworks, the gateway, recorded and replayed conversations."""

from __future__ import annotations

import io
import json
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.acceptance.conftest import System
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.agents, pytest.mark.timeout(900)]

FRAMEWORKS = {
    "mini-swe-agent",
    "claude-code",
    "qwen-code",
    "openhands",
    "swe-agent",
    "sketch",  # a manifest
}
TASKS = ("pallets__itsdangerous-1", "csv-to-jsonl")  # a repository to fix, a terminal task


def _submit(system: System, agent: str, mode: str, *more: str, timeout_s: float = 600) -> dict[str, Any]:
    only = [part for name in TASKS for part in ("--task", name)] if "--task" not in more else []
    asked = ("submit", "demo", "--agent", agent, "--model", "replay", "--mode", mode, "--wait", *only, *more)
    return dict(system.json(*asked, timeout_s=timeout_s))


def _artifact(result: dict[str, Any], kind: str) -> bytes:
    (found,) = [artifact for artifact in result["attempts"][-1]["artifacts"] if artifact["kind"] == kind]
    assert found["missing"] is None, (result["agent"], found)
    return Path(found["url"].removeprefix("file://")).read_bytes()


@pytest.mark.extra
@pytest.mark.parametrize("mode", ["ephemeral", "persistent"])
def test_every_framework_solves_tasks_through_the_gateway_and_leaves_its_evidence(system: System, mode: str) -> None:
    found = _submit(system, "all", mode)
    results = found["results"]
    assert {(r["agent"], r["name"]) for r in results} == {(a, t) for a in FRAMEWORKS for t in TASKS}
    ends = {(r["agent"], r["name"]): (r["verdict"] and r["verdict"]["reward"], r["end_reason"]) for r in results}
    assert set(ends.values()) == {(1.0, "submitted")}, ends
    for result in results:
        told = json.loads(_artifact(result, "trajectory"))
        assert told["schema_version"].startswith("ATIF-v1")
        assert told["agent"]["name"] == result["agent"]
        assert any(step.get("tool_calls") or step["source"] == "agent" for step in told["steps"])
        assert zstandard.ZstdDecompressor().stream_reader(io.BytesIO(_artifact(result, "model_calls"))).read()
        tar = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(_artifact(result, "agent_files"))).read()
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            assert archive.getnames()
        assert _artifact(result, "agent_log") or result["agent"] == "swe-agent", "its stand-in prints nothing"
        if result["name"] == TASKS[0]:
            assert b"diff --git" in _artifact(result, "patch")
        assert (result["scripted"], result["model"], told["extra"]["scripted"]) == (True, "replay", True)
        usage = result["attempts"][-1]["environment"]["usage"]
        assert usage["model_calls"] >= usage["turns"] >= 1
        assert usage["prompt_tokens"] > 0
        assert usage["completion_tokens"] > 0
        assert usage["cost_usd"] == 0.0  # the replay engine is free, and known to be
    (status,) = found["runs"]
    assert (status["scored"], status["scripted_resolved"], status["mean_reward"]) == (0, len(results), None)
    rows = system.json("usage", found["runs"][0]["id"], "--by", "agent")
    assert {row["key"] for row in rows} == FRAMEWORKS


@pytest.mark.extra
def test_a_recorded_run_replays_to_identical_patches_and_verdicts(system: System) -> None:
    recorded = _submit(system, "mini-swe-agent,claude-code", "persistent")
    (run,) = recorded["runs"]
    for agent in ("mini-swe-agent", "claude-code"):
        told = {r["name"]: r for r in recorded["results"] if r["agent"] == agent}
        asked = ("--agent", "replay", "--model", f"recording:{run['id']}@{agent}", "--mode", "persistent", "--wait")
        only = [part for name in TASKS for part in ("--task", name)]
        replayed = {r["name"]: r for r in system.json("submit", "demo", *asked, *only, timeout_s=600)["results"]}
        assert told.keys() == replayed.keys() == set(TASKS)
        for name, result in replayed.items():
            assert result["verdict"], (result["end_reason"], result["failure"])
            assert result["verdict"]["reward"] == told[name]["verdict"]["reward"] == 1.0
            assert result["verdict"]["tests"] == told[name]["verdict"]["tests"]
        assert _artifact(replayed[TASKS[0]], "patch") == _artifact(told[TASKS[0]], "patch")


@pytest.mark.extra
def test_a_killed_gateway_costs_no_task_its_score(system: System) -> None:
    agents = ("--agent", "mini-swe-agent,qwen-code", "--model", "scenario-slow")
    run_id = system.json("submit", "demo", *agents, "--task", TASKS[1], "--replicas", "2")["run_id"]
    calls = "SELECT 1 FROM model_calls WHERE run_id = :r"
    eventually(lambda: len(system.rows(calls, r=run_id)) >= 4, within_s=120)
    os.kill(system.pid("gateway"), signal.SIGKILL)
    results = system.results(run_id, 300)
    assert [(r.reward, r.end_reason) for r in results] == [(1.0, "submitted")] * 4
    for result in results:
        for attempt in result.attempts[:-1]:
            assert attempt.verdict is None  # an attempt that the gateway's death ended was not scored
