"""An engine that is away when an attempt asks for its environment is waited for, and not for ever.

And when it is away while services are judged, which need it for their names and logs, nothing is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from app.agents.oracle import NopAgent
from app.artifacts import open_store
from app.artifacts.bundles import store_bundle
from app.client import MegaFlow
from app.grading.script_goal import ScriptGrader
from app.host.engine import engine_of
from app.ledger.accept import Accepted
from app.models.endings import EndReason
from app.models.spec import AgentTask, Compose, EnvironmentSpec, Mode, ScriptGoal
from app.settings import Settings
from app.workers import services
from app.workers.attempt import carry_out
from app.workers.lease import StopToken
from app.workers.services import WorkerServices
from megaflow.contract.environments.fixture import sweep_all
from tests.building import claim_of
from tests.integration.engine_proxy import EngineProxy, engine_proxy
from tests.integration.rows import one
from tests.services import MakeSettings

pytestmark = pytest.mark.docker

AWAY_S = 1.0


@pytest.fixture
def proxy(docker_engine: str) -> Iterator[EngineProxy]:
    with engine_proxy(engine_of(Settings()).url) as found:
        yield found


@pytest.fixture
def settings(make_settings: MakeSettings, base_image_tag: str, proxy: EngineProxy) -> Settings:
    return make_settings(base_image=base_image_tag, docker_url=proxy.url, container_runtime="docker")


@dataclass
class Fixture:
    """A worker whose engine may leave, and one task for it that is solved by doing nothing."""

    settings: Settings
    flow: MegaFlow
    task: AgentTask

    def of(self, task: AgentTask) -> Fixture:
        return replace(self, task=task)

    def attempt(self, *, patience_s: float, token: StopToken | None = None) -> tuple[EndReason, Any]:
        """How an attempt ends whose worker has this much patience, and its row."""
        handle = self.flow.enqueue(self.task, agent="nop", mode=Mode.EPHEMERAL)
        claim = claim_of(self.flow.database, Accepted(handle.run_id, (handle.task_id,)), Mode.EPHEMERAL)
        with self._worker(patience_s) as here:
            reason = carry_out(claim, here, token or StopToken())
        statement = (
            "SELECT a.number, a.failure, a.verdict, a.waits, t.state AS task, t.attempts FROM attempts a"
            " JOIN tasks t ON t.id = a.task_id WHERE a.id = :id"
        )
        return reason, one(self.flow.database, statement, id=claim.attempt_id)

    @contextmanager
    def _worker(self, patience_s: float) -> Iterator[WorkerServices]:
        patient = self.settings.model_copy(update={"engine_patience_s": patience_s})
        here = services.build(patient, pooled=True, max_idle=0)
        try:
            yield here
        finally:
            here.close()


@pytest.fixture
def fixture(settings: Settings, base_image_tag: str, tmp_path: Path) -> Iterator[Fixture]:
    (tmp_path / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    with MegaFlow(settings) as flow:
        goal = ScriptGoal(tests=store_bundle(open_store(settings.artifacts()), tmp_path))
        environment = EnvironmentSpec(image=base_image_tag, workdir="/")
        yield Fixture(settings, flow, AgentTask(name="task", description="Rest.", environment=environment, goal=goal))


@contextmanager
def coming_back(proxy: EngineProxy) -> Iterator[None]:
    """Whenever it leaves inside the block, it is back after a moment."""

    def come_back() -> None:
        if proxy.away.wait(60):
            time.sleep(AWAY_S)
            proxy.come_back()

    thread = threading.Thread(target=come_back)
    thread.start()
    try:
        yield
    finally:
        thread.join(90)


@pytest.mark.parametrize("amid", [False, True], ids=["before-it-is-asked", "amid-the-making"])
def test_an_engine_that_comes_back_in_time_costs_time_and_no_attempt(
    fixture: Fixture, proxy: EngineProxy, amid: bool
) -> None:
    if amid:
        proxy.dropped["POST /containers/create"] = True
    else:
        proxy.leave()
    with coming_back(proxy):
        reason, row = fixture.attempt(patience_s=60)
    assert (reason, row.verdict["reward"], row.failure) == (EndReason.SUBMITTED, 1.0, None)
    assert (row.number, row.attempts, row.task) == (1, 1, "succeeded")
    assert AWAY_S / 2 <= row.waits["engine"] < 30  # it was away for a moment before it was asked
    assert left(fixture.settings) == []


def test_one_that_stays_away_is_named_and_the_task_is_tried_again(fixture: Fixture, proxy: EngineProxy) -> None:
    proxy.leave()
    begun = time.monotonic()
    reason, row = fixture.attempt(patience_s=1.0)
    assert time.monotonic() - begun < 20
    assert (reason, row.verdict, row.task) == (EndReason.INFRASTRUCTURE, None, "pending")
    assert (row.failure["error"], row.failure["phase"]) == ("EngineUnavailable", "claimed")
    for part in (f"no container engine answers at {proxy.url}", "start the engine", "MEGAFLOW_DOCKER_URL"):
        assert part in row.failure["message"]
    assert row.waits["engine"] >= 1.0


def test_who_is_cancelled_waits_for_no_engine(fixture: Fixture, proxy: EngineProxy) -> None:
    proxy.leave()
    token = StopToken()
    cancelling = threading.Timer(0.5, token.stop, [EndReason.CANCELLED])
    cancelling.start()
    begun = time.monotonic()
    reason, row = fixture.attempt(patience_s=120, token=token)
    cancelling.join()
    assert time.monotonic() - begun < 20
    assert (reason, row.failure["error"]) == (EndReason.CANCELLED, "Stopped")


PROJECT = """
services:
  main: {image: BASE, depends_on: [beside]}
  beside: {image: BASE, command: [sh, -c, "echo open; sleep 600"]}
