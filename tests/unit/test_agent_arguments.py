"""Arguments of an agent: which keys it takes, what a spec keeps of them, and what the adapters make of them."""

from __future__ import annotations

from typing import Any

import pytest

from app.agents.catalogue import AGENTS, Traits
from app.cli.submission_options import arguments_of
from app.errors import SpecInvalid
from app.models.spec import TaskSpec
from app.submission import specs_for
from tests.building import a_task

KNOWN = AGENTS | {"mine": Traits(any_argument=True)}


def spec_with(agent: str, given: dict[str, Any]) -> TaskSpec:
    model = "replay" if KNOWN[agent].needs_model else None
    (spec,) = specs_for([a_task()], agent=agent, mode="auto", model=model, agents=KNOWN, agent_args=given)
    return spec


def test_arguments_are_kept_whatever_their_order() -> None:
    spec = spec_with("claude-code", {"max_thinking_tokens": "4000", "append_system_prompt": "Be\nbrief."})
    other = spec_with("claude-code", {"append_system_prompt": "Be\nbrief.", "max_thinking_tokens": "4000"})
    assert TaskSpec.model_validate_json(spec.model_dump_json()).agent_args == {
        "append_system_prompt": "Be\nbrief.",
        "max_thinking_tokens": "4000",
    }
    assert spec.digest() == other.digest()


def test_an_external_agent_takes_every_key() -> None:
    assert spec_with("mine", {"Any.thing-1": ""}).agent_args == {"Any.thing-1": ""}


@pytest.mark.parametrize(
    ("agent", "given", "words"),
    [
        ("nop", {"config": "mini"}, ("'nop' takes no arguments",)),
        ("claude-code", {"max_thinking_token": "1"}, ("append_system_prompt, max_", "mean 'max_thinking_tokens'")),
        ("claude-code", {"max_thinking_tokens": "many"}, ("tokens of thinking", "found 'many'")),
        ("claude-code", {"max_thinking_tokens": 4000}, ("max_thinking_tokens", "expected a text")),
        ("claude-code", {"append_system_prompt": "a\0b"}, ("append_system_prompt", "NUL")),
        ("claude-code", {"append_system_prompt": "x" * 20_000}, ("append_system_prompt", "16384")),
        ("mini-swe-agent", {"config": "/etc/passwd"}, ("mini_textbased", "found '/etc/passwd'")),
        ("mine", {"no key": "1"}, ("'no key'",)),
    ],
)
def test_what_an_agent_does_not_take_is_refused(agent: str, given: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(SpecInvalid) as refused:
        spec_with(agent, given)
    assert all(word in str(refused.value) for word in (*words, "nothing was submitted")), refused.value


def test_the_option_is_a_key_and_all_that_follows() -> None:
    assert arguments_of(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    assert arguments_of(None) == {}
    for wrong in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(SpecInvalid, match="--agent-arg"):
            arguments_of(wrong)
