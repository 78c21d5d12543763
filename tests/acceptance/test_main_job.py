"""The main job as a user runs it: real datasets, both modes, real agents, graded results, evidence."""

from __future__ import annotations

import hashlib
import io
import os
import pty
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from app import evaluation
from app.client import as_completed
from app.evaluation import Submission
from app.models.spec import Mode
from tests.acceptance.conftest import MEGAFLOW, System
from tests.building import a_task
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.timeout(400)]

ROW, FOLDER = "pallets__itsdangerous-1", "csv-to-jsonl"


def _submit(system: System, agent: str, mode: str, *more: str) -> list[dict[str, Any]]:
    found = system.json("submit", "demo", "--agent", agent, "--mode", mode, "--wait", *more)
    return list(found["results"])


@pytest.mark.parametrize("mode", ["ephemeral", pytest.param("persistent", marks=pytest.mark.extra)])
def test_oracle_gets_one_and_nop_zero_on_every_demo_task(system: System, mode: str) -> None:
    # Half of the tasks in each mode and with each agent keeps this affordable; `make demo` runs them all.
    names = [task.name for task in evaluation.demo_tasks(system.settings, Submission(dataset="", agent="").environment)]
    assert len(names) >= 8
    halves = {"ephemeral": names[0::2], "persistent": names[1::2]}
    for agent, half, expected in (("oracle", mode, 1.0), ("nop", mode, 0.0)):
        only = [part for name in halves[half] for part in ("--task", name)]
        results = _submit(system, agent, mode, *only)
        assert {r["name"]: r["verdict"]["reward"] for r in results} == dict.fromkeys(halves[half], expected)
        assert {r["mode"] for r in results} == {mode}


@pytest.mark.agents
@pytest.mark.parametrize("mode", ["ephemeral", pytest.param("persistent", marks=pytest.mark.extra)])
def test_mini_swe_agent_solves_demo_tasks_and_leaves_its_trajectory_without_a_token(system: System, mode: str) -> None:
    results = _submit(system, "mini-swe-agent", mode, "--model", "replay", "--task", ROW, "--task", FOLDER)
    assert [(r["verdict"]["reward"], r["end_reason"]) for r in results] == [(1.0, "submitted")] * 2
    for result in results:
        kinds = {a["kind"]: a for a in result["attempts"][-1]["artifacts"]}
        for kind in ("trajectory", "agent_log", "test_report", "verdict"):
            stored = kinds[kind]
            content = Path(stored["url"].removeprefix("file://")).read_bytes()
            assert hashlib.sha256(content).hexdigest() == stored["sha256"]
        assert b"mini-swe-agent" in Path(kinds["trajectory"]["url"].removeprefix("file://")).read_bytes()
        assert [kind for kind, stored in kinds.items() if stored["url"] and _TOKEN.search(_content(stored))] == []
    for told in ("SELECT data::text AS told FROM events", "SELECT body AS told FROM specs"):
        assert not [row for row in system.rows(told) if _TOKEN.search(row.told.encode())]


_TOKEN = re.compile(rb"mf-[A-Za-z0-9_-]{40}")
"""Of an attempt, for its model."""


def _content(artifact: dict[str, Any]) -> bytes:
    content = Path(artifact["url"].removeprefix("file://")).read_bytes()
    if not artifact["key"].endswith(".zst"):
        return content
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content)).read()


def test_fifty_ephemeral_tasks_make_fifty_instances_none_of_which_runs_two(
    system: System, task_folder: Callable[..., Path]
) -> None:
    folder = task_folder("fifty")
    found = system.json("submit", str(folder), "--agent", "oracle", "--mode", "ephemeral", "--replicas", "50", "--wait")
    assert [r["verdict"]["reward"] for r in found["results"]] == [1.0] * 50
    instances = [r["attempts"][-1]["instance_id"] for r in found["results"] if len(r["attempts"]) == 1]
    assert len(set(instances)) == 50
    ids = {"ids": instances}
    eventually(
        lambda: system.rows(
            "SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM instances WHERE id = ANY(CAST(:ids AS uuid[]))"
            " AND state <> 'terminated')",
            **ids,
        )
    )
    ends = system.rows("SELECT exit_code, attempt_id FROM instances WHERE id = ANY(CAST(:ids AS uuid[]))", **ids)
    assert {row.exit_code for row in ends} == {0}
    assert len({row.attempt_id for row in ends}) == 50


def test_a_standing_instance_recycles_an_environment_and_nothing_of_the_last_task_is_left(
    system: System, task_folder: Callable[..., Path]
) -> None:
    leave = "touch left /tmp/left /root/.left && echo done > answer && (setsid sleep 600 >/dev/null 2>&1 &)"
    test = (
        "n=$(ls /tmp/left2 /root/.left2 2>/dev/null | wc -l); s=$(cat /proc/[0-9]*/comm | grep -c '^sleep$')\n"
        'grep -q done answer && [ "$n" = 0 ] && [ "$s" -le 2 ] && echo 1 > $OUT || echo 0 > $OUT\n'
        "touch /tmp/left2 /root/.left2"
    )
    folder = task_folder("residue", solve=leave, test=test)
    submitted = ("--agent", "oracle", "--mode", "persistent", "--replicas", "12", "--wait")
    results = system.json("submit", str(folder), *submitted)["results"]
    assert [r["verdict"]["reward"] for r in results] == [1.0] * 12
    origins = [r["attempts"][-1]["environment"]["origin"] for r in results]
    assert origins.count("recycled") >= 6


