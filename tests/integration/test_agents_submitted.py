"""From a submission to the attempt's end: agents of manifests, and agents that cannot be had here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app import evaluation
from app.client import MegaFlow
from app.datasets.selection import Selection
from app.errors import SettingsInvalid, UnknownName
from app.evaluation import Submission, demo_tasks
from app.ledger.accept import Accepted
from app.ledger.attempts import Claim
from app.models.endings import EndReason
from app.models.spec import AgentTask, EnvironmentKind, Mode, ModelChoice, Network
from app.models.states import TaskState
from app.settings import Settings
from app.workers import services
from app.workers.attempt import carry_out
from app.workers.lease import StopToken
from app.workers.services import WorkerServices
from tests.building import claim_of
from tests.contract.agents.example import EXAMPLE
from tests.integration.rows import one
from tests.services import MakeSettings

RESULT = '{"protocol": "megaflow-agent/1", "end_reason": "submitted"}'
HEAD = 'protocol = "megaflow-agent/1"\nversion = "1"\n'
MODEL = ModelChoice(name="replay")


@pytest.fixture
def settings(make_settings: MakeSettings, tmp_path: Path) -> Settings:
    """With three agents that are not ours: the example, one without a model, and one inside whose folder is made."""
    folder = tmp_path / "adapters"
    (folder / "bare").mkdir(parents=True)
    (folder / "bare" / "run").write_text(f"printf '%s' '{RESULT}' > \"$HOME/result.json\"\n")
    (folder / "bare.toml").write_text(
        f'{HEAD}name = "bare"\nbundle = "bare"\nneeds_model = false\nargv = ["sh", "{{tool}}/run"]\n'
    )
    (folder / "within.toml").write_text(
        f'{HEAD}name = "within"\nplacement = "inside"\nargv = ["sh", "{{tool}}/run"]\n'
        'install = ["cp", "bare/run", "{tool}/run"]\n'
    )
    return make_settings(agent_manifests=(EXAMPLE, folder / "bare.toml", folder / "within.toml"))


@pytest.fixture
def flow(settings: Settings) -> Iterator[MegaFlow]:
    with MegaFlow(settings) as opened:
        yield opened


def _task(settings: Settings, kind: EnvironmentKind = EnvironmentKind.LOCAL) -> AgentTask:
    return next(task for task in demo_tasks(settings, kind) if task.name == "order-ledger")


def test_an_agent_of_a_manifest_is_submitted_like_ours(settings: Settings, flow: MegaFlow) -> None:
    handle = flow.enqueue(_task(settings), agent="sketch", model=MODEL)
    assert one(flow.database, "SELECT agent FROM tasks WHERE id = :t", t=handle.task_id).agent == "sketch"
    (spec,) = evaluation.specs_of(
        Submission(dataset="demo", agent="sketch", model=MODEL, selection=Selection(limit=1)), settings
    )
    assert (spec.agent, spec.model, spec.task.environment.tools) == ("sketch", MODEL, ())


def test_one_that_acts_inside_is_found_by_its_worker(settings: Settings) -> None:
    (spec,) = evaluation.specs_of(
        Submission(dataset="demo", agent="within", model=MODEL, selection=Selection(limit=1)), settings
    )
    environment = spec.task.environment
    assert (environment.tools, environment.network) == (("within",), Network.MODEL_ONLY)
    here = services.build(settings, pooled=True, max_idle=0)
    assert here.agent("within").needs_model
    assert here.tools_inside(environment) == {"within": "/opt/megaflow/tools/within"}
    assert (here.tool("within") / "run").is_file()
    here.close()


def test_all_are_those_with_a_model(settings: Settings) -> None:
    specs = evaluation.specs_of(
        Submission(dataset="demo", agent="all", model=MODEL, selection=Selection(limit=1)), settings
    )
    assert {spec.agent for spec in specs} == {
        *("mini-swe-agent", "claude-code", "qwen-code", "openhands"),
        *("sketch", "within"),
    }


def test_an_unknown_agent_is_told_the_external_ones_too(settings: Settings, flow: MegaFlow) -> None:
    known = r"unknown agent 'nobody'; known: .*bare.*claude-code.*sketch.*within"
    with pytest.raises(UnknownName, match=known):
        flow.enqueue(_task(settings), agent="nobody", model=MODEL)
    with pytest.raises(UnknownName, match=known):
        evaluation.specs_of(Submission(dataset="demo", agent="oracle,nobody"), settings)
    here = services.build(settings, pooled=True, max_idle=0)
    with pytest.raises(UnknownName, match=known):
        here.agent("nobody")
    here.close()


def test_a_manifest_that_is_wrong_is_told_before_anything_is_submitted(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "adapters" / "bare.toml").write_text(HEAD)
    with MegaFlow(settings) as flow, pytest.raises(SettingsInvalid, match="name"):
        flow.enqueue(_task(settings), agent="sketch", model=MODEL)


@pytest.fixture
def here(settings: Settings) -> Iterator[WorkerServices]:
    built = services.build(settings, pooled=True, max_idle=0)
    yield built
    built.close()


def claimed(flow: MegaFlow, agent: str, model: ModelChoice | None = None) -> Claim:
    """A task in a folder, for this agent, about to be carried out."""
    handle = flow.enqueue(_task(flow.settings), agent=agent, model=model, mode=Mode.EPHEMERAL)
    return claim_of(flow.database, Accepted(handle.run_id, (handle.task_id,)), Mode.EPHEMERAL)


def test_an_agent_of_a_manifest_carries_out_its_task(flow: MegaFlow, here: WorkerServices) -> None:
    claim = claimed(flow, "bare")
    assert carry_out(claim, here, StopToken()) is EndReason.SUBMITTED
    (result,) = flow.run(claim.run_id).results(timeout=0)
    assert (result.state, result.reward) == (TaskState.SUCCEEDED, 0.0)
    assert result.attempt is not None
    assert result.attempt.environment["agent_version"] == here.agent("bare").version != ""


@pytest.mark.parametrize("source", [None, "https://git.example.org/swe-agent"])
def test_an_agent_that_nobody_has_set_up_is_not_tried_again(make_settings: MakeSettings, source: str | None) -> None:
    settings = make_settings(swe_agent_source=source)
    here = services.build(settings, pooled=True, max_idle=0)
    with MegaFlow(settings) as flow:
        claim = claimed(flow, "swe-agent", MODEL)
        assert carry_out(claim, here, StopToken()) is EndReason.INFRASTRUCTURE
        row = one(flow.database, "SELECT state, failure FROM tasks WHERE id = :t", t=claim.task_id)
        assert (row.state, row.failure["error"]) == ("failed", "AgentNotSetUp")
    here.close()
