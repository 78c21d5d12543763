"""What Claude Code is told, and what its endings mean; most of its words are recorded, the rest is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.agents.claude_code.adapter import ClaudeCode
from app.agents.installation import Installer
from app.models.endings import EndReason
from app.models.spec import Limits
from tests.unit.frameworks import a_job, a_place, ended

INIT = '{"type":"system","subtype":"init","cwd":"/testbed","model":"m","permissionMode":"bypassPermissions"}'
USAGE = '"usage":{"input_tokens":30,"cache_creation_input_tokens":5,"cache_read_input_tokens":7,"output_tokens":15}'
ERROR = f'"subtype":"success","is_error":true,"num_turns":1,{USAGE},"terminal_reason":'

RESULTS = {
    "completed": f'"subtype":"success","is_error":false,"num_turns":3,"result":"Done.",{USAGE},'
    '"terminal_reason":"completed","stop_reason":"end_turn"',
    "nothing said": f'"subtype":"success","is_error":false,"num_turns":2,"result":"",{USAGE},'
    '"terminal_reason":"completed"',
    "max_turns": f'"subtype":"error_max_turns","is_error":true,"num_turns":3,{USAGE},"terminal_reason":"max_turns",'
    '"errors":["Reached maximum number of turns (2)"]',
    "refused": f'{ERROR}"api_error","api_error_status":401,"result":"Invalid API key · Fix external API key"',
    "busy": f'{ERROR}"api_error","api_error_status":429,"result":"API Error: Request rejected (429) · slow down"',
    "broken": f'{ERROR}"api_error","api_error_status":500,"result":"API Error: 500 broken. A server-side issue"',
    "garbage": f'{ERROR}"api_error","api_error_status":null,'
    '"result":"API Error: Stream ended without receiving any events"',
    "silent": f'{ERROR}"api_error","api_error_status":null,'
    '"result":"API Error: Stream idle timeout - no chunks received"',
    "not there": f'{ERROR}"api_error","api_error_status":null,"result":"API Error: Connection refused (ECONNREFUSED)"',
    "too long": f'{ERROR}"prompt_too_long","api_error_status":400,"result":"Prompt is too long"',
    "another": f'{ERROR}"something_new","result":"?"',
    "older": f'"subtype":"error_during_execution","is_error":true,"num_turns":1,{USAGE}',
}


@pytest.fixture
def agent(tmp_path: Path) -> ClaudeCode:
    return ClaudeCode(Installer(tmp_path), call_timeout_s=90, call_attempts=4)


def test_the_limits_reach_it(agent: ClaudeCode) -> None:
    limits = Limits(max_steps=7, command_timeout_s=45, max_turn_tokens=900, context_tokens=50_000)
    command = agent.command(a_job(limits=limits), a_place())
    words = command.argv[1:]
    assert words[words.index("--max-turns") + 1] == "7"
    env = command.env
    assert (env["BASH_DEFAULT_TIMEOUT_MS"], env["BASH_MAX_TIMEOUT_MS"]) == ("45000", "45000")
    assert (env["API_TIMEOUT_MS"], env["CLAUDE_CODE_MAX_RETRIES"]) == ("90000", "3")
    assert (env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"], env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"]) == ("900", "50000")


def test_its_model_is_the_tasks_whatever_it_asks_for(agent: ClaudeCode) -> None:
    env = agent.command(a_job(), a_place()).env
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:4000"
    models = [value for name, value in env.items() if name.endswith("_MODEL")]
    assert len(models) == 6
    assert set(models) == {"a-model"}


def test_a_text_of_any_length_is_its_input(agent: ClaudeCode) -> None:
    text = "ü" * 200_000
    command = agent.command(a_job(description=text), a_place())
    assert command.stdin == text.encode()
    assert sum(map(len, command.argv)) < 2000


@pytest.mark.parametrize(
    ("case", "reason", "said"),
    [
        ("completed", EndReason.SUBMITTED, ""),
        ("nothing said", EndReason.SUBMITTED, ""),
        ("max_turns", EndReason.STEP_LIMIT, "max_turns: Reached maximum number of turns (2)"),
        ("refused", EndReason.MODEL_ERROR, "api_error: Invalid API key · Fix external API key"),
        ("busy", EndReason.MODEL_ERROR, "api_error: API Error: Request rejected (429) · slow down"),
        ("broken", EndReason.MODEL_ERROR, "api_error: API Error: 500 broken. A server-side issue"),
        ("garbage", EndReason.MODEL_ERROR, "api_error: API Error: Stream ended without receiving any events"),
        ("silent", EndReason.MODEL_ERROR, "api_error: API Error: Stream idle timeout - no chunks received"),
        ("not there", EndReason.MODEL_ERROR, "api_error: API Error: Connection refused (ECONNREFUSED)"),
        ("too long", EndReason.CONTEXT_EXHAUSTED, "prompt_too_long: Prompt is too long"),
        ("another", EndReason.AGENT_ERROR, "something_new: ?"),
        ("older", EndReason.AGENT_ERROR, "error_during_execution"),
    ],
)
def test_endings(agent: ClaudeCode, tmp_path: Path, case: str, reason: EndReason, said: str) -> None:
    line = f'{{"duration_api_ms":5,{RESULTS[case]},"type":"result"}}'
    ending = agent.ending(ended(tmp_path, 0, printed=f"{INIT}\n{line}\n"))
    assert (ending.reason, ending.detail) == (reason, said)
    assert ending.steps == json.loads(line)["num_turns"]


def test_a_success_that_is_an_error_is_none(agent: ClaudeCode, tmp_path: Path) -> None:
    line = '{"type":"result","subtype":"success","is_error":true,"result":"?","terminal_reason":"completed"}'
    ending = agent.ending(ended(tmp_path, printed=line))
    assert (ending.reason, ending.detail) == (EndReason.AGENT_ERROR, "completed: ?")


@pytest.mark.parametrize("code", [-9, 1, 0])
def test_without_a_result(agent: ClaudeCode, tmp_path: Path, code: int) -> None:
    said = "--dangerously-skip-permissions cannot be used with root/sudo privileges"
    ending = agent.ending(ended(tmp_path, code, said=said, printed=f'{INIT}\n{{"type":"result","subt'))
    assert ending.reason is EndReason.AGENT_ERROR
    assert f"exit code {code}" in ending.detail
    assert said in ending.detail


def test_its_commands_lose_every_variable_of_ours(agent: ClaudeCode) -> None:
    command = agent.command(a_job(), a_place())
    (first,) = (content.decode() for name, content in command.files.items() if name.endswith(".sh"))
    assert set(command.env) == set(first.split()[1:])
