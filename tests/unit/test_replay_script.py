"""Scripts: what is refused at the door, which one a conversation belongs to, how a turn is put."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.errors import SpecInvalid
from app.model_service.script import (
    ReplayError,
    Script,
    Turn,
    choose,
    count_tokens,
    load_scripts,
    render,
    task_text,
)

BASH_TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"properties": {"command": {}}}}}
OTHER_TOOL = {"type": "function", "function": {"name": "think", "parameters": {"properties": {"idea": {}}}}}

GOOD = """
match: the frobnicator drops the last item
turns:
  - thought: Let me look
    command: cat src/frob.py
  - submit: true
"""


def script(match: str, *, turns: int = 2, name: str = "one") -> Script:
    return Script(match=match, turns=tuple(Turn(command=f"echo {at}") for at in range(turns)), name=name)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant() -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": []}


def refused(folder: Path, content: str) -> str:
    (folder / "bad.yaml").write_text(content)
    with pytest.raises(SpecInvalid) as caught:
        load_scripts([folder])
    assert "bad.yaml" in str(caught.value)
    return str(caught.value)


def test_a_script_is_named_after_its_file(tmp_path: Path) -> None:
    (tmp_path / "frob.yaml").write_text(GOOD)
    (loaded,) = load_scripts([tmp_path])
    assert loaded.name == "frob"
    assert [turn.submit for turn in loaded.turns] == [False, True]


def test_an_unknown_key_is_refused_with_file_and_field(tmp_path: Path) -> None:
    assert "turns.0.comand" in refused(tmp_path, "match: a\nturns: [{comand: ls}]")


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


def test_line_breaks_do_not_hinder_a_match() -> None:
    messages = [user("Please solve:\n  the frobnicator\n  drops the   last item, always")]
    found, turn = choose([script("the frobnicator drops the last item"), script("other")], messages)
    assert (found.match, turn) == ("the frobnicator drops the last item", 0)


def test_the_turn_is_the_number_of_answers_so_far() -> None:
    messages = [user("abc"), assistant(), {"role": "tool", "content": "x"}]
    assert choose([script("abc")], messages)[1] == 1
    assert choose([script("abc")], messages)[1] == 1


def test_a_sentence_in_a_later_message_does_not_choose_the_script() -> None:
    messages = [user("abc"), assistant(), user("output quoting xyz")]
    assert choose([script("abc"), script("xyz", name="two")], messages)[0].name == "one"


def test_content_in_parts_is_searched() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "here is abc"}]}]
    assert choose([script("abc")], messages)[1] == 0


def test_an_unknown_scenario_names_the_known_scripts() -> None:
    with pytest.raises(ReplayError, match="known scripts: one, two") as caught:
        choose([script("abc"), script("xyz", name="two")], [user("nothing of the kind")])
    assert (caught.value.status, caught.value.code) == (404, "scenario_unknown")


def test_past_the_last_turn_is_an_error_that_names_the_script() -> None:
    with pytest.raises(ReplayError, match="at most 1 turns in script 'one'") as caught:
        choose([script("abc", turns=1)], [user("abc"), assistant()])
    assert caught.value.code == "scenario_over"


def test_a_text_that_two_scripts_match_is_an_error() -> None:
    with pytest.raises(ReplayError, match="one, two"):
        choose([script("abc"), script("xyz", name="two")], [user("abc and xyz")])


def test_a_command_calls_the_tool_that_takes_one() -> None:
    reply = render(Turn(thought="hm", command="ls"), task="", tools=[OTHER_TOOL, BASH_TOOL])
    assert (reply.text, reply.tool, reply.commands) == ("hm", "bash", ("ls",))


def test_tools_without_a_command_parameter_are_refused_by_name() -> None:
    with pytest.raises(ReplayError, match="think"):
        render(Turn(command="ls"), task="", tools=[OTHER_TOOL])


def test_without_tools_a_command_becomes_the_fenced_block_that_the_prompt_names() -> None:
    turn = Turn(thought="hm", command="ls")
    assert render(turn, task="", tools=[]).text == "hm\n\n```bash\nls\n```"
    named = render(turn, task="like this: ```mswea_bash_command\nls\n```", tools=[])
    assert named.text == "hm\n\n```mswea_bash_command\nls\n```"


def test_submitting_follows_what_the_prompt_asks_for() -> None:
    submit = Turn(submit=True)
    plain = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    assert render(submit, task=f"issue `{plain}`", tools=[BASH_TOOL]).commands == (plain,)
    with_patch = f"{plain} && cat patch.txt"
    assert render(submit, task=with_patch, tools=[BASH_TOOL]).commands == ("git diff > patch.txt", with_patch)
    assert f"git diff > patch.txt && {with_patch}" in render(submit, task=with_patch, tools=[]).text


def test_a_turn_of_plain_words_calls_nothing() -> None:
    reply = render(Turn(thought="I am thinking"), task="", tools=[BASH_TOOL])
    assert (reply.tool, reply.commands) == (None, ())


def test_the_task_is_told_before_the_first_answer() -> None:
    messages = [{"role": "system", "content": "s"}, user("u"), assistant(), user("later")]
    assert task_text(messages) == "s\nu"


def test_tokens_are_estimated_and_never_none() -> None:
    assert [count_tokens(""), count_tokens("abcd"), count_tokens("abcde")] == [1, 1, 2]
