"""Scripts: what is refused at the door, which one a conversation belongs to, which turn is due."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.errors import SpecInvalid
from app.model_service.replay.player import estimated_tokens
from app.model_service.replay.script import Script, Turn, call_id, choose, load_scripts, opening_text, turn_due
from app.model_service.serving import CallRefusal

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


def test_two_scripts_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: x\nmatch: one\nturns: [{submit: true}]")
    (tmp_path / "b.yaml").write_text("name: x\nmatch: null\nturns: [{submit: true}]")
    with pytest.raises(SpecInvalid, match=r"b\.yaml.*name of its own"):
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
    messages = [user("abc"), assistant("x"), result()]
    assert choose([script("abc")], messages)[1] == 1
    assert choose([script("abc")], messages)[1] == 1


def test_the_ids_of_calls_tell_the_turn_whatever_became_of_the_messages() -> None:
    first, second = call_id(0, 0), call_id(1, 0)
    plain = [user("abc"), assistant(first), result(), assistant(second), result()]
    split = [user("abc"), assistant(text="hm"), assistant(first), result(), assistant(second), assistant(text="more")]
    merged = [user("abc"), assistant(first, second), result(), result()]
    dropped = [user("abc"), user("(earlier messages were left out)"), assistant(second), result()]
    assert [turn_due(one) for one in (plain, split, merged, dropped)] == [2, 2, 2, 2]


def test_a_reply_in_plain_words_is_a_turn_too() -> None:
    messages = [user("abc"), assistant(text="hm"), user("use a tool"), assistant(call_id(1, 0)), result()]
    assert [turn_due(messages[:3]), turn_due(messages)] == [1, 2]


def test_what_the_assistant_is_made_to_say_before_the_task_is_no_turn() -> None:
    messages = [user("These are your surroundings."), assistant(text="Got it."), user("abc")]
    assert choose([script("abc")], messages)[1] == 0
    assert choose([script("abc")], [*messages, assistant(call_id(0, 0)), result()])[1] == 1


@pytest.mark.parametrize("answer", [assistant("x"), assistant(text="```bash\nls\n```")])
def test_a_sentence_in_the_output_of_a_command_does_not_choose_the_script(answer: dict[str, Any]) -> None:
    messages = [user("abc"), answer, user("output quoting xyz")]
    assert choose([script("abc"), script("xyz", name="two")], messages)[0].name == "one"
    with pytest.raises(CallRefusal, match="contains the match sentence"):
        choose([script("xyz")], messages)


def test_content_in_parts_is_searched() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "here is abc"}]}]
    assert choose([script("abc")], messages)[1] == 0


def test_an_unknown_scenario_names_the_known_scripts() -> None:
    with pytest.raises(CallRefusal, match="known scripts: one, two") as caught:
        choose([script("abc"), script("xyz", name="two")], [user("nothing of the kind")])
    assert (caught.value.status, caught.value.code) == (404, "scenario_unknown")


def test_past_the_last_turn_is_an_error_that_names_the_script() -> None:
    with pytest.raises(CallRefusal, match="at most 1 turns in script 'one'") as caught:
        choose([script("abc", turns=1)], [user("abc"), assistant()])
    assert caught.value.code == "scenario_over"


def test_a_submission_may_be_wanted_again_but_not_for_ever() -> None:
    submitting = Script(match="abc", turns=(Turn(submit=True),), name="one")
    again = [user("abc"), assistant(call_id(0, 0)), user("Look over it, then submit once more")]
    assert choose([submitting], again)[1] == 1
    with pytest.raises(CallRefusal, match="request for turn 4"):
        choose([submitting], [user("abc"), assistant(call_id(2, 0)), user("and again")])


def test_a_text_that_two_scripts_match_is_an_error() -> None:
    with pytest.raises(CallRefusal, match="one, two"):
        choose([script("abc"), script("xyz", name="two")], [user("abc and xyz")])


def test_the_task_is_told_before_the_first_answer() -> None:
    messages = [{"role": "system", "content": "s"}, user("u"), assistant(), user("later")]
    assert opening_text(messages) == "s\nu"


def test_tokens_are_estimated_and_never_none() -> None:
    assert [estimated_tokens(0), estimated_tokens(4), estimated_tokens(5)] == [1, 1, 2]
