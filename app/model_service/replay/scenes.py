"""Playing scripts: from a request to the answer that its script has for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.model_service.dialects.base import Message, Reply, Request
from app.model_service.replay.conversation import choose, in_script, turn_due
from app.model_service.replay.delivery import Answer, Refusal
from app.model_service.replay.script import Script, Turn
from app.model_service.replay.tools import is_aside, render, render_aside
from app.model_service.replay.tries import Tries
from app.models.model_calls import TokenUse

_TOO_LONG = "This model's maximum context length is 8192 tokens. However, your messages resulted in {tokens} tokens."


class Scenes:
    """The scripts, and how often the turns of each caller were tried."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self._scripts = tuple(scripts)
        self._by_name = {script.name: script for script in scripts}
        self._tries = Tries()

    @property
    def names(self) -> list[str]:
        return sorted(self._by_name)

    def named(self, name: str) -> Script | None:
        return self._by_name.get(name)

    def play(
        self, request: Request, body: Mapping[str, Any], *, prompt_tokens: int, caller: str, script: Script | None
    ) -> Answer:
        """The answer that is due; `script` when it was asked for by name, else the one that matches.

        `caller` tells conversations apart for faults that pass.

        Raises: ReplayError.
        """
        aside = is_aside(request, body)
        found, at = self._due(request, script, aside=aside)
        if found is None:
            return _answer(render_aside(_ASIDE, request, body), prompt_tokens, name="aside-0")
        turn = found.turns[min(at, len(found.turns) - 1)]
        faulty = turn.times is None or self._tries.next((caller, found.name, at, aside)) <= turn.times
        if faulty and turn.refuses:
            return Answer(_refusal(turn, prompt_tokens), delay_s=turn.delay_s)
        message = render_aside(turn.thought or _ASIDE, request, body) if aside else render(turn, request, at)
        return _answer(
            message,
            prompt_tokens,
            name=f"{found.name}-{at}",
            delay_s=turn.delay_s if faulty else 0.0,
            token_delay_s=turn.token_delay_s,
            cut=turn.cut and faulty,
        )

    def _due(self, request: Request, script: Script | None, *, aside: bool) -> tuple[Script | None, int]:
        if script is None and aside:
            return None, 0
        if script is None:
            return choose(self._scripts, request.messages)
        return script, in_script(script, turn_due(request.messages))


_ASIDE = "Working on the task."


def _answer(
    message: Message,
    prompt_tokens: int,
    *,
    name: str,
    delay_s: float = 0.0,
    token_delay_s: float = 0.0,
    cut: bool = False,
) -> Answer:
    use = TokenUse(prompt=prompt_tokens, completion=answer_tokens(message), cached=0, reasoning=0)
    reply = Reply(message, "tool_calls" if message.get("tool_calls") else "stop", use)
    return Answer(reply, name, delay_s, token_delay_s, cut)


def _refusal(turn: Turn, prompt_tokens: int) -> Refusal | None:
    """None: garbage."""
    if turn.garbage:
        return None
    if turn.context_exceeded:
        return Refusal(400, "context_length_exceeded", _TOO_LONG.format(tokens=max(prompt_tokens, 8193)))
    status = turn.status or 500
    message = turn.message or f"the script asked for HTTP {status}"
    return Refusal(status, "scripted_fault", message, turn.retry_after_s)


def answer_tokens(message: Message) -> int:
    """About how many tokens an answer has."""
    calls = message.get("tool_calls") or ()
    characters = len(message.get("content") or "") + sum(len(call["name"]) + len(call["arguments"]) for call in calls)
    return estimated(characters)


def estimated(characters: int) -> int:
    """About how many tokens: a quarter of the characters, rounded up, at least 1. No tokenizer belongs to a script."""
    return max(1, -(-characters // 4))
