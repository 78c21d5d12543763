"""What is mini-swe-agent's own: its trajectory, its words, its commands. How it ends is the agents' contract's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.agents.base import AgentReport
from app.agents.framework import Ended, Stop
from app.agents.installation import Installer
from app.agents.mini_swe_agent import adapter
from app.agents.mini_swe_agent.adapter import ENDINGS, MiniSweAgent
from app.agents.running import FrameworkAgent
from app.models.endings import EndReason
from app.models.spec import Limits
from megaflow.contract.agents.trial import DESCRIPTION, KEY, NeverCancelled, Trial, TrialStage
from tests.integration.inside_fixture import engine, kept_tools
from tests.unit.folder_shell import FolderShell

__all__ = ["engine"]

LIMITS = Limits(agent_timeout_s=90, command_timeout_s=30, max_steps=10)
SCENES = {
    "look": r"""[{thought: Let me look, command: "cat cart.py && env > seen.txt && pwd"},
      {thought: A bash-only test that fails, command: "[[ -f nothing ]] || { echo to-stderr >&2; exit 3; }"},
      {thought: Off by one, command: "sed -i 's/items.:-1./items/' cart.py && git diff"},
      {thought: Done., submit: true}]""",
    "words": "[{thought: one}, {thought: two}, {thought: three}]",
}


@pytest.fixture
def agent() -> FrameworkAgent:
    made = FrameworkAgent(MiniSweAgent(Installer(kept_tools()), call_timeout_s=60, call_attempts=2))
    made.check()
    return made


@pytest.fixture
def stage(tmp_path: Path, engine: str) -> TrialStage:
    made = TrialStage(FolderShell(tmp_path / "root"), engine)
    made.prepare()
    return made


def play(agent: FrameworkAgent, stage: TrialStage, scene: str, scratch: Path, limits: Limits = LIMITS) -> Trial:
    return stage.play(agent, scene, scratch, limits, NeverCancelled())


def trajectory(report: AgentReport) -> str:
    assert report.files is not None
    return (report.files / "mini.traj.json").read_text()


@pytest.mark.agents
def test_it_solves_a_bug_leaves_its_trajectory_and_keeps_the_key_to_itself(
    agent: FrameworkAgent, stage: TrialStage, tmp_path: Path
) -> None:
    trial = play(agent, stage, "look", tmp_path / "scratch")
    report = trial.report
    assert (report.end_reason, trial.solved, report.steps) == (EndReason.SUBMITTED, True, 4), report
    told = json.loads(trajectory(report))
    assert told["info"]["exit_status"] == "Submitted"
    assert told["trajectory_format"] == "mini-swe-agent-1.1"
    assert DESCRIPTION in told["messages"][1]["content"]
    seen = [message for message in told["messages"] if message["role"] == "tool"]
    assert f"{tmp_path}/root/testbed\n" in seen[0]["extra"]["raw_output"]
    assert (seen[1]["extra"]["returncode"], seen[1]["extra"]["raw_output"]) == (3, "to-stderr\n")
    assert report.log is not None
    assert "Off by one" in report.log.read_text()
    inside = stage.environment.get("/testbed/seen.txt").decode()
    assert "PAGER=cat" in inside
    assert KEY not in inside
    assert "OPENAI" not in inside
    kept = [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]
    assert [path for path in kept if KEY.encode() in path.read_bytes()] == []


@pytest.mark.agents
def test_a_model_that_calls_no_tools_solves_it_by_text(
    agent: FrameworkAgent, stage: TrialStage, tmp_path: Path
) -> None:
    job = replace(stage.job("solve", tmp_path / "scratch", LIMITS), arguments={"config": "mini_textbased"})
    report = agent.run(job, stage.environment, NeverCancelled())
    assert report.end_reason is EndReason.SUBMITTED, report
    told = json.loads(trajectory(report))
    roles = {message["role"] for message in told["messages"]}
    assert "tool" not in roles
    assert any("```mswea_bash_command" in str(m["content"]) for m in told["messages"] if m["role"] == "assistant")


@pytest.mark.agents
def test_a_model_that_only_talks_is_an_agent_error(agent: FrameworkAgent, stage: TrialStage, tmp_path: Path) -> None:
    report = play(agent, stage, "words", tmp_path / "scratch").report
    assert report.end_reason is EndReason.AGENT_ERROR
    assert "RepeatedFormatError" in report.detail


@pytest.fixture
def ended(tmp_path: Path) -> Ended:
    for name in ("stdout", "stderr"):
        (tmp_path / name).write_text(f"the end of {name}\n")
    (tmp_path / "home").mkdir()
    return Ended(Stop.ITSELF, 0, tmp_path / "stdout", tmp_path / "stderr", tmp_path / "home")


@pytest.mark.parametrize("word", [word for word in ENDINGS if word.isidentifier() and word != "killed"])
def test_every_word_of_its_trajectory_means_what_the_table_says(ended: Ended, word: str) -> None:
    stats = {"model_stats": {"api_calls": 2}}
    last = {"role": "exit", "extra": {"exit_status": word, "exception_str": "why"}}
    found = MiniSweAgent(Installer(ended.home))
    (ended.home / "mini.traj.json").write_text(json.dumps({"info": {"exit_status": word, **stats}, "messages": [last]}))
    told = found.ending(ended)
    assert (told.reason, told.steps) == (ENDINGS[word], 2)
    assert (told.detail == "") == (word == "Submitted")


@pytest.mark.parametrize(
    "told", [[], {}, {"info": []}, {"info": {}}, {"info": {"exit_status": ""}}, {"info": {"model_stats": 3}}]
)
def test_a_trajectory_without_an_end_is_an_agent_error_with_what_it_wrote(ended: Ended, told: object) -> None:
    (ended.home / "mini.traj.json").write_text(json.dumps(told))
    found = MiniSweAgent(Installer(ended.home)).ending(ended)
    assert found.reason is EndReason.AGENT_ERROR
    assert "the end of stderr" in found.detail


def test_an_unknown_exception_is_an_agent_error_and_a_kill_is_not_its_doing(ended: Ended) -> None:
    (ended.home / "mini.traj.json").write_text(json.dumps({"info": {"exit_status": "ZeroDivisionError"}}))
    framework = MiniSweAgent(Installer(ended.home))
    assert framework.ending(ended).reason is EndReason.AGENT_ERROR
    (ended.home / "mini.traj.json").unlink()
    assert framework.ending(replace(ended, returncode=-9)).reason is EndReason.INFRASTRUCTURE


def test_the_version_that_is_named_is_the_one_that_is_locked() -> None:
    lock = Path(adapter.__file__).with_name("requirements.lock").read_text()
    assert f"\nmini-swe-agent=={MiniSweAgent.version} " in lock
    assert "://" not in lock  # hashes only: any index will do
