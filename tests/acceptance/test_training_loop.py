"""`megaflow train` as a user runs it: on scripted answers, killed and started again, with a trainer elsewhere."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml

from app.errors import MegaFlowError
from app.experience.http import HttpBatch, HttpExperience
from app.ledger.training import LoopLock
from tests.acceptance.conftest import MEGAFLOW, System
from tests.services import free_port
from tests.unit.test_training_config import PAPER
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.timeout(400)]

REHEARSAL: dict[str, Any] = {
    "policy": "nothing-answers-for-it",
    "datasets": ["demo"],
    "selection": {"only": ["csv-to-jsonl", "access-log-report", "lost-settings"]},
    "frameworks": {"sketch": 1},
    "steps": 3,
    "groups": 2,
    "replicas": 2,
    "scale": 1,
    "mode": "persistent",
    "trainer": {"kind": "external"},
}


_LOCKED = """SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted
    AND (classid::bigint << 32 | objid::bigint) = hashtextextended('train:killed-rehearsal', 0)"""
_READY = """SELECT 1 FROM experience_groups g JOIN runs r ON r.id = g.run_id WHERE r.name = :name AND g.state = 'ready'
    HAVING count(*) = 2"""
_SESSIONS = "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()"


def _file(folder: Path, **values: Any) -> Path:
    file = folder / f"{values['name']}.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def _started(system: System, file: Path) -> subprocess.Popen[str]:
    command = [*MEGAFLOW, "train", str(file)]
    return subprocess.Popen(command, env=system.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _steps(system: System, name: str) -> list[Any]:
    """Of each step's run: its tasks, attempts, committed leases (a group or more each), groups by state, version."""
    return system.rows(
        "SELECT r.name, r.purpose, count(DISTINCT t.id) AS tasks, sum(t.attempts) AS attempts,"
        " (SELECT count(*) FROM experience_leases l WHERE l.run_id = r.id AND l.state = 'committed') AS commits,"
        " (SELECT array_agg(g.state) FROM experience_groups g WHERE g.run_id = r.id) AS groups,"
        " (SELECT max(l.version) FROM experience_leases l WHERE l.run_id = r.id AND l.state = 'committed') AS version"
        " FROM runs r JOIN tasks t ON t.run_id = r.id WHERE r.name LIKE :name GROUP BY r.id ORDER BY r.id",
        name=f"{name}-step-%",
    )


@pytest.mark.extra
def test_a_loop_killed_again_and_again_commits_every_step_once(system: System, tmp_path: Path) -> None:
    file = _file(tmp_path, name="killed", **REHEARSAL)
    for begun in range(1, REHEARSAL["steps"] + 1):  # as soon as a step's run is there, and before it is committed
        loop = _started(system, file)
        eventually(lambda count=begun: len(_steps(system, "killed-rehearsal")) >= count, within_s=120)
        loop.send_signal(signal.SIGKILL)
        out, err = loop.communicate()
        assert loop.returncode == -signal.SIGKILL, out + err
    lock = LoopLock(system.flow.database, "killed-rehearsal")
    lock.hold()
    refused = system.megaflow("train", str(file))
    assert (refused.returncode, "found that another runs" in refused.stderr) == (64, True), refused.stderr
    lock.close()
    loop = _started(system, file)
    for _ in range(3):  # every session, as a restart of PostgreSQL would end them
        eventually(lambda: loop.poll() is not None or system.rows(_LOCKED), within_s=60)
        system.rows(f"SELECT pg_terminate_backend(pid) FROM ({_SESSIONS}) s")
    out, err = loop.communicate(timeout=240)
    assert loop.returncode == 0, out + err
    steps = _steps(system, "killed-rehearsal")
    assert [row.name for row in steps] == [f"killed-rehearsal-step-{step}" for step in range(3)]
    for step, row in enumerate(steps):
        assert (row.purpose, row.tasks, row.attempts, row.commits) == ("training", 4, 4, 1), row
        assert row.groups == ["committed", "committed"]
        assert row.version == f"killed-rehearsal-{step + 1}"
    table = out.splitlines()
    assert [line.split()[0] for line in table[1:4]] == ["0", "1", "2"], out
    assert max(len(line) for line in table[:4]) <= 80 + len("killed-rehearsal-3")
    again = system.megaflow("train", str(file))
    assert (again.returncode, again.stdout) == (0, out), "what is committed is shown again, and not done"
    assert len(_steps(system, "killed-rehearsal")) == 3
    assert "all 3 steps are committed" in system.megaflow("train", str(file), "--dry-run").stdout