"""
OPEN = "grep -q open /logs/services/beside.log && echo 1 > $OUT || echo 0 > $OUT".replace(
    "$OUT", "/logs/verifier/reward.txt"
)


@pytest.fixture
def several(fixture: Fixture, base_image_tag: str, tmp_path: Path) -> Iterator[Fixture]:
    """A task whose script judges by what a service beside the agent's has written."""
    files = {"project/docker-compose.yaml": PROJECT.replace("BASE", base_image_tag), "tests/test.sh": OPEN}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    store = open_store(fixture.settings.artifacts())
    project, tests = (store_bundle(store, tmp_path / name) for name in ("project", "tests"))
    environment = EnvironmentSpec(compose=Compose(context=project), workdir="/")
    fields = {"environment": environment, "goal": ScriptGoal(tests=tests)}
    yield fixture.of(fixture.task.model_copy(update=fields))
    engine = Settings(home=fixture.settings.home, installation=fixture.settings.installation)
    sweep_all(engine)


@pytest.mark.parametrize(("where", "act"), [(NopAgent, "run"), (ScriptGrader, "grade")], ids=["agent", "grader"])
def test_what_an_absent_engine_kept_from_agent_or_grader_is_no_reward_of_zero(
    several: Fixture, proxy: EngineProxy, monkeypatch: pytest.MonkeyPatch, where: type, act: str
) -> None:
    acted = getattr(where, act)

    def deserted(*values: Any) -> Any:
        proxy.leave()
        return acted(*values)

    monkeypatch.setattr(where, act, deserted)
    reason, row = several.attempt(patience_s=1.0)
    proxy.come_back()
    assert (reason, row.verdict, row.task) == (EndReason.INFRASTRUCTURE, None, "pending")
    assert row.failure["error"] == "EngineUnavailable"


def left(settings: Settings) -> list[str]:
    """What of this installation stands on the engine."""
    ours = {"label": f"megaflow={settings.installation}"}
    return [str(found["Id"]) for found in engine_of(settings).api.containers(all=True, filters=ours)]
