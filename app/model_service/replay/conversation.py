"""Reading a conversation: which script it belongs to, and which of its turns is due. Pure.

Nothing is remembered between two requests: both follow from the conversation alone, so a repeated request gives the
same answer and any number of conversations may use one script at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from app.model_service.dialects.base import Message
from app.model_service.replay.script import ReplayError, Script, flatten, listed

_OURS = re.compile(r"call_(\d+)_\d+")
_PATIENCE = 2


def call_id(turn: int, number: int) -> str:
    """The id of a turn's tool call. Frameworks send it back, so it tells which turns are over, however they merge,
    split or drop messages."""
    return f"call_{turn}_{number}"


def choose(scripts: Sequence[Script], messages: Sequence[Message]) -> tuple[Script, int]:
    """The script whose `match` was said, and the number of the turn that is due, from 0.

    Only what was said before the first command is searched: later messages carry the output of commands, which may
    quote another task's statement.

    Raises: ReplayError: no script, several scripts, or none of its turns left.
    """
    heard = []
    for at, said in _openings(messages):
        found = [script for script in scripts if script.match is not None and script.match in said]
        if len(found) > 1:
            raise ReplayError(
                "scenario_ambiguous",
                f"expected one script to match; found {listed(script.name for script in found)}; "
                "choose longer match sentences",
            )
        if found:
            return found[0], in_script(found[0], turn_due(messages[at:]))
        heard.append(said)
    raise ReplayError(
        "scenario_unknown",
        f"expected a conversation that contains the match sentence of a script; found none in "
        f"{_shown(' '.join(heard))}; add a script for this task or correct its match; known scripts: "
        f"{listed(script.name for script in scripts)}",
    )


def in_script(script: Script, due: int) -> int:
    """`due`, when the script has such a turn. A submission stays due for a while: SWE-agent, for one, shows a review
    and wants it again.

    Raises: ReplayError.
    """
    last = len(script.turns) - 1
    if due <= last or (script.turns[last].submit and due <= last + _PATIENCE):
        return due
    raise ReplayError(
        "scenario_over",
        f"expected at most {last + 1} turns in script {script.name!r}; found a request for turn {due + 1}; "
        "end the script with `submit: true` or add turns",
    )


def turn_due(messages: Sequence[Message]) -> int:
    """How many answers the conversation holds. Neighbouring messages of the assistant are one answer."""
    due, answering = 0, False
    for message in messages:
        if message.get("role") != "assistant":
            answering = False
            continue
        ours = [int(turn[1]) for call in message.get("tool_calls") or () if (turn := _OURS.fullmatch(str(call["id"])))]
        if ours:
            due = max(due, max(ours) + 1)
        elif not answering:
            due += 1
        answering = True
    return due


def told(messages: Sequence[Message]) -> str:
    """The system's and user's words before the first answer."""
    return "\n".join(_told(messages))


def _told(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        if message.get("role") == "assistant":
            return
        yield words(message.get("content"))


def _openings(messages: Sequence[Message]) -> Iterator[tuple[int, str]]:
    """Where each stretch of told words begins, and the words, up to the first answer that may be a command.

    A framework may put words into the assistant's mouth before the task is told (Qwen Code's line of the Gemini CLI
    has it acknowledge its surroundings).
    """
    begin, parts = 0, list[str]()
    for at, message in enumerate(messages):
        if message.get("role") != "assistant":
            parts.append(words(message.get("content")))
            continue
        if parts:
            yield begin, flatten("\n".join(parts))
        if message.get("tool_calls") or "```" in words(message.get("content")):
            return
        begin, parts = at + 1, []
    if parts:
        yield begin, flatten("\n".join(parts))


def words(content: object) -> str:
    """The text of a message's content."""
    match content:
        case str():
            return content
        case list():
            return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        case _:
            return ""


def _shown(text: str) -> str:
    return repr(text if len(text) <= 400 else f"{text[:200]} … {text[-200:]}")
