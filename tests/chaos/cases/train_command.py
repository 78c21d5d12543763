"""`megaflow train` with a trainer elsewhere, while a random process of the loop is killed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from app.errors import DatabaseUnavailable
from app.ledger import audit
from bench.system import free_port
from tests.chaos.case import REGISTRY, case
from tests.chaos.cases.training import AGENT, POLICY, start_policy
from tests.chaos.fixture import Fixture
from tests.chaos.killing import kill_for
from tests.chaos.launchers.train_command import version_of
from tests.chaos.programs import wait_for

NAME, TOKEN = "chaos", "a-token-of-the-chaos-suite"
_GROUPS, _REPLICAS = 3, 3
_WEIGHTS = {
    "loop": 4,
    "consumer": 4,
    "gateway": 3,
    "control": 3,
    "worker": 3,
    "handout": 2,
    "launcher": 1,
    "engine": 1,
    "redis": 1,
    "postgres": 1,
}
_FULL, _SHORT = (16, 180.0), (3, 30.0)
"""Steps, and for how many seconds is killed."""
_size = _SHORT
_LOCKED, _AWAY = 64, 69
"""Exit codes that a command which is started after a kill may have: the lock is not free yet, a server is away."""
_TASK = """\
version = "1.0"
[metadata]
[agent]
timeout_sec = 120
[verifier]
timeout_sec = 60
"""
_FILES = {
    "task.toml": _TASK,
    "instruction.md": "Write `done` into the file answer.",
    "environment/Dockerfile": "FROM scratch\n",
    "environment/setup.sh": "true\n",
    "tests/test.sh": 'grep -q done answer && reward=1 || reward=0\necho $reward > "$LOGS_DIR/verifier/reward.txt"\n',
}


def go_long() -> None:
    """Sixteen steps and three minutes."""
    global _size
    _size = _FULL
    REGISTRY["train-command"] = replace(REGISTRY["train-command"], within_s=600.0, least_faults=40)


@case(
    "train-command",
    within_s=240,
    least_faults=6,
    settings={
        "agent_manifests": (AGENT,),
        "gateway_port": free_port(),
        "experience_token": TOKEN,
        "persistent_slots": 6,
        "lease_s": 6.0,
    },
)
def train_command(fixture: Fixture) -> None:
    """`megaflow train` with a trainer that gets its groups over HTTP, publishes and commits, and SIGKILL every two
    seconds to the command, the trainer, the hand-out, the gateway, the control worker, a worker, the launcher, the
    engine, Redis or PostgreSQL. Each step is one run, each group is committed exactly once, versions go live in their
    order, the auditor finds nothing."""
    steps, seconds = _size
    file, leases, ends = (fixture.settings.home / name for name in ("train.yaml", "leases.jsonl", "ends"))
    file.write_text(yaml.safe_dump(_config(fixture, steps)))
    _start(fixture, file, leases, ends)
    killed = kill_for(fixture, seconds, _WEIGHTS)
    fixture.notes.append(f"killed: {dict(killed)}; {_committed(fixture)} steps were committed by then")
    fixture.servers.start_postgres()
    fixture.servers.start_redis()
    wait_for(lambda: _codes(ends)[-1:] == [0] or _gave_up(ends), 300, every_s=1.0)
    if _codes(ends)[-1:] != [0]:
        fixture.wrong.append(f"the command did not end well: exit codes {_codes(ends)}, {_committed(fixture)} steps")
    _check(fixture, steps, leases, ends)


def _config(fixture: Fixture, steps: int) -> dict[str, Any]:
    tasks = fixture.settings.home / "tasks"
    for number in range(_GROUPS):
        for name, content in _FILES.items():
            path = tasks / f"task-{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    return {
        "name": NAME,
        "policy": POLICY,
        "datasets": [str(tasks)],
        "frameworks": {"sketch": 1},
        "steps": steps,
        "groups": _GROUPS,
        "replicas": _REPLICAS,
        "environment": "local",
        "mode": "persistent",
        "limits": {"max_attempts": 12},
        "trainer": {"kind": "external"},
    }


def _start(fixture: Fixture, file: Path, leases: Path, ends: Path) -> None:
    start_policy(fixture)
    handout, run = free_port(), fixture.programs.run
    serve = ("experience", "serve", "--host", "127.0.0.1", "--port", str(handout), "--lease", "5")
    run("handout", (sys.executable, "-m", "megaflow", *serve))
    ours = (sys.executable, "-m", "tests.chaos.launchers.train_command")
    run("consumer", (*ours, "consumer", str(file), f"http://127.0.0.1:{handout}", TOKEN, str(leases)))
    run("loop", (*ours, "loop", str(file), str(ends)))


def _codes(ends: Path) -> list[int]:
    """Exit codes of the command, where it was not killed."""
    return [int(line) for line in ends.read_text().splitlines()] if ends.exists() else []


def _gave_up(ends: Path) -> list[int]:
    return [code for code in _codes(ends) if code not in (0, _LOCKED, _AWAY)]


def _committed(fixture: Fixture) -> int:
    with suppress(DatabaseUnavailable):
        return int(
            fixture.rows("SELECT count(DISTINCT version) FROM experience_leases WHERE state = 'committed'")[0][0]
        )
    return -1


def _check(fixture: Fixture, steps: int, leases: Path, ends: Path) -> None:
    runs = fixture.rows("SELECT id, name FROM runs ORDER BY id")
    for row in runs:
        fixture.adopt(row.id)
    names = [row.name for row in runs]
    if names != [f"{NAME}-step-{step}" for step in range(steps)]:
        fixture.wrong.append(f"expected one run for each of {steps} steps in their order, found {names}")
    groups = fixture.rows(
        "SELECT r.name, g.state, count(*) AS n FROM experience_groups g JOIN runs r ON r.id = g.run_id GROUP BY 1, 2"
    )
    if wrong := [tuple(row) for row in groups if (row.state, row.n) != ("committed", _GROUPS)]:
        fixture.wrong.append(f"expected {_GROUPS} committed groups in each step, found {wrong}")
    live = fixture.rows("SELECT version FROM policy_versions WHERE state = 'live' ORDER BY number")
    if [row.version for row in live] != ["v0", *(version_of(NAME, step) for step in range(steps))]:
        fixture.wrong.append(f"expected the versions of {steps} steps live in their order, found {live}")
    if bad := _gave_up(ends):
        fixture.wrong.append(f"the command gave up with exit codes {bad}")
    _check_commits(fixture, steps, leases)
    fixture.wrong += [f"audit: {one}" for one in audit.look(fixture.database, fixture.settings).findings]


def _check_commits(fixture: Fixture, steps: int, leases: Path) -> None:
    """Every group in one committed lease, as the trainer wrote down what it was handed."""
    lines = leases.read_text().splitlines() if leases.exists() else []
    taken = {one["lease"]: one["groups"] for one in map(json.loads, lines)}
    rows = fixture.rows("SELECT id::text, version FROM experience_leases WHERE state = 'committed'")
    if unknown := [row.id for row in rows if row.id not in taken]:
        fixture.wrong.append(f"{len(unknown)} leases are committed that the trainer has not got")
    counts = Counter(group for row in rows for group in taken.get(row.id, ()))
    if repeated := [group for group, count in counts.items() if count > 1]:
        fixture.wrong.append(f"{len(repeated)} groups are in two committed leases")
    if len(counts) != steps * _GROUPS:
        fixture.wrong.append(f"expected {steps * _GROUPS} groups in committed leases, found {len(counts)}")
    fixture.notes.append(f"{len(counts)} groups in {len(rows)} commits; {len(taken)} batches were handed out")