@contextmanager
def _serving(*command: object, **options: Any) -> Iterator[str]:
    """The URL of a program, which gets a port in place of PORT."""
    port = free_port()
    process = subprocess.Popen([str(port if word == "PORT" else word) for word in command], **options)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _train_elsewhere(system: System, url: str, steps: int, seen: list[int]) -> None:
    """A trainer over HTTP: takes each step's groups, waits for the next step's, publishes a version, commits."""
    token = (system.settings.home / "run" / "experience_token").read_text()
    for step in range(steps):
        client = HttpExperience(url, token, f"elsewhere-step-{step}", policy="tokens", consumer="mine")
        batches: list[HttpBatch] = []
        while (found := sum(len(batch.groups()) for batch in batches)) < 2:  # they are not complete at one time
            try:
                batches += filter(None, [client.next_batch(2 - found, wait_s=5)])
            except MegaFlowError:  # the loop has not come to this step yet
                time.sleep(0.3)
        seen.append(found)
        following = f"elsewhere-step-{min(step + 1, steps - 1)}"
        eventually(lambda name=following: system.rows(_READY, name=name), within_s=90)
        client.publish(f"w{step + 1}")
        for batch in batches:
            client.commit(batch, f"w{step + 1}")
        done = system.megaflow("models", "publish", "tokens", "--version", f"w{step + 1}", "--unverified")
        assert done.returncode == 0, done.stderr


