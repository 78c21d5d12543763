"""The spine between an agent and its model: whatever the end, its calls are on record, kept and paid for."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import zstandard

from app import evaluation
from app.agents.base import Agent, AgentJob, AgentReport
from app.datasets.selection import Selection
from app.errors import (
    AgentFailed,
    EnvironmentFailed,
    SpecInvalid,
)
from app.evaluation import Submission
from app.ledger import model_calls
from app.ledger.accept import NewRun, accept
from app.ledger.attempts import Claim
from app.ledger.database import Database
from app.model_service import trajectory
from app.model_service.gateway.app import Gateway
from app.model_service.recording.recorder import Recorder
from app.models.endings import EndReason
from app.models.model_calls import Dialect
from app.models.outcome import ArtifactKind, Phase
from app.models.shell import CancelToken, Shell
from app.models.spec import EnvironmentKind, Mode, ModelChoice
from app.settings import Settings
from app.workers import model_access, services
from app.workers.attempt import carry_out
from app.workers.lease import StopToken
from app.workers.services import WorkerServices
from tests.building import claim_of
from tests.integration import gateway_fixture
from tests.integration.gateway_fixture import MODEL, Engine, request, says
from tests.integration.rows import every, one, write
from tests.services import MakeSettings

COST_USD = 110e-6  # of one call: the engine's 110 tokens at $1 for a million


@dataclass
class Talker:
    """An agent that says something to its model, leaves a log and a file, and ends as its test wants."""

    end: Callable[[AgentJob], AgentReport] = lambda job: AgentReport(EndReason.SUBMITTED)
    says: Callable[[AgentJob], str] = lambda job: "Hello"
    name: str = "talker"
    version: str = "1"
    needs_model: bool = True
    needs_solution: bool = False

    def check(self) -> None:
        """Always there."""

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        assert job.model is not None
        assert job.model.api_key is not None
        (job.scratch / "agent.log").write_text("talked")
        (job.scratch / "home").mkdir()
        (job.scratch / "home" / "session.txt").write_text("said hello")
        wish = request(Dialect.CHAT, messages=[{"role": "user", "content": self.says(job)}])
        bearer = {"Authorization": f"Bearer {job.model.api_key.get_secret_value()}"}
        answer = httpx.post(f"{job.model.base_url}/chat/completions", json=wish, headers=bearer, trust_env=False)
        assert answer.status_code == 200, answer.text
        return self.end(job)


def raises(error: Exception) -> Callable[[AgentJob], AgentReport]:
    def end(job: AgentJob) -> AgentReport:
        raise error

    return end


@dataclass
class Fixture:
    """A gateway with its real recorder, an engine behind it, and one attempt that is claimed."""

    settings: Settings
    database: Database
    claim: Claim
    app: Gateway
    engine: Engine
    stop_gateway: Callable[[], None]
    token: StopToken = field(default_factory=StopToken)

    async def play(self, agent: Agent, patch: pytest.MonkeyPatch) -> EndReason:
        """Carry the attempt out with this agent."""
        here = services.build(self.settings, pooled=True, max_idle=0)
        patch.setattr(WorkerServices, "agent", lambda this, name: agent)
        try:
            return await asyncio.to_thread(carry_out, self.claim, here, self.token)
        finally:
            here.close()

    def row(self, statement: str) -> Any:
        return one(self.database, statement)

    @property
    def attempt(self) -> Any:
        return self.row("SELECT * FROM attempts")

    def kept(self) -> dict[ArtifactKind, bytes]:
        rows = every(self.database, "SELECT kind, key FROM artifacts WHERE key IS NOT NULL")
        store = services.open_store(self.settings.artifacts(), endpoint_url=None)
        return {ArtifactKind(row.kind): store.get(row.key) for row in rows}

    def missing(self, kind: ArtifactKind) -> str:
        return str(self.row(f"SELECT missing FROM artifacts WHERE kind = '{kind}'").missing)

    @property
    def messages(self) -> int:
        return int(self.row("SELECT count(*) AS n FROM model_messages").n)

    def is_paid_for(self) -> bool:
        """The attempt and its user were charged for one call, and its account was closed."""
        spent = self.row("SELECT spent_usd FROM accounts").spent_usd
        closed = self.claim.attempt_id not in self.app.services.recorder._accounts  # type: ignore[attr-defined]
        return closed and self.attempt.cost_usd == pytest.approx(COST_USD) == spent


@asynccontextmanager
async def fixture(make_settings: MakeSettings) -> AsyncIterator[Fixture]:
    settings = make_settings()
    prices = settings.home / "prices.yaml"
    prices.write_text(f"{MODEL}: {{prompt: 1, completion: 1}}\n")
    settings = settings.model_copy(update={"model_prices": prices})
    async with gateway_fixture.fixture(settings, attempt=False, recorder=lambda g: Recorder(settings, g.database)) as g:
        settings, loop = settings.model_copy(update={"gateway_url": (g.url,)}), asyncio.get_running_loop()
        claim = await asyncio.to_thread(a_claim, g.database, settings)
        stop = lambda: asyncio.run_coroutine_threadsafe(g.stop(), loop).result(30)  # noqa: E731
        yield Fixture(settings, g.database, claim, g.app, g.engine, stop)


def a_claim(database: Database, settings: Settings) -> Claim:
    wanted = Submission(
        dataset="demo",
        agent="oracle",
        environment=EnvironmentKind.LOCAL,
        mode=Mode.PERSISTENT,
        selection=Selection(only=("order-ledger",)),
    )
    (spec,) = evaluation.specs_of(wanted, settings)
    spec = spec.model_copy(update={"model": ModelChoice(name=MODEL)})
    return claim_of(database, accept(database, NewRun(specs=[spec])))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EnvironmentFailed("gone"), EndReason.ENVIRONMENT_ERROR),
        (SpecInvalid("asks for the host"), EndReason.INVALID_SPEC),
        (AgentFailed("no such program"), EndReason.AGENT_ERROR),
        (ZeroDivisionError("a bug"), EndReason.INFRASTRUCTURE),
    ],
)
async def test_an_agent_that_ends_in_an_error_leaves_its_calls_and_its_bill(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: EndReason
) -> None:
    async with fixture(make_settings) as here:
        assert await here.play(Talker(raises(error)), monkeypatch) is reason
        if reason is EndReason.AGENT_ERROR:  # its own doing: judged
            assert here.attempt.failure is None
        else:
            assert here.attempt.failure["error"] == type(error).__name__
            assert here.attempt.failure["phase"] == Phase.AGENT_STARTED, "the last door that it passed"
        assert here.attempt.environment["usage"]["model_calls"] == 1
        kept = here.kept()
        assert len(trajectory.read(kept[ArtifactKind.MODEL_CALLS])) == 1
        assert ArtifactKind.TRAJECTORY in kept
        assert kept[ArtifactKind.AGENT_LOG] == b"talked"
        packed = io.BytesIO(zstandard.decompress(kept[ArtifactKind.AGENT_FILES]))
        with tarfile.open(fileobj=packed) as archive:
            assert archive.getnames() == ["session.txt"]
        assert here.messages == 0
        assert here.is_paid_for()


class Unheard(Talker):
    """An agent whose model does not answer, and which calls that an error of its own."""

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        with pytest.raises(AssertionError):
            super().run(job, shell, cancel)
        return AgentReport(EndReason.AGENT_ERROR, "no answer")


@pytest.mark.parametrize(
    ("status", "message", "again"),
    [
        (401, "no such key", False),
        (404, f"The model `{MODEL}` does not exist.", False),
        (404, "Not Found", True),
    ],
)
async def test_a_refused_key_and_an_unknown_model_are_not_tried_again(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, status: int, message: str, again: bool
) -> None:
    async with fixture(make_settings) as here:
        here.engine.handler = says(status, message)(here.engine)
        assert await here.play(Unheard(), monkeypatch) is EndReason.MODEL_ERROR
        assert here.row("SELECT state FROM tasks").state == ("pending" if again else "failed")
        assert here.attempt.failure["error"] == ("AgentNotScored" if again else "ModelRefused")


async def test_one_that_is_stopped_has_its_calls_on_record(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fixture(make_settings) as here:

        def stopped(job: AgentJob) -> AgentReport:
            here.token.stop(EndReason.INTERRUPTED)
            return AgentReport(EndReason.CANCELLED)

        assert await here.play(Talker(stopped), monkeypatch) is EndReason.INTERRUPTED
        assert len(trajectory.read(here.kept()[ArtifactKind.MODEL_CALLS])) == 1
        assert here.is_paid_for()


async def test_the_token_that_an_agent_tells_its_model_is_kept_nowhere(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def tells(job: AgentJob) -> str:
        assert job.model is not None
        assert job.model.api_key is not None
        told.append(job.model.api_key.get_secret_value())
        return f"my environment: OPENAI_API_KEY={told[0]}"

    async with fixture(make_settings) as here:
        assert await here.play(Talker(says=tells), monkeypatch) is EndReason.SUBMITTED
        kept = here.kept()
        (call,) = trajectory.read(kept[ArtifactKind.MODEL_CALLS])
        assert call.messages[-1]["content"] == "my environment: OPENAI_API_KEY=[redacted]"
        assert not any(told[0].encode() in content for content in kept.values())
        assert here.messages == 0


async def test_calls_that_cannot_be_read_cost_no_result_and_stay_in_the_ledger(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fixture(make_settings) as here:

        def corrupts(job: AgentJob) -> AgentReport:
            write(
                here.database,
                "INSERT INTO model_messages (attempt_id, digest, body) VALUES (:attempt, 'd', 'no zstd')",
                attempt=here.claim.attempt_id,
            )
            return AgentReport(EndReason.SUBMITTED)

        assert await here.play(Talker(corrupts), monkeypatch) is EndReason.SUBMITTED
        assert here.attempt.state == "finished"
        for kind in (ArtifactKind.MODEL_CALLS, ArtifactKind.TRAJECTORY):
            assert "expected zstd" in here.missing(kind)
        assert here.messages > 0
        assert here.is_paid_for()


async def test_calls_are_forgotten_after_the_outcome_and_it_stands_when_they_cannot_be(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fixture(make_settings) as here:
        states: list[str] = []

        def fails(connection: Any, attempt_id: Any) -> None:
            states.append(here.attempt.state)
            raise ZeroDivisionError

        monkeypatch.setattr(model_calls, "forget_messages", fails)
        assert await here.play(Talker(), monkeypatch) is EndReason.SUBMITTED
        assert states == ["finished"]
        assert ArtifactKind.MODEL_CALLS in here.kept()


@pytest.mark.parametrize(
    ("said", "counts_as"),
    [
        (EndReason.AGENT_ERROR, EndReason.MODEL_ERROR),
        (EndReason.SUBMITTED, EndReason.SUBMITTED),
    ],
)
async def test_an_end_with_the_gateway_away_is_the_models_only_if_the_agent_says_that_it_is_done(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, said: EndReason, counts_as: EndReason
) -> None:
    monkeypatch.setattr(model_access, "_SETTLE_S", 0.0)

    async with fixture(make_settings) as here:

        def alone(job: AgentJob) -> AgentReport:
            here.stop_gateway()
            return AgentReport(said, "as the framework says")

        assert await here.play(Talker(alone), monkeypatch) is counts_as
        assert here.attempt.cost_usd == pytest.approx(COST_USD)
        assert len(trajectory.read(here.kept()[ArtifactKind.MODEL_CALLS])) == 1
