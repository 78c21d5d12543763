"""How a turn is put: one script, the tools of five frameworks and of whoever comes next."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.model_service.dialects.base import Message, Request
from app.model_service.replay.player import command_tool, is_aside, render, render_aside
from app.model_service.replay.script import Turn

SUBMISSION = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"name": name, "description": "", "parameters": schema}


TEXT = {"type": "string"}
EDITOR = tool("file_editor", ("command", "path"), command={"type": "string", "enum": ["view", "create"]}, path=TEXT)
MINI = tool("bash", ("command",), command=TEXT)
CLAUDE = tool("Bash", ("command",), command=TEXT, timeout={"type": "number"}, description=TEXT)
QWEN = tool(
    "run_shell_command", ("command", "is_background"), command=TEXT, is_background={"type": "boolean"}, description=TEXT
)
RISK = {"type": "string", "enum": ["UNKNOWN", "LOW", "MEDIUM", "HIGH"]}
OPENHANDS = tool("terminal", ("command", "security_risk", "summary"), command=TEXT, security_risk=RISK, summary=TEXT)
FINISH = tool("finish", ("message",), message=TEXT)
SUBMIT = tool("submit")
THINK = tool("think", ("idea",), idea=TEXT)


def request(*tools: dict[str, Any], told: str = "a task", system: str = "You are an agent.") -> Request:
    messages: tuple[Message, ...] = ({"role": "system", "content": system}, {"role": "user", "content": told})
    return Request("replay", messages, tools, stream=False, max_tokens=None)


def called(message: Message) -> list[tuple[str, dict[str, Any]]]:
    return [(call["name"], json.loads(call["arguments"])) for call in message.get("tool_calls", ())]


@pytest.mark.parametrize(
    ("tools", "name", "arguments"),
    [
        ([MINI], "bash", {"command": "ls"}),
        ([THINK, CLAUDE], "Bash", {"command": "ls"}),
        ([EDITOR, QWEN], "run_shell_command", {"command": "ls", "is_background": False}),
        (
            [EDITOR, FINISH, OPENHANDS],
            "terminal",
            {"command": "ls", "security_risk": "LOW", "summary": "Let me look"},
        ),
        ([SUBMIT, MINI, EDITOR], "bash", {"command": "ls"}),
        ([tool("exec", ("command", "n"), command=TEXT, n={"type": "integer"})], "exec", {"command": "ls", "n": 0}),
    ],
)
def test_a_command_calls_the_tool_that_takes_one(
    tools: list[dict[str, Any]], name: str, arguments: dict[str, Any]
) -> None:
    message = render(Turn(thought="Let me look", command="ls"), request(*tools), 3)
    assert (message["content"], called(message)) == ("Let me look", [(name, arguments)])
    assert message["tool_calls"][0]["id"] == "call_3_0"


def test_a_known_shell_goes_before_whatever_else_takes_a_command() -> None:
    monitor = tool("Monitor", ("command",), command=TEXT)
    assert command_tool([monitor, CLAUDE]) == CLAUDE
    assert command_tool([monitor]) == monitor
    assert command_tool([EDITOR, THINK]) is None


def test_several_lines_are_one_command_for_a_tool_that_takes_only_one() -> None:
    lines = "cat > a <<'END'\nx\nEND\ncat a\n"
    one_only = {**OPENHANDS, "description": "Execute a shell command.\n* One command at a time: use `;`."}
    for offered, command in ((one_only, f"{{\n{lines}}}"), (OPENHANDS, lines)):
        assert called(render(Turn(command=lines), request(offered), 0))[0][1]["command"] == command
    assert called(render(Turn(command="ls\n"), request(one_only), 0))[0][1]["command"] == "ls\n"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$ref": "#/$defs/Risk"}, "LOW"),
        ({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}, 1),
        ({"type": "object", "required": ["a"], "properties": {"a": {"type": "array"}}}, {"a": []}),
        ({"type": "array", "minItems": 2, "items": {"type": "boolean"}}, [False, False]),
        ({"type": ["string", "null"]}, "Look"),
        ({"default": 7}, 7),
        ({"const": "x"}, "x"),
        ({}, "Look"),
    ],
)
def test_what_else_a_tool_demands_gets_a_value_of_its_type(schema: dict[str, Any], value: Any) -> None:
    made = tool("bash", ("command", "more"), command=TEXT, more=schema)
    made["parameters"]["$defs"] = {"Risk": RISK}
    assert called(render(Turn(thought="Look", command="ls"), request(made), 0)) == [
        ("bash", {"command": "ls", "more": value})
    ]


def test_a_schema_that_holds_itself_is_no_trap() -> None:
    made = tool("bash", ("command", "more"), command=TEXT, more={"$ref": "#/$defs/Node"})
    made["parameters"]["$defs"] = {
        "Node": {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#/$defs/Node"}}}
    }
    assert called(render(Turn(command="ls"), request(made), 0))[0][1]["command"] == "ls"


def test_submitting_calls_the_tool_that_is_there_for_it() -> None:
    done = Turn(thought="All fixed.", submit=True)
    assert called(render(done, request(OPENHANDS, FINISH), 0)) == [("finish", {"message": "All fixed."})]
    assert called(render(done, request(MINI, SUBMIT), 0)) == [("submit", {})]


def test_submitting_follows_what_the_prompt_asks_for() -> None:
    done = Turn(submit=True)
    assert called(render(done, request(MINI, told=f"run `{SUBMISSION}`"), 0)) == [("bash", {"command": SUBMISSION})]
    patch = f"{SUBMISSION} && cat patch.txt"
    both = [("bash", {"command": "git diff > patch.txt"}), ("bash", {"command": patch})]
    assert called(render(done, request(MINI, told=patch), 0)) == both
    fenced = render(done, request(told=f"```mswea_bash_command\n{patch}\n```"), 0)["content"]
    assert fenced == f"```mswea_bash_command\ngit diff > patch.txt && {patch}\n```"


@pytest.mark.parametrize("shell", [CLAUDE, QWEN])
def test_without_a_way_to_submit_the_last_words_are_plain(shell: dict[str, Any]) -> None:
    message = render(Turn(thought="All fixed.", submit=True), request(shell), 0)
    assert (message["content"], called(message)) == ("All fixed.", [])
    assert render(Turn(submit=True), request(shell), 0)["content"]


def test_without_tools_a_command_becomes_the_fenced_block_that_the_prompt_names() -> None:
    turn = Turn(thought="hm", command="ls")
    assert render(turn, request(told="```bash\nls\n```"), 0)["content"] == "hm\n\n```bash\nls\n```"
    named = render(turn, request(told="```mswea_bash_command\nls\n```"), 0)
    assert named["content"] == "hm\n\n```mswea_bash_command\nls\n```"


def test_swe_agents_text_mode_submits_by_a_command() -> None:
    asked = request(system="Answer with a command in a block:\n```\ncommand\n```")
    assert not is_aside(asked, {})
    assert render(Turn(submit=True), asked, 0)["content"] == "```bash\nsubmit\n```"


def test_a_turn_of_plain_words_calls_nothing() -> None:
    assert called(render(Turn(thought="I am thinking"), request(MINI), 0)) == []


@pytest.mark.parametrize(
    ("asked", "aside"),
    [
        (request(MINI), False),
        (request(told="```bash\nls\n```"), False),
        (request(told="Summarise this:\n```python\nx\n```"), True),
        (request(told="Make a title"), True),
        (request(THINK), True),
        (request(EDITOR), True),
    ],
)
def test_what_is_beside_the_conversation_is_known_by_its_tools(asked: Request, *, aside: bool) -> None:
    assert is_aside(asked, {}) is aside


SCHEMA = {"type": "object", "required": ["title", "new"], "properties": {"title": TEXT, "new": {"type": "boolean"}}}


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_json_is_answered_as_its_schema_says_in_every_dialect(body: dict[str, Any]) -> None:
    asked = request(told="```bash\nls\n```")
    assert is_aside(asked, body)
    assert json.loads(render_aside("Working", asked, body)["content"]) == {"title": "Working", "new": False}


def test_any_json_is_an_object() -> None:
    body = {"response_format": {"type": "json_object"}}
    assert json.loads(render_aside("Working", request(), body)["content"]) == {}


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "think"}},
        {"type": "tool", "name": "think"},
        {"type": "function", "name": "think"},
    ],
)
def test_a_tool_that_must_be_called_is_called(choice: Any) -> None:
    asked = request(EDITOR, THINK)
    assert called(render_aside("Working", asked, {"tool_choice": choice})) == [("think", {"idea": "Working"})]
    assert called(render_aside("Working", asked, {})) == []
    assert called(render_aside("Working", request(THINK), {})) == [("think", {"idea": "Working"})]
