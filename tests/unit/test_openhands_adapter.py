"""What OpenHands is told, and what is made of the ways in which it ends (recorded from real runs)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.agents.framework import Ended
from app.agents.installation import Installer
from app.agents.openhands import adapter
from app.agents.openhands.adapter import OpenHands
from app.models.endings import EndReason
from app.models.spec import Limits
from tests.unit.frameworks import TASK, a_job, a_place, ended


@pytest.fixture
def agent(tmp_path: Path) -> OpenHands:
    return OpenHands(Installer(tmp_path), call_timeout_s=59.5, call_attempts=2)


def left(home: Path, told: dict[str, Any]) -> Ended:
    (home / "result.json").write_text(json.dumps(told))
    return ended(home)


def result(status: str, error: str | None = None, detail: str = "") -> dict[str, Any]:
    return {"status": status, "error": error, "detail": detail, "raised": "", "steps": 5}


def test_it_is_told_the_task_the_limits_and_where_the_model_is(agent: OpenHands) -> None:
    limits = Limits(max_steps=7, command_timeout_s=45)
    command = agent.command(a_job(limits=limits), a_place("/tools/openhands"))
    assert command.argv[0] == "/tools/openhands/bin/python3"
    assert [word.removeprefix("/home-of-it/") for word in command.argv[-2:]] == ["drive.py", "job.json"]
    assert {"drive.py", "job.json"} < command.files.keys()
    told = json.loads(command.files["job.json"])
    assert told == {
        "task": TASK,
        "model": "a-model",
        "base_url": "http://127.0.0.1:4000/v1",
        "max_iterations": 7,
        "command_timeout_s": 45,
        "call_timeout_s": 60,
        "call_attempts": 2,
    }


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (result("finished"), EndReason.SUBMITTED),
        (result("stuck"), EndReason.AGENT_ERROR),
        (result("error", "MaxIterationsReached"), EndReason.STEP_LIMIT),
        (result("error", "LLMContextWindowExceedError", "litellm.ContextWindow…"), EndReason.CONTEXT_EXHAUSTED),
        (result("error", "LLMAuthenticationError", "Your LLM API key appears …"), EndReason.MODEL_ERROR),
        (result("error", "LLMRateLimitError"), EndReason.MODEL_ERROR),
        (result("error", "LLMServiceUnavailableError"), EndReason.MODEL_ERROR),
        (result("error", "LLMTimeoutError"), EndReason.MODEL_ERROR),
        (result("error", "LLMBadRequestError"), EndReason.MODEL_ERROR),
        (result("error", "LLMNoResponseError"), EndReason.MODEL_ERROR),
        (result("error", "RuntimeError", "Could not find bash in PATH"), EndReason.AGENT_ERROR),
        (result("error"), EndReason.AGENT_ERROR),
        (result("a status of a later version"), EndReason.AGENT_ERROR),
    ],
)
def test_a_result_has_a_meaning(agent: OpenHands, tmp_path: Path, told: dict[str, Any], reason: EndReason) -> None:
    ending = agent.ending(left(tmp_path, told))
    assert ending.reason is reason
    assert ending.steps == 5
    for word in (told["status"], told["error"], told["detail"]):
        assert told["status"] == "finished" or not word or word in ending.detail


@pytest.mark.parametrize("content", [None, "", "{", "[]"])
def test_without_a_result_its_output_says_what_there_is_to_say(
    agent: OpenHands, tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    ending = agent.ending(ended(tmp_path, said="ModuleNotFoundError: no such thing"))
    assert ending.reason is EndReason.AGENT_ERROR
    assert "exit code 1: ModuleNotFoundError: no such thing" in ending.detail


def test_the_version_that_is_named_is_the_one_that_is_locked() -> None:
    lock = Path(adapter.__file__).with_name("requirements.lock").read_text()
    assert f"\nopenhands-sdk=={OpenHands.version} " in lock
    assert f"\nopenhands-tools=={OpenHands.version} " in lock
    assert "\nlitellm==1.105.3 " in lock  # the one after it cannot call tools
    assert "://" not in lock  # hashes only: any index will do