def test_a_trainer_elsewhere_gets_the_groups_of_each_step_while_the_next_one_runs(
    system: System, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, task_folder: Callable[..., Path]
) -> None:
    for name in ("one", "two"):
        task_folder(name)
    beside = tmp_path_factory.mktemp("beside")
    values = {"policy": "tokens", "datasets": [str(tmp_path)], "selection": {}, "steps": 2, "max_staleness": 1}
    whole = {key: value for key, value in (REHEARSAL | values).items() if key != "scale"}
    seen: list[int] = []
    unknown = system.megaflow("train", str(_file(beside, name="elsewhere", **whole)))
    assert (unknown.returncode, "expected engines on record" in unknown.stderr) == (64, True), unknown.stderr
    engine = (sys.executable, "-m", "tests.chaos.launchers.training", "engine", "PORT")
    hand_out = (*MEGAFLOW, "experience", "serve", "--port", "PORT")
    with (
        _serving(*engine, beside / "engine.log") as answers,
        _serving(*hand_out, env=system.environment, stderr=subprocess.DEVNULL) as url,
    ):
        added = ("models", "add", "tokens", f"{answers}/v1", "--version", "w0", "--engine", "vllm", "--speaks", "chat")
        assert system.megaflow(*added, "--no-check").returncode == 0
        assert system.megaflow("models", "publish", "tokens", "--version", "w0", "--unverified").returncode == 0
        eventually((system.settings.home / "run" / "experience_token").exists, within_s=30)
        trainer = threading.Thread(target=_train_elsewhere, args=(system, url, 2, seen))
        trainer.start()
        done = system.megaflow("train", str(_file(beside, name="elsewhere", **whole)))
        trainer.join(60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert seen == [2, 2]
    assert [row.version for row in _steps(system, "elsewhere")] == ["w1", "w2"]
    for stale, line in enumerate(done.stdout.splitlines()[1:3]):
        assert line.split()[1:5] == ["+1.000", "100", "%", str(stale)], "reward, solved, staleness"
    for form, file, lines in (("trl", "t.jsonl", 4), ("prime-rl", "p.jsonl", 4), ("sft", "s.jsonl", 2)):
        written = system.json("export", "elsewhere-step-1", "--format", form, "--to", str(beside / file))
        assert written["written"] == lines, written
        rows = [json.loads(line) for line in (beside / file).read_text().splitlines()]
        assert len(rows) == lines
    assert written["left_out"] == {"duplicate": 2}, "the engine says the same to both replicas of a task"
    (answered,) = {tuple(message["role"] for message in row["messages"]) for row in rows}
    assert answered == ("user", "assistant", "tool", "assistant")
    log = [json.loads(line) for line in (beside / "engine.log").read_text().splitlines()]
    for row in rows:
        said = {len(one["prompt"]): one for one in log if row["token_ids"][: len(one["prompt"])] == one["prompt"]}
        assert row["token_ids"] in [one["prompt"] + one["answer"] for one in said.values()], "as the engine wrote them"
        own = [token for token, mine in zip(row["token_ids"], row["mask"], strict=True) if mine]
        assert own == [token for at in sorted(said) for token in said[at]["answer"]]
    verl = system.json("export", "elsewhere-step-1", "--format", "verl", "--to", str(beside / "v.parquet"))
    table = pyarrow.parquet.read_table(beside / "v.parquet").to_pylist()
    assert verl["written"] == len(table) == 4
    assert Counter(row["uid"] for row in table).most_common() == [(row["uid"], 2) for row in table[::2]]


def test_the_papers_run_is_printed_and_checked_without_being_run(
    system: System, tmp_path: Path, task_folder: Callable[..., Path]
) -> None:
    for number in range(65):
        task_folder(f"task-{number}")
    before = system.rows("SELECT count(*) AS n FROM runs")
    paper = ("train", str(PAPER), "--dataset", str(tmp_path), "--dry-run")
    found = system.megaflow(*paper)
    assert found.returncode == 65
    assert "64 groups × 16 replicas = 1,024 rollouts a step, 102,400 in all" in found.stdout
    assert "problem: model 'policy': expected an endpoint" in found.stdout
    rehearsed = system.megaflow(*paper, "--scale", "1/64")
    assert "1 groups × 16 replicas = 16 rollouts a step" in rehearsed.stdout
    assert "pool: 65 tasks" in rehearsed.stdout
    assert "MEGAFLOW_SWE_AGENT_SOURCE" not in rehearsed.stdout, "it is set here"
    assert rehearsed.returncode == 0, rehearsed.stdout
    assert system.rows("SELECT count(*) AS n FROM runs") == before


def _rehearsed(system: System, folder: Path, **values: Any) -> tuple[str, list[Any]]:
    """What is printed of the paper's run with some values of its file changed, and its steps."""
    file = _file(
        folder, **yaml.safe_load(PAPER.read_text()) | {"datasets": ["demo"], "selections": {}, "steps": 1} | values
    )
    done = system.megaflow("train", str(file), timeout_s=850)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, _steps(system, f"{values['name']}-rehearsal")


@pytest.mark.extra
def test_the_papers_run_is_rehearsed_at_a_sixty_fourth(system: System, tmp_path: Path) -> None:
    which = {"selection": {"only": ["csv-to-jsonl"]}, "frameworks": {"sketch": 1}}
    _, (step,) = _rehearsed(system, tmp_path, name="small", scale="1/64", mode="persistent", **which)
    assert (step.tasks, step.attempts, step.commits, step.groups) == (16, 16, 1, ["committed"])
    (row,) = system.rows(
        "SELECT DISTINCT s.body FROM specs s JOIN tasks t ON t.spec_digest = s.digest JOIN runs r ON r.id = t.run_id"
        " WHERE r.name = :name",
        name=step.name,
    )
    spec = json.loads(row.body)
    limits = {name: spec["task"]["limits"][name] for name in ("max_steps", "max_turn_tokens", "context_tokens")}
    assert limits == {"max_steps": 100, "max_turn_tokens": 4096, "context_tokens": 131072}
    assert (spec["model"]["sampling"]["temperature"], spec["rewards"]) == (1.0, {"not_submitted": -0.5})


@pytest.mark.agents
@pytest.mark.extra
@pytest.mark.timeout(900)
def test_frameworks_are_mixed_and_those_whose_calls_have_ids_become_samples(system: System, tmp_path: Path) -> None:
    which = {
        "selection": {"only": ["csv-to-jsonl", "access-log-report", "lost-settings", "finish-merge", "order-ledger"]},
        "mode": "persistent",
    }
    names = ("mini-swe-agent", "qwen-code", "claude-code", "openhands", "swe-agent")  # the last is a stand-in
    values = {"frameworks": dict.fromkeys(names, 1), "scale": "5/64", "replicas": 2, **which}
    out, (step,) = _rehearsed(system, tmp_path, name="mixed", **values)
    agents = system.rows(
        "SELECT t.agent, count(x.key) AS samples FROM runs r JOIN tasks t ON t.run_id = r.id"
        " LEFT JOIN experience_attempts x ON x.task_id = t.id WHERE r.name = :name GROUP BY 1 ORDER BY 1",
        name=step.name,
    )
    found = {row.agent: row.samples for row in agents}
    assert found == dict.fromkeys(names, 2) | {"claude-code": 0}, "replays give no ids in `messages`"
    assert "20.0 %" in out, "its share of the attempts is waste"
