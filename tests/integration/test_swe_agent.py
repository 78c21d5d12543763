"""SWE-agent's adapter with the stand-in of it (and with a real checkout where there is one), in a container."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from app.agents.installation import Installer
from app.agents.running import FrameworkAgent
from app.agents.swe_agent.adapter import SweAgent
from app.models.endings import EndReason
from app.models.spec import Limits
from megaflow.contract.agents.trial import KEY, STARTED, NeverCancelled, TrialStage
from tests.integration.inside_fixture import (
    ENV_SCENE,
    SEEN,
    engine,
    kept_tools,
    look_inside,
    settings,
    stage,
)

__all__ = ["engine", "settings", "stage"]

pytestmark = [pytest.mark.agents, pytest.mark.docker, pytest.mark.extra]

STAND_IN = Path(__file__).parents[1] / "stand_ins" / "swe_agent"
CHECKOUT = os.environ.get("MEGAFLOW_SWE_AGENT_SOURCE")
LIMITS = Limits(agent_timeout_s=300, command_timeout_s=30, max_steps=5)
SCENES = {
    "look": ENV_SCENE,
    "words": "[{thought: I am only talking}, {thought: and on}, {thought: and on}, {thought: and on}]",
    "slow": "[{command: 'sleep 60'}, {command: 'sleep 60'}, {command: 'sleep 60'}, {submit: true}]",
    "leaves": "[{command: 'echo x > new.txt; exit 3'}, {submit: true}]",
}


def cloned(folder: Path, into: Path) -> str:
    """The folder as a repository in `into` with one commit, the same for the same content: its address for git."""
    shutil.copytree(folder, into, ignore=shutil.ignore_patterns("__pycache__"))
    env = {**os.environ, "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
    git = ["git", "-C", str(into), "-c", "user.name=toy", "-c", "user.email=toy@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True, env=env)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, env=env, capture_output=True, text=True)
    return f"file://{into}@{head.stdout.strip()}"


def framework_of(source: str, call_timeout_s: float = 60) -> SweAgent:
    lock = {} if source == CHECKOUT else {"lock": STAND_IN / "requirements.lock"}
    return SweAgent(Installer(kept_tools()), source, call_timeout_s=call_timeout_s, call_attempts=2, **lock)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(STAND_IN, id="stand-in"),
        pytest.param(CHECKOUT, id="checkout", marks=() if CHECKOUT else pytest.mark.skip("no checkout is named")),
    ],
)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == CHECKOUT:
        return str(request.param)
    return cloned(STAND_IN, tmp_path_factory.mktemp("swe-agent") / "clone")


@pytest.fixture(scope="module")
def framework(source: str) -> SweAgent:
    made = framework_of(source)
    made.install()
    return made


def test_it_solves_a_task_and_leaves_its_trajectory(stage: TrialStage, framework: SweAgent, tmp_path: Path) -> None:
    trial = stage.play(FrameworkAgent(framework), "solve", tmp_path, LIMITS, NeverCancelled())
    report = trial.report
    assert report.end_reason is EndReason.SUBMITTED, report
    assert trial.solved
    assert trial.untracked == ()
    assert report.steps == 3
    assert report.files is not None
    told = json.loads((report.files / "output" / "task" / "task.traj").read_text())
    assert told["info"]["exit_status"] == "submitted"
    assert "+    return sum(items)" in told["info"]["submission"]
    assert "cart.py" in told["trajectory"][0]["action"]


def test_its_commands_run_as_the_tasks_own_and_see_nothing_of_it(
    stage: TrialStage, framework: SweAgent, tmp_path: Path
) -> None:
    foreign = ("OPENAI", "LITELLM", "PYTHONPATH=/opt/megaflow", "LD_LIBRARY_PATH", "CONTEXT_", "octocat")
    look_inside(stage, framework, tmp_path, LIMITS, *foreign)
    assert b"PAGER=cat" in stage.environment.get(f"/testbed/{SEEN}")


@pytest.mark.parametrize(
    ("scene", "reason", "said"),
    [
        ("endless", EndReason.STEP_LIMIT, "exit_cost"),
        ("refused", EndReason.MODEL_ERROR, "AuthenticationError"),
        ("busy", EndReason.MODEL_ERROR, "RateLimitError"),
        ("broken", EndReason.MODEL_ERROR, "InternalServerError"),
        ("garbage", EndReason.MODEL_ERROR, "litellm."),
        ("too-long", EndReason.CONTEXT_EXHAUSTED, "submitted (exit_context)"),
        ("breaks-later", EndReason.MODEL_ERROR, "submitted (exit_error)"),
        ("words", EndReason.AGENT_ERROR, "exit_format"),
        ("leaves", EndReason.AGENT_ERROR, "submitted (exit_error)"),
    ],
)
def test_endings_by_name(
    stage: TrialStage, framework: SweAgent, tmp_path: Path, scene: str, reason: EndReason, said: str
) -> None:
    report = stage.play(FrameworkAgent(framework), scene, tmp_path, LIMITS, NeverCancelled()).report
    assert report.end_reason is reason, report
    assert said in report.detail
    assert KEY not in report.detail


def test_commands_that_take_too_long_end_it_at_the_third(
    stage: TrialStage, framework: SweAgent, tmp_path: Path
) -> None:
    hasty = LIMITS.model_copy(update={"command_timeout_s": 1.0})
    report = stage.play(FrameworkAgent(framework), "slow", tmp_path, hasty, NeverCancelled()).report
    assert report.end_reason is EndReason.AGENT_ERROR, report
    assert "exit_command_timeout" in report.detail


@pytest.mark.extra
def test_its_time_ends_it_with_all_that_it_started(stage: TrialStage, framework: SweAgent, tmp_path: Path) -> None:
    short = LIMITS.model_copy(update={"agent_timeout_s": 15.0})
    report = stage.play(FrameworkAgent(framework), "works", tmp_path, short, NeverCancelled()).report
    assert report.end_reason is EndReason.AGENT_TIMEOUT, report
    assert stage.environment.get(f"/testbed/{STARTED}")
    left = stage.environment.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout_s=20).stdout.decode()
    assert "tail -n 0 -f" not in left
    assert "sweagent" not in left
