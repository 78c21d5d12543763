"""What SWE-agent is told, and what is made of the ways in which it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from app.agents.framework import Ended, FrameworkBundle
from app.agents.installation import Installer
from app.agents.swe_agent.adapter import ENDINGS, SweAgent
from app.errors import AgentNotSetUp
from app.models.endings import EndReason
from app.models.spec import Limits
from tests.unit.frameworks import TASK, a_job, a_place, ended

RECORDED = {"model_stats": {"instance_cost": 0.0, "tokens_sent": 1200, "tokens_received": 90, "api_calls": 4}}


class ToolStore(Installer):
    """An installer that has the framework."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)

    def checkout(self, name: str, source: str, lock: Path, **_: object) -> FrameworkBundle:  # type: ignore[override]
        return FrameworkBundle(name, self.folder)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    config = tmp_path / "source" / "config"
    config.mkdir(parents=True)
    texts = {"system_template": "S", "instance_template": "in {{working_dir}}: {{problem_statement}}"}
    told = {"agent": {"templates": {**texts, "demonstrations": ["x"]}, "tools": {"bundles": [{"path": "tools/y"}]}}}
    (config / "default.yaml").write_text(yaml.safe_dump(told))
    return tmp_path


@pytest.fixture
def agent(checkout: Path) -> SweAgent:
    return SweAgent(ToolStore(checkout), "somewhere", call_timeout_s=60, call_attempts=2)


def left(home: Path, status: str | None, message: str = "") -> Ended:
    folder = home / "output" / "task"
    folder.mkdir(parents=True)
    step = {"action": "", "observation": "", "response": message, "thought": message, "state": {}}
    told = {"trajectory": [step], "history": [], "info": {**RECORDED, "exit_status": status, "submission": None}}
    (folder / "task.traj").write_text(json.dumps(told))
    return ended(home, 0)


def test_it_is_told_the_task_the_limits_and_where_the_model_is(agent: SweAgent) -> None:
    limits = Limits(max_steps=7, command_timeout_s=45, agent_timeout_s=600)
    command = agent.command(a_job(limits=limits), a_place("/tools/swe-agent"))
    told = dict(word.removeprefix("--").split("=", 1) for word in command.argv if word.startswith("--"))
    assert told["agent.model.name"] == "openai/a-model"
    assert told["agent.model.api_base"] == "http://127.0.0.1:4000/v1"
    assert told["agent.model.per_instance_call_limit"] == "7"
    assert told["env.deployment.type"] == "local"
    assert told["env.repo.type"] == "preexisting"
    assert told["env.repo.reset"] == "false"
    assert command.files[told["problem_statement.path"].removeprefix("/home-of-it/")] == TASK.encode()
    settings = yaml.safe_load(command.files[told["config"].removeprefix("/home-of-it/")])["agent"]
    assert settings["tools"]["execution_timeout"] == 45
    assert settings["tools"]["total_execution_timeout"] == 600
    assert [bundle["path"] for bundle in settings["tools"]["bundles"]] == [
        "/tools/swe-agent/source/tools/registry",
        "/tools/swe-agent/source/tools/submit",
    ]
    assert settings["model"]["retry"]["retries"] == 2
    assert settings["model"]["completion_kwargs"] == {"timeout": 60, "max_retries": 0}


def test_its_prompts_are_the_checkouts_own(agent: SweAgent, checkout: Path) -> None:
    def templates() -> dict[str, str]:
        command = agent.command(a_job(workdir="/srv/bed"), a_place(workdir="/srv/bed"))
        texts: dict[str, str] = yaml.safe_load(command.files["settings.yaml"])["agent"]["templates"]
        return texts

    assert templates() == {"system_template": "S", "instance_template": "in /srv/bed: {{problem_statement}}"}
    (checkout / "source" / "config" / "default.yaml").write_text("agent: nothing of the kind")
    with pytest.raises(AgentNotSetUp, match=r"default\.yaml with agent\.templates"):
        templates()


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("submitted", EndReason.SUBMITTED),
        ("exit_cost", EndReason.STEP_LIMIT),
        ("submitted (exit_cost)", EndReason.STEP_LIMIT),
        ("exit_context", EndReason.CONTEXT_EXHAUSTED),
        ("submitted (exit_context)", EndReason.CONTEXT_EXHAUSTED),
        ("exit_format", EndReason.AGENT_ERROR),
        ("submitted (exit_format)", EndReason.AGENT_ERROR),
        ("exit_command", EndReason.SUBMITTED),
        ("exit_forfeit", EndReason.SUBMITTED),
        ("exit_api", EndReason.MODEL_ERROR),
        ("exit_environment_error", EndReason.AGENT_ERROR),
        ("exit_command_timeout", EndReason.AGENT_ERROR),
        ("submitted (exit_total_execution_time)", EndReason.AGENT_TIMEOUT),
        ("a status of a later version", EndReason.AGENT_ERROR),
    ],
)
def test_a_status_has_a_meaning(agent: SweAgent, tmp_path: Path, status: str, reason: EndReason) -> None:
    ending = agent.ending(left(tmp_path, status, "what it said"))
    assert ending.reason is reason
    assert (status in ending.detail) is (status != "submitted")
    assert ending.steps == 4
    assert status in ENDINGS or "later version" in status


@pytest.mark.parametrize("status", ["exit_error", "submitted (exit_error)"])
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Exit due to unknown error: litellm.AuthenticationError: AuthenticationError: …", EndReason.MODEL_ERROR),
        ("Exit due to unknown error: litellm.Timeout: APITimeoutError - …", EndReason.MODEL_ERROR),
        ("Exit due to runtime error: Command 'pwd' failed", EndReason.AGENT_ERROR),
        ("the file litellm.py has an Error", EndReason.AGENT_ERROR),
    ],
)
def test_an_error_is_the_models_when_its_client_says_so(
    agent: SweAgent, tmp_path: Path, status: str, message: str, reason: EndReason
) -> None:
    ending = agent.ending(left(tmp_path, status, message))
    assert ending.reason is reason
    assert message in ending.detail


def test_without_a_trajectory_its_output_says_what_there_is_to_say(agent: SweAgent, tmp_path: Path) -> None:
    ending = agent.ending(ended(tmp_path, said="Extra inputs are not permitted"))
    assert ending.reason is EndReason.AGENT_ERROR
    assert "exit code 1: Extra inputs are not permitted" in ending.detail


@pytest.mark.parametrize("source", [None, ""])
def test_without_a_checkout_it_says_how_to_get_one(tmp_path: Path, source: str | None) -> None:
    with pytest.raises(AgentNotSetUp, match="MEGAFLOW_SWE_AGENT_SOURCE"):
        SweAgent(Installer(tmp_path), source).install()


@pytest.mark.parametrize(
    ("source", "version"),
    [
        (None, "checkout"),
        ("/srv/swe-agent@home", "checkout"),
        ("https://me@git.example.org/swe-agent", "checkout"),
        ("https://git.example.org/swe-agent@v1.1.0", "v1.1.0"),
        ("git@git.example.org:swe-agent@v1.1.0", "v1.1.0"),
    ],
)
def test_its_version_is_what_was_asked_of_git(tmp_path: Path, source: str | None, version: str) -> None:
    assert SweAgent(Installer(tmp_path), source).version == version
