"""Arguments of an agent: which keys it takes, what a spec keeps of them, and what the adapters make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from app.agents.catalogue import AGENTS, Traits
from app.agents.claude_code.adapter import ClaudeCode
from app.agents.framework import FrameworkCommand
from app.agents.installation import Installer
from app.agents.mini_swe_agent.adapter import MiniSweAgent
from app.cli.submission_options import arguments_of
from app.errors import SpecInvalid
from app.models.spec import TaskSpec
from app.submission import specs_for
from tests.building import a_spec, a_task
from tests.unit.frameworks import a_job, a_place

KNOWN = AGENTS | {"mine": Traits(any_argument=True)}


def spec_with(agent: str, given: dict[str, Any]) -> TaskSpec:
    model = "replay" if KNOWN[agent].needs_model else None
    (spec,) = specs_for([a_task()], agent=agent, mode="auto", model=model, known=KNOWN, agent_args=given)
    return spec


def test_a_spec_without_arguments_is_stored_as_before() -> None:
    assert "agent_args" not in a_spec().model_dump_json()
    assert spec_with("nop", {}).digest() == TaskSpec.digest_of(spec_with("nop", {}).model_dump_json())


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
        ("claude-code", {"max_thinking_tokens": 4000}, ("max_thinking_tokens", "valid string")),
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


def command_of(agent: ClaudeCode | MiniSweAgent, arguments: dict[str, str]) -> FrameworkCommand:
    return agent.command(a_job(arguments=arguments), a_place())


def test_claude_code_gets_its_thinking_and_its_prompt(tmp_path: Path) -> None:
    agent = ClaudeCode(Installer(tmp_path))
    command = command_of(agent, {"max_thinking_tokens": "0", "append_system_prompt": "Be brief."})
    assert command.env["MAX_THINKING_TOKENS"] == "0"
    assert command.argv[command.argv.index("--append-system-prompt") + 1] == "Be brief."
    plain = command_of(agent, {})
    assert "MAX_THINKING_TOKENS" not in plain.env
    assert "--append-system-prompt" not in plain.argv


def test_mini_swe_agent_reads_commands_as_its_configuration_writes_them(tmp_path: Path) -> None:
    agent = MiniSweAgent(Installer(tmp_path))
    text_based = command_of(agent, {"config": "mini_textbased"})
    assert text_based.argv[1:5] == ("-c", "mini_textbased.yaml", "-c", "job.yaml")
    assert yaml.safe_load(text_based.files["job.yaml"])["model"]["model_class"] == "litellm_textbased"
    plain = command_of(agent, {})
    assert plain.argv[1:5] == ("-c", "mini.yaml", "-c", "job.yaml")
    assert "model_class" not in yaml.safe_load(plain.files["job.yaml"])["model"]