def test_the_python_api_enqueues_waits_and_reads_results(system: System, task_folder: Callable[..., Path]) -> None:
    task = system.task_of(task_folder("api"))
    run = system.flow.enqueue_many([task], agent="oracle", mode="persistent", replicas=3)
    ended = [handle.result(timeout=60).reward for handle in as_completed(run.handles, timeout=120)]
    assert ended == [1.0] * 3
    first = system.flow.enqueue(task, agent="oracle", mode=Mode.EPHEMERAL, idempotency_key="api-1")
    again = system.flow.enqueue(task, agent="oracle", mode=Mode.EPHEMERAL, idempotency_key="api-1")
    assert first.task_id == again.task_id
    result = first.result(timeout=120)
    assert result.verdict is not None
    assert result.verdict.resolved
    assert result.attempt is not None
    assert "accepted" in result.attempt.phases  # an instance that waited for another task may be older than this one
    assert list(result.attempt.phases)[-1] in ("stored", "torn_down")


def test_cancel_ends_a_running_task_and_its_container(system: System, task_folder: Callable[..., Path]) -> None:
    folder = task_folder("to-cancel", solve="sleep 300")
    run_id = system.json("submit", str(folder), "--agent", "oracle", "--mode", "persistent")["run_id"]
    running = "SELECT id FROM attempts WHERE phases ? 'agent_started' AND state = 'running'"
    eventually(lambda: system.rows(running))
    assert system.megaflow("cancel", run_id).returncode == 0
    (result,) = system.results(run_id, 10)
    assert (result.state, result.end_reason, result.reward) == ("cancelled", "cancelled", None)
    eventually(lambda: not system.rows(running), within_s=30)


def _flower(system: System, path: str) -> httpx.Response:
    password = (system.settings.home / "run" / "flower_password").read_text().strip()
    url = f"http://127.0.0.1:{system.settings.flower_port}{path}"
    return httpx.get(url, auth=(system.settings.flower_user, password), timeout=20)


def test_flower_shows_the_workers_of_both_modes(system: System) -> None:
    for mode in ("ephemeral", "persistent"):
        _submit(system, "nop", mode, "--task", ROW)

    def kinds() -> set[str]:
        workers = _flower(system, "/workers?json=1").json()["data"]
        return {re.split("[-@]", worker["hostname"])[0] for worker in workers}

    eventually(lambda: {"persistent", "control"} <= kinds())

    def queues() -> set[str]:
        """Flower asks the workers anew, and gives them a second to answer: a busy machine may need more than one."""
        _flower(system, "/api/workers?refresh=1")
        lengths = _flower(system, "/api/queues/length").json()["active_queues"]
        return {queue["name"] for queue in lengths}

    eventually(lambda: {"control", "ephemeral.standard", "persistent.standard", "grading.standard"} <= queues())

    def done_by() -> set[str]:
        """One of which Flower has seen no more than that it was sent has no worker yet, or never will have one."""
        tasks = _flower(system, "/api/tasks?limit=1000").json().values()
        workers = {task.get("worker") for task in tasks if task["name"] == "attempt.run"}
        return {worker.partition("-")[0] for worker in workers if worker}

    eventually(lambda: done_by() == {"ephemeral", "persistent"})
    assert "flower_events" in _flower(system, "/metrics").text


def test_flower_shows_what_ran_and_counts_what_failed(system: System) -> None:
    broken = a_task("has-no-image", max_attempts=1)
    handle = system.flow.enqueue(broken, agent="nop", mode="persistent")
    failed = handle.result(timeout=120)
    assert failed.attempt is not None

    def tasks() -> dict[str, Any]:
        return dict(_flower(system, "/api/tasks?limit=5000").json())

    eventually(lambda: tasks().get(str(failed.attempt.id), {}).get("state") == "FAILURE")
    found = tasks()
    assert "task=has-no-image agent=nop mode=persistent" in found[str(failed.attempt.id)]["kwargs"]
    names = {one["name"] for one in found.values()} - {None}  # the event with the name was sent before Flower listened
    assert names <= {"attempt.run", "grading.run"}, "beat's ticks are no tasks of anybody"


@pytest.mark.parametrize("terminal", [False, True], ids=["piped", "terminal"])
def test_ctrl_c_leaves_the_run_and_says_how_to_go_on(system: System, terminal: bool) -> None:
    submit = ["submit", "demo", "--agent", "nop", "--task", ROW, "--delay", "3600", "--wait"]
    ours, theirs = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen(
        [*MEGAFLOW, *submit],
        env=system.environment,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background inherit it ignored
    ) as watching:
        os.close(theirs)
        said = b""
        while b"1 queued" not in said:
            said += os.read(ours, 4096)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 130
        with suppress(OSError):  # a terminal whose other side is closed
            while more := os.read(ours, 4096):
                said += more
        os.close(ours)
    assert b"the run goes on" in said
    run = re.search(rb"megaflow cancel ([0-9a-f]{12})", said)
    assert run is not None
    assert system.megaflow("cancel", run[1].decode()).returncode == 0


def test_show_logs_and_artifacts_lead_to_the_evidence(system: System, tmp_path: Path) -> None:
    (result,) = _submit(system, "oracle", "persistent", "--task", ROW)
    task_id = result["task_id"]
    shown = system.megaflow("show", task_id)
    assert shown.stdout.startswith("succeeded: reward 1, submitted")
    assert "test_report" in shown.stdout
    assert "attempt.finished" in system.megaflow("logs", task_id[-12:]).stdout
    fetched = system.megaflow("artifacts", task_id, "--get", str(tmp_path))
    assert fetched.returncode == 0
    assert (tmp_path / "1" / "patch.diff").read_bytes().startswith(b"diff --git")
