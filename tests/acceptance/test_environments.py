"""What tasks may ask of their environments, as a user sees it: set-ups, networks, limits, several containers, reuse."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from app.client import as_completed
from app.models.outcome import ArtifactKind, TaskResult
from app.models.spec import AgentTask, Network
from tests.acceptance.conftest import System
from tests.integration.http_server import Handler, served
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

COMPOSE_TASK = "restock-the-shop"


def _results(system: System, task: AgentTask, mode: str, replicas: int = 1) -> list[TaskResult]:
    run = system.flow.enqueue_many([task], agent="oracle", mode=mode, replicas=replicas)
    return [handle.result(timeout=60) for handle in as_completed(run.handles, timeout=200)]


def _artifact(result: TaskResult, kind: ArtifactKind) -> bytes:
    assert result.attempt is not None
    (kept,) = [one for one in result.attempt.artifacts if one.kind is kind]
    assert kept.url is not None, kept.missing
    return Path(kept.url.removeprefix("file://")).read_bytes()


@pytest.mark.parametrize("mode", ["ephemeral", "persistent"])
def test_the_replicas_of_a_group_pay_for_their_set_up_once(
    system: System, task_folder: Callable[..., Path], mode: str
) -> None:
    folder = task_folder(f"set-up-{mode}", test="[ -s /set-up ] && cp /set-up answer; echo 1 > $OUT")
    task = system.task_of(folder, setup=(f"sleep 2; echo {mode} $(date +%s%N) > /set-up",))
    results = _results(system, task, mode, replicas=8)
    assert [result.reward for result in results] == [1.0] * 8
    told = [result.attempt.environment for result in results if result.attempt is not None]
    paid = [one for one in told if one["phases"].get("set_up", 0.0) > 1.0]
    assert len(paid) <= 1, [(one["path"], one["phases"]) for one in told]
    for one in told:
        assert sum(one["phases"].values()) == pytest.approx(one["ready_s"], abs=0.001)


class _Hello(Handler):
    def respond(self) -> None:
        self.answer(200, b"hello")


def test_an_allowlist_lets_a_task_reach_what_it_names_and_the_rest_is_on_record(
    system: System, task_folder: Callable[..., Path]
) -> None:
    with served(_Hello) as site:
        port = site.partition(":")[2]
        ask = "python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())'"
        solve = f"{ask} http://localhost:{port}/ > answer; {ask} http://example.invalid/ 2>> answer || true"
        test = "grep -q hello answer && grep -q 403 answer && echo 1 > $OUT || echo 0 > $OUT"
        folder = task_folder("asks-outside", solve="unset no_proxy NO_PROXY; " + solve, test=test)
        task = system.task_of(folder, network=Network.ALLOWLIST, allowed_hosts=(f"localhost:{port}",))
        (result,) = _results(system, task, "persistent")
    assert result.reward == 1.0
    log = _artifact(result, ArtifactKind.ENVIRONMENT_LOG)
    assert f"localhost:{port}".encode() in log
    assert b"example.invalid" in log


def test_filling_the_disk_is_the_agents_own_end(system: System, task_folder: Callable[..., Path]) -> None:
    folder = task_folder("fills-the-disk", solve="head -c 400000000 /dev/zero > big; sleep 20; echo done > answer")
    resources = {"disk_bytes": 128 << 20}
    (result,) = _results(system, system.task_of(folder, resources=resources), "ephemeral")
    assert result.attempt is not None
    assert (result.attempt.end_reason, result.reward) == ("resource_limit", 0.0)
    assert result.verdict is not None
    assert result.verdict.counts


@pytest.mark.parametrize("mode", ["ephemeral", pytest.param("persistent", marks=pytest.mark.extra)])
def test_a_task_of_several_containers_is_solved_and_its_services_are_evidence(system: System, mode: str) -> None:
    (found,) = system.json("submit", "demo", "--task", COMPOSE_TASK, "--agent", "oracle", "--mode", mode, "--wait")[
        "results"
    ]
    assert found["verdict"]["reward"] == 1.0
    attempt = found["attempts"][-1]
    assert {one["name"] for one in attempt["environment"]["services"]} == {"main", "shop"}
    kinds = {one["kind"]: one for one in attempt["artifacts"]}
    log = Path(kinds["environment_log"]["url"].removeprefix("file://")).read_text()
    assert "== shop ==" in log


# --- What an attempt says of what happened ----------------------------------------------------------------------------

HOG = "python3 -c 'bytearray(400 << 20)'"


def test_all_of_a_long_output_is_an_artifact_that_the_gap_in_it_names(
    system: System, task_folder: Callable[..., Path]
) -> None:
    test = "seq 400000 >&2; grep -q done answer && echo 1 > $OUT || echo 0 > $OUT"
    folder = task_folder("talks-much", solve="seq 500000; echo done > answer; echo short >&2", test=test)
    (result,) = _results(system, system.task_of(folder), "persistent")
    assert result.reward == 1.0
    whole = b"".join(b"%d\n" % number for number in range(1, 500001))
    assert b"bytes left out; all of it is 0001.stdout in the attempt's command_logs ...]" in _artifact(
        result, ArtifactKind.AGENT_LOG
    )
    packed = zstandard.ZstdDecompressor().decompressobj().decompress(_artifact(result, ArtifactKind.COMMAND_LOGS))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        found = {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
    assert found["0001.stdout"] == whole
    assert set(found) == {"index.txt", "0001.stdout"}, "the tests' report is kept whole as it is"
    assert result.attempt is not None
    torn_down = "SELECT environment AS found FROM attempts WHERE id = :id AND environment ? 'teardown'"
    reset = eventually(lambda: system.rows(torn_down, id=result.attempt.id))[0].found["teardown"]["agent"]["reset"]
    assert (reset["clean"], reset["left"]) == (True, []), "nothing of the log was ever inside"


def test_who_was_killed_for_memory_is_told_and_tests_that_were_are_a_result(
    system: System, task_folder: Callable[..., Path]
) -> None:
    folder = task_folder("takes-memory", solve=f"{HOG}; sleep 1; echo done > answer", test=f"exec {HOG}")
    (result,) = _results(system, system.task_of(folder, resources={"memory_bytes": 256 << 20}), "ephemeral")
    assert len(result.attempts) == 1, "to do it again would be of no use"
    assert (result.end_reason, result.reward, result.state) == ("submitted", 0.0, "succeeded")
    assert result.verdict is not None
    assert result.verdict.counts
    assert f"killed at the environment's memory limit of {256 << 20} bytes" in result.verdict.detail
    assert "exit code was 137" in result.verdict.detail
    assert result.attempt is not None
    memory = {"limit_bytes": 256 << 20, "killed": {"agent": 1, "grading": 1}}
    assert result.attempt.environment["memory"] == memory
    shown = system.megaflow("show", str(result.task_id)).stdout
    assert f"out of memory: 2 killed at the memory limit of {256 << 20} bytes (1 in agent, 1 in grading)" in shown
    sampled = "SELECT environment->'samples'->'agent' AS found FROM attempts WHERE id = :id AND environment ? 'samples'"
    samples = eventually(lambda: system.rows(sampled, id=result.attempt.id))[0].found
    second, memory_mib, cores = samples["rows"][-1]
    assert 0 < second < 600
    assert 0 < memory_mib <= 256
    assert 0 <= cores < 10
    assert "killed" in {what for _, what in samples["marks"]}
    commands = json.loads(_artifact(result, ArtifactKind.TERMINAL).partition(b"\n")[0])["commands"]
    assert {row[2] for row in commands} >= {"agent", "grading"}


CROWD = """python3 - <<'CODE'
import subprocess
made = []
try:
    while len(made) < 100: made.append(subprocess.Popen(["sleep", "60"]))
except OSError: pass
for one in made: one.kill()
for one in made: one.wait()
CODE"""


def test_processes_that_were_too_many_are_told(system: System, task_folder: Callable[..., Path]) -> None:
    folder = task_folder("takes-processes", solve=f"{CROWD}\necho done > answer")
    (result,) = _results(system, system.task_of(folder, resources={"pids": 64}), "persistent")
    assert (result.end_reason, result.state) == ("submitted", "succeeded")
    assert result.attempt is not None
    told = result.attempt.environment["processes"]
    assert (told["limit"], told["refused"]["grading"]) == (64, 0)
    assert told["refused"]["agent"] > 0
    refused = f"{told['refused']['agent']} refused at the limit of 64 ({told['refused']['agent']} in agent)"
    assert f"too many processes: {refused}" in system.megaflow("show", str(result.task_id)).stdout
