"""What Qwen Code is told, and what its endings mean; most of its words are recorded, the rest is made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.agents.framework import FrameworkCommand
from app.agents.installation import Installer
from app.agents.qwen_code.adapter import QwenCode
from app.models.endings import EndReason
from app.models.spec import Limits
from tests.unit.frameworks import a_job, a_place, ended

INIT = '{"type":"system","subtype":"init","cwd":"/testbed","model":"m"}'
LOOP = (
    "Loop detection halted the run (consecutive_identical_tool_calls: the model repeated the same tool call with "
    "identical arguments). This is an always-on guard and cannot be disabled via `model.skipLoopDetection`."
)
TOO_LONG = "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens."
TURNS = "Reached max session turns for this session. Increase the number of turns by specifying maxSessionTurns"


@pytest.fixture
def agent(tmp_path: Path) -> QwenCode:
    return QwenCode(Installer(tmp_path), call_timeout_s=90)


def settings_of(command: FrameworkCommand) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command.files["settings.json"])
    return found


def failed(message: str) -> str:
    told = {"subtype": "error_during_execution", "is_error": True, "num_turns": 2, "error": {"message": message}}
    return json.dumps({"type": "result", **told})


def test_the_limits_reach_it(agent: QwenCode) -> None:
    command = agent.command(
        a_job(limits=Limits(max_steps=7, command_timeout_s=45, max_turn_tokens=900, context_tokens=50_000)), a_place()
    )
    assert command.argv[command.argv.index("--max-session-turns") + 1] == "7"
    settings = settings_of(command)
    assert settings["tools"]["shell"]["defaultTimeoutMs"] == 45_000
    calls = settings["model"]["generationConfig"]
    assert (calls["timeout"], calls["streamIdleTimeoutMs"], calls["maxRetries"]) == (90_000, 90_000, 0)
    assert (calls["samplingParams"], calls["contextWindowSize"]) == ({"max_tokens": 900}, 50_000)


def test_nobody_else_hears_of_it(agent: QwenCode) -> None:
    settings = settings_of(agent.command(a_job(), a_place()))
    assert settings["privacy"]["usageStatisticsEnabled"] is False
    assert settings["telemetry"]["enabled"] is False
    assert settings["general"]["enableAutoUpdate"] is False


@pytest.mark.parametrize(("text", "by_input"), [("-y ü", False), ("ü" * 50_000, False), ("ü" * 50_001, True)])
def test_a_text_is_an_argument_as_long_as_it_may_be_one(agent: QwenCode, text: str, by_input: bool) -> None:
    command = agent.command(a_job(description=text), a_place())
    assert (f"--prompt={text}" in command.argv) is not by_input
    assert command.stdin == (text.encode() if by_input else b"")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("[API Error: 401 invalid x-api-key]", EndReason.MODEL_ERROR),
        ("[API Error: 429 slow down]\nPossible quota limitations in place", EndReason.MODEL_ERROR),
        ("[API Error: 500 broken]", EndReason.MODEL_ERROR),
        ("[API Error: Connection error. (cause: UND_ERR_SOCKET: other side closed)]", EndReason.MODEL_ERROR),
        ("[API Error: Model stream ended without a finish reason.]", EndReason.MODEL_ERROR),
        ("[API Error: Model stream ended with empty response text.]", EndReason.MODEL_ERROR),
        ("[API Error: No stream activity for 4000ms after 1 chunks]", EndReason.MODEL_ERROR),
        (f"[API Error: 400 {TOO_LONG}]", EndReason.CONTEXT_EXHAUSTED),
        (LOOP, EndReason.AGENT_ERROR),
        (f"a tool said: {TOO_LONG}", EndReason.AGENT_ERROR),
    ],
)
def test_errors(agent: QwenCode, tmp_path: Path, message: str, reason: EndReason) -> None:
    ending = agent.ending(ended(tmp_path, printed=f"{INIT}\n{failed(message)}\n"))
    assert ending.reason is reason
    assert ending.detail == f"error_during_execution: {' '.join(message.split())}"
    assert ending.steps == 2


def test_a_success(agent: QwenCode, tmp_path: Path) -> None:
    line = {"type": "result", "subtype": "success", "is_error": False, "num_turns": 3, "result": "Done."}
    ending = agent.ending(ended(tmp_path, 0, printed=f"{INIT}\n{json.dumps(line)}\n"))
    assert (ending.reason, ending.detail, ending.steps) == (EndReason.SUBMITTED, "", 3)


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (53, TURNS, EndReason.STEP_LIMIT),
        (55, "the run took longer than it may", EndReason.BUDGET_EXHAUSTED),
        (52, "Invalid configuration", EndReason.AGENT_ERROR),
        (1, "an exception", EndReason.AGENT_ERROR),
        (0, "", EndReason.AGENT_ERROR),
        (-9, "", EndReason.AGENT_ERROR),
    ],
)
def test_ends_without_a_result_line(agent: QwenCode, tmp_path: Path, code: int, said: str, reason: EndReason) -> None:
    ending = agent.ending(ended(tmp_path, code, said=said, printed=INIT))
    assert ending.reason is reason
    assert ending.detail.startswith(f"exit code {code} ")
    assert said in ending.detail
