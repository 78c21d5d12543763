"""The training loop while a random process of it is killed: agents, gateway, samples, hand-out, a trainer."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.agents.external import known_agents
from app.artifacts import open_store
from app.experience import files
from app.ledger import accept, audit, experience, model_replicas
from app.ledger.accept import NewRun
from app.ledger.experience import ExperienceRun
from app.ledger.model_replicas import NewReplica
from app.models.model_calls import Dialect
from app.models.spec import Mode, ModelChoice
from app.submission import specs_for
from bench.system import free_port
from tests.chaos import work as works
from tests.chaos.case import REGISTRY, case
from tests.chaos.fixture import Batch, Fixture
from tests.chaos.killing import kill_for
from tests.chaos.programs import wait_for
from tests.chaos.work import Work

POLICY = "policy"
AGENT = Path(__file__).parents[3] / "examples" / "agent" / "agent.toml"
_REPLICAS = 4
_WEIGHTS = {"trainer": 4, "gateway": 4, "control": 4, "launcher": 1, "engine": 1, "redis": 2, "postgres": 2}
_FULL, _SHORT = (60, 180.0), (8, 20.0)
"""Groups, and for how many seconds is killed."""
_size = _SHORT


def go_long() -> None:
    """Sixty groups and three minutes."""
    global _size
    _size = _FULL
    REGISTRY["training-loop"] = replace(REGISTRY["training-loop"], within_s=600.0, least_faults=45)


@case(
    "training-loop",
    within_s=240,
    least_faults=7,
    settings={"agent_manifests": (AGENT,), "gateway_port": free_port(), "persistent_slots": 6, "lease_s": 6.0},
)
def training_loop(fixture: Fixture) -> None:
    """Agents call an engine through the gateway, their samples are handed to a trainer, and a random process of the
    loop is killed every two seconds, PostgreSQL and Redis included. Every group is committed exactly once, with the
    token ids that the engine wrote down."""
    groups, seconds = _size
    engine_log = start_policy(fixture)
    run = _submit(fixture, groups)
    experience.open_run(fixture.database, ExperienceRun(run, POLICY))
    fixture.programs.run("trainer", (*_PROGRAM, "trainer", str(run), POLICY))
    killed = kill_for(fixture, seconds, _WEIGHTS)
    fixture.notes.append(f"killed: {dict(killed)}")
    fixture.servers.start_postgres()
    fixture.servers.start_redis()
    committed = "SELECT count(*) FROM experience_groups WHERE state = 'committed'"
    if not wait_for(lambda: fixture.rows(committed)[0][0] == groups, 200, every_s=1.0):
        states = dict(fixture.rows("SELECT state, count(*) FROM experience_groups GROUP BY 1"))
        reasons = fixture.rows("SELECT reason, count(*) FROM experience_attempts WHERE reason <> '' GROUP BY 1 LIMIT 3")
        fixture.wrong.append(f"expected {groups} committed groups, found {states}; {[tuple(row) for row in reasons]}")
    _check(fixture, run, engine_log)


def start_policy(fixture: Fixture) -> Path:
    """Launcher, control worker, gateway, and an engine that serves the policy; the file that it writes to."""
    log, port = fixture.settings.home / "engine.jsonl", free_port()
    address = ("--host", "127.0.0.1", "--port", str(fixture.settings.gateway_port))
    fixture.start("launcher", "control")
    fixture.programs.run("gateway", (sys.executable, "-m", "app.model_service.gateway", *address, "--grace", "5"))
    fixture.programs.run("engine", (*_PROGRAM, "engine", str(port), str(log)))
    experience.publish(fixture.database, POLICY, "v0")
    experience.settle(fixture.database, POLICY, "v0")
    url = f"http://127.0.0.1:{port}/v1"
    model_replicas.add(fixture.database, NewReplica(POLICY, url, policy_version="v0", dialects=(Dialect.CHAT,)))
    return log


_PROGRAM = (sys.executable, "-m", "tests.chaos.launchers.training")


def _submit(fixture: Fixture, groups: int) -> Any:
    tasks = works.tasks(fixture.settings, [f"group-{number}" for number in range(groups)], Work(max_attempts=12))
    specs = specs_for(
        tasks,
        agent="sketch",
        mode=Mode.PERSISTENT,
        model=ModelChoice(name=POLICY),
        agents=known_agents(fixture.settings),
    )
    new = NewRun(specs=specs, replicas=_REPLICAS, name="training-loop", purpose="training")
    accepted = accept.accept(fixture.database, new)
    ends = frozenset({("succeeded", "submitted")})
    fixture.batches.append(Batch(accepted.run_id, accepted.task_ids, accepted.names, ends, exclusive=False))
    return accepted.run_id


def _check(fixture: Fixture, run: Any, engine_log: Path) -> None:
    twice = fixture.rows(
        "SELECT g.group_id FROM experience_groups g JOIN experience_leases l ON l.id = g.lease_id"
        " WHERE g.state = 'committed' AND l.state <> 'committed'"
    )
    if twice:
        fixture.wrong.append(f"{len(twice)} groups are committed by a lease that is not")
    versions = fixture.rows("SELECT version, count(*) FROM experience_leases WHERE state = 'committed' GROUP BY 1")
    if repeated := [row.version for row in versions if row[1] > 1]:
        fixture.wrong.append(f"versions {repeated[:5]} were committed by two leases each")
    said = _conversations(engine_log)
    store = open_store(fixture.settings.artifacts(), endpoint_url=None)
    keys = [row.key for row in fixture.rows("SELECT key FROM experience_attempts WHERE state = 'stored'")]
    samples = [row for key in keys for row in files.read(store.get(key))]
    wrong = [row for row in samples if tuple(row["token_ids"]) not in said]
    if wrong or not samples:
        fixture.wrong.append(f"{len(wrong)} of {len(samples)} samples have ids that the engine did not write down")
    found = audit.look(fixture.database, fixture.settings)
    fixture.wrong += [f"audit: {one}" for one in found.findings]
    fixture.notes.append(f"{len(samples)} samples of {len(keys)} attempts, {sum(row[1] for row in versions)} commits")


def _conversations(log: Path) -> set[tuple[int, ...]]:
    """Every prompt with its answer; a kill may have cut the last line of a start."""
    found = set()
    for line in log.read_text().splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        found.add((*one["prompt"], *one["answer"]))
    return found
