"""Scripts of the replay engine: reading them, which turn is due, and a turn in the terms of each framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.errors import SpecInvalid
from app.model_service.dialects.base import Message, Reply, Request
from app.model_service.replay.player import ReplayAnswer, ScriptPlayer, is_aside, render, render_aside, with_ids
from app.model_service.replay.script import Script, Turn, choose, load_scripts
from app.model_service.serving import CallRefusal


def script(match: str, *, turns: int = 2, name: str = "one") -> Script:
    return Script(match=match, turns=tuple(Turn(command=f"echo {at}") for at in range(turns)), name=name)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(*ids: str, text: str = "") -> dict[str, Any]:
    calls = [{"id": one, "name": "bash", "arguments": "{}"} for one in ids]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result() -> dict[str, Any]:
    return {"role": "tool", "content": "output", "tool_call_id": "x"}


def refused(folder: Path, content: str) -> str:
    (folder / "bad.yaml").write_text(content)
    with pytest.raises(SpecInvalid) as caught:
        load_scripts([folder])
    assert "bad.yaml" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("turns: [{submit: true}]", "match"),
        ("match: '  '\nturns: [{submit: true}]", "match"),
        ("match: a", "turns"),
        ("match: a\nturns: []", "turns"),
        ("match: a\nturns: [{}]", "turns.0"),
        ("match: a\nturns: [{command: ls, submit: true}]", "turns.0"),
        ("match: a\nturns: [{status: 200}]", "turns.0.status"),
        ("match: a\nturns: [{thought: x, delay_s: -1}]", "turns.0.delay_s"),
        ("match: a\nturns: [{command: ls, message: x}]", "turns.0"),
        ("match: a\nturns: [{status: 429, command: ls}]", "stands alone"),
        ("match: a\nturns: [{status: 429, garbage: true}]", "turns.0"),
        ("match: a\nturns: [{command: ls, retry_after_s: 2}]", "retry_after_s"),
        ("match: a\nturns: [{cut: true}]", "turns.0"),
        ("- a list", "list"),
        ("match: [", "YAML"),
    ],
)
def test_a_malformed_script_is_refused_by_field(tmp_path: Path, content: str, field: str) -> None:
    assert field in refused(tmp_path, content)


def test_two_scripts_that_one_text_could_match_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("match: drops the last item\nturns: [{submit: true}]")
    (tmp_path / "b.yaml").write_text("match: frob drops  the\n  last item\nturns: [{submit: true}]")
    with pytest.raises(SpecInvalid, match=r"b\.yaml.*overlaps.*a\.yaml"):
        load_scripts([tmp_path])


def test_folders_without_a_script_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid, match="at least one"):
        load_scripts([tmp_path])
    with pytest.raises(SpecInvalid, match="expected a folder"):
        load_scripts([tmp_path / "absent"])


@pytest.mark.parametrize("answer", [assistant("x"), assistant(text="```bash\nls\n```")])
def test_a_sentence_in_the_output_of_a_command_does_not_choose_the_script(answer: dict[str, Any]) -> None:
    messages = [user("abc"), answer, user("output quoting xyz")]
    assert choose([script("abc"), script("xyz", name="two")], messages)[0].name == "one"
    with pytest.raises(CallRefusal, match="contains the match sentence"):
        choose([script("xyz")], messages)


def test_a_text_that_two_scripts_match_is_an_error() -> None:
    with pytest.raises(CallRefusal, match="one, two"):
        choose([script("abc"), script("xyz", name="two")], [user("abc and xyz")])


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


PLAYER = ScriptPlayer([Script(match="box", name="s", turns=(Turn(command="ls"), Turn(thought="Done.", submit=True)))])
TOOL = {"name": "bash", "description": "", "parameters": {"properties": {"command": {"type": "string"}}}}


def _ask(messages: list[dict[str, Any]], **parameters: Any) -> Reply:
    request = Request("replay", tuple(messages), (TOOL,), False, None, parameters)
    found = with_ids(PLAYER.play(request, {}, prompt_tokens=1, script=None), request).content
    assert isinstance(found, Reply)
    return found


def test_the_second_prompt_begins_with_the_first_and_its_answer() -> None:
    messages = [{"role": "user", "content": "open the box"}]
    first = _ask(messages, return_token_ids=True)
    result = {"role": "tool", "tool_call_id": first.message["tool_calls"][0]["id"], "content": "a"}
    second = _ask([*messages, first.message, result], return_token_ids=True)
    assert first.prompt_token_ids
    assert first.token_ids
    before = (*first.prompt_token_ids, *first.token_ids)
    assert second.prompt_token_ids is not None
    assert second.prompt_token_ids[: len(before)] == before
    assert len(second.prompt_token_ids) > len(before)
    assert first.logprobs == (0.0,) * len(first.token_ids)


def test_without_being_asked_for_there_are_none_and_an_engines_own_stay() -> None:
    assert _ask([{"role": "user", "content": "open the box"}]).token_ids is None
    request = Request("replay", (), (), False, None, {"return_token_ids": True})
    recorded = ReplayAnswer(Reply({"role": "assistant", "content": ""}, "stop", None, token_ids=(4,)))  # type: ignore[arg-type]
    assert with_ids(recorded, request) is recorded


def test_a_schema_that_holds_itself_is_no_trap() -> None:
    made = tool("bash", ("command", "more"), command=TEXT, more={"$ref": "#/$defs/Node"})
    made["parameters"]["$defs"] = {
        "Node": {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#/$defs/Node"}}}
    }
    assert called(render(Turn(command="ls"), request(made), 0))[0][1]["command"] == "ls"
