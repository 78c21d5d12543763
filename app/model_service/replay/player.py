"""Plays scripts as answers in the calling framework's terms. No I/O.

Tools are recognised by their schema, not by the framework: a tool that takes a shell command as a string is called with
it, and its other required arguments get a plausible value of the right type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from app.model_service.dialects.base import Message, Reply, Request
from app.model_service.replay.script import Script, Turn, call_id, choose, flatten, in_script, opening_text, turn_due
from app.model_service.serving import CallRefusal
from app.models.model_calls import TokenUse

_ASIDE = "Working on the task."
_TOO_LONG = "This model's maximum context length is 8192 tokens. However, your messages resulted in {tokens} tokens."


@dataclass(frozen=True, slots=True)
class ReplayAnswer:
    """Answer to one request. `content` None: garbage."""

    content: Reply | CallRefusal | None
    id: str = ""
    delay_s: float = 0.0
    cut: bool = False
    source: str = "script"  # shown in a header: script | exact | position


class ScriptPlayer:
    """Finds the script and the turn of a request, and answers with it."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self._scripts = {script.name: script for script in scripts}

    @property
    def names(self) -> list[str]:
        return sorted(self._scripts)

    def named(self, name: str) -> Script | None:
        return self._scripts.get(name)

    def play(
        self, request: Request, body: Mapping[str, Any], *, prompt_tokens: int, script: Script | None
    ) -> ReplayAnswer:
        """Returns the answer that is due: of `script`, if it was requested by name, else of the script that matches.

        Raises: CallRefusal.
        """
        aside = is_aside(request, body)
        if script is None and aside:
            return _answer(render_aside(_ASIDE, request, body), prompt_tokens, name="aside-0")
        if script is None:
            script, at = choose(list(self._scripts.values()), request.messages)
        else:
            at = in_script(script, turn_due(request.messages))
        turn = script.turns[min(at, len(script.turns) - 1)]
        if turn.refuses:
            return ReplayAnswer(_fault(turn, prompt_tokens), delay_s=turn.delay_s)
        message = render_aside(turn.thought or _ASIDE, request, body) if aside else render(turn, request, at)
        return _answer(message, prompt_tokens, name=f"{script.name}-{at}", delay_s=turn.delay_s, cut=turn.cut)


def _answer(
    message: Message, prompt_tokens: int, *, name: str, delay_s: float = 0.0, cut: bool = False
) -> ReplayAnswer:
    calls = message.get("tool_calls") or ()
    characters = len(message.get("content") or "") + sum(len(call["name"]) + len(call["arguments"]) for call in calls)
    use = TokenUse(prompt=prompt_tokens, completion=estimated_tokens(characters), cached=0, reasoning=0)
    return ReplayAnswer(Reply(message, "tool_calls" if calls else "stop", use), name, delay_s, cut)


def with_ids(answer: ReplayAnswer, request: Request) -> ReplayAnswer:
    """Adds token ids to a script's answer: one for each byte of the messages, as JSON.

    Each token has the log-probability 0, because a script is certain. Recorded answers keep their engine's ids.
    """
    reply = answer.content
    if not isinstance(reply, Reply) or not request.parameters.get("return_token_ids") or reply.token_ids is not None:
        return answer
    prompt, completion = _bytes_of([*request.tools, *request.messages]), _bytes_of([reply.message])
    extended = replace(reply, prompt_token_ids=prompt, token_ids=completion, logprobs=(0.0,) * len(completion))
    return replace(answer, content=extended)


def _bytes_of(messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Encodes messages line by line, keys sorted: a continued conversation begins with the same bytes."""
    return tuple(b"".join(orjson.dumps(one, option=orjson.OPT_SORT_KEYS) + b"\n" for one in messages))


def _fault(turn: Turn, prompt_tokens: int) -> CallRefusal | None:
    """Returns the fault of a turn. None: garbage."""
    if turn.garbage:
        return None
    if turn.context_exceeded:
        return CallRefusal(400, "context_length_exceeded", _TOO_LONG.format(tokens=max(prompt_tokens, 8193)))
    status = turn.status or 500
    message = turn.message or f"the script asked for HTTP {status}"
    return CallRefusal(status, "scripted_fault", message, retry_after_s=turn.retry_after_s)


def estimated_tokens(characters: int) -> int:
    """Estimates tokens: a quarter of the characters, rounded up, at least 1. A script has no tokenizer."""
    return max(1, -(-characters // 4))


SUBMISSION = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_SUBMISSION_OF_PATCH = f"{SUBMISSION} && cat patch.txt"
_WRITE_PATCH = "git diff > patch.txt"

_SHELLS = ("bash", "run_shell_command", "terminal", "execute_bash", "shell")
"""Names of preferred tools, if several take a command."""
_SUBMITS = ("submit", "finish")
_FENCES = re.compile(r"```(mswea_bash_command|bash|sh)\b")

_ONE_ONLY = re.compile(r"\bone (?:\w+ )?command at a time", re.IGNORECASE)

Tool = Mapping[str, Any]
"""`{"name", "description", "parameters"}`, as `dialects.base.Request` has them."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a tool."""

    name: str
    arguments: dict[str, Any]


def is_aside(request: Request, body: Mapping[str, Any]) -> bool:
    """Whether a request is outside the main conversation: for a title, a summary, the next speaker.

    Such a request offers no tool that runs commands, and its prompt requires no commands in fenced blocks either.
    """
    if request.tools:
        return command_tool(request.tools) is None
    return requested_schema(body) is not None or _fence(request.messages) is None


def render(turn: Turn, request: Request, at: int) -> Message:
    """Renders turn number `at` as an answer to a request of the main conversation."""
    calls = _calls(turn, request)
    tool = command_tool(request.tools)
    if calls and tool is None and not isinstance(calls[0], ToolCall):
        block = " && ".join(str(call) for call in calls)
        fenced = f"{turn.thought}\n\n```{_fence(request.messages) or 'bash'}\n{block}\n```".lstrip()
        return {"role": "assistant", "content": fenced}
    tool_calls = [call if isinstance(call, ToolCall) else _shell_call(tool or {}, call, turn.thought) for call in calls]
    return assistant_message(turn.thought or ("" if tool_calls else "Done."), tool_calls, at)


def assistant_message(text: str, calls: Sequence[ToolCall], at: int) -> Message:
    """Builds the assistant's message of turn `at`."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call_id(at, number), "name": call.name, "arguments": orjson.dumps(call.arguments).decode()}
            for number, call in enumerate(calls)
        ]
    return message


def _calls(turn: Turn, request: Request) -> list[str | ToolCall]:
    """Returns commands, or tool calls without a command; empty for a reply in plain words."""
    if turn.command is not None:
        return [turn.command]
    if not turn.submit:
        return []
    if (tool := next((one for one in request.tools if str(one["name"]).lower() in _SUBMITS), None)) is not None:
        return [ToolCall(str(tool["name"]), fill_schema(_parameters(tool), {}, turn.thought or "Done."))]
    text = opening_text(request.messages)
    if _SUBMISSION_OF_PATCH in text:  # mini-swe-agent's benchmark prompts require the patch itself as output
        return [_WRITE_PATCH, _SUBMISSION_OF_PATCH]
    if SUBMISSION in text:
        return [SUBMISSION]
    return [] if request.tools else ["submit"]  # a command, where SWE-agent reads fenced blocks


def command_tool(tools: Sequence[Tool]) -> Tool | None:
    """Returns the tool that runs a shell command. None: there is none."""
    candidates = [tool for tool in tools if _takes_command(tool)]
    return min(candidates, key=_rank, default=None)


def _takes_command(tool: Tool) -> bool:
    schema = _properties(tool).get("command")
    # Editors have a `command` too, but from a list.
    return isinstance(schema, dict) and "enum" not in schema and schema.get("type", "string") == "string"


def _rank(tool: Tool) -> tuple[int, bool]:
    name = str(tool["name"]).lower()
    known = _SHELLS.index(name) if name in _SHELLS else len(_SHELLS)
    return known, "command" not in (_parameters(tool).get("required") or ())


def _shell_call(tool: Tool, command: str, thought: str) -> ToolCall:
    if "\n" in command.strip() and _ONE_ONLY.search(str(tool.get("description"))):
        # OpenHands refuses several statements in several lines; in braces they are one, and the shell keeps its state.
        command = f"{{\n{command.strip()}\n}}"
    return ToolCall(str(tool["name"]), fill_schema(_parameters(tool), {"command": command}, thought or "Run a command"))


def fill_schema(schema: Mapping[str, Any], given: Mapping[str, Any], words: str) -> dict[str, Any]:
    """Adds to `given` a value for every other required property of the object's schema; texts are `words`."""
    properties = schema.get("properties") or {}
    missing = [name for name in schema.get("required") or () if name not in given]
    return {**given, **{name: _value(properties.get(name) or {}, schema, words) for name in missing}}


def _value(schema: Mapping[str, Any], root: Mapping[str, Any], words: str, depth: int = 0) -> Any:
    schema = _resolve(schema, root)
    for key in ("const", "default"):
        if schema.get(key) is not None:
            return schema[key]
    if choices := schema.get("enum"):
        return "LOW" if "LOW" in choices else choices[0]  # the harmless one of a list of risks
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key) and depth < _MAX_DEPTH:
            return _value(schema[key][0], root, words, depth + 1)
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object" and depth < _MAX_DEPTH:
        properties = schema.get("properties") or {}
        names = schema.get("required") or ()
        return {name: _value(properties.get(name) or {}, root, words, depth + 1) for name in names}
    if kind == "array" and schema.get("minItems") and depth < _MAX_DEPTH:
        return [_value(schema.get("items") or {}, root, words, depth + 1)] * int(schema["minItems"])
    if kind in ("integer", "number"):
        return schema.get("minimum", 0)
    return {"boolean": False, "array": [], "object": {}, "null": None}.get(str(kind), _one_line(words))


_MAX_DEPTH = 8


def _resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    node: Any = root
    for part in reference[2:].split("/"):
        node = node.get(part) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def _one_line(words: str) -> str:
    return flatten(words)[:200]


def _parameters(tool: Tool) -> Mapping[str, Any]:
    parameters = tool.get("parameters")
    return parameters if isinstance(parameters, dict) else {}


def _properties(tool: Tool) -> Mapping[str, Any]:
    properties = _parameters(tool).get("properties")
    return properties if isinstance(properties, dict) else {}


def render_aside(text: str, request: Request, body: Mapping[str, Any]) -> Message:
    """Renders a short answer: JSON of the requested schema, a call of the required tool, or `text`."""
    if (tool := _required_tool(request.tools, body)) is not None:
        return assistant_message("", [ToolCall(str(tool["name"]), fill_schema(_parameters(tool), {}, text))], 0)
    if (schema := requested_schema(body)) is not None:
        return assistant_message(orjson.dumps(fill_schema(schema, {}, text)).decode(), [], 0)
    return assistant_message(text, [], 0)


def requested_schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the schema of the requested JSON, in any dialect. Empty: any JSON. None: no JSON is requested."""
    responses, anthropic = body.get("text"), body.get("output_config")
    formats = (
        body.get("response_format"),
        responses.get("format") if isinstance(responses, dict) else None,
        anthropic.get("format") if isinstance(anthropic, dict) else None,
        body.get("output_format"),
    )
    for entry in formats:
        if isinstance(entry, dict) and entry.get("type") in ("json_schema", "json_object"):
            named = entry.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else entry.get("schema")
            return schema if isinstance(schema, dict) else {}
    return None


def _required_tool(tools: Sequence[Tool], body: Mapping[str, Any]) -> Tool | None:
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        function = choice.get("function")
        name = choice.get("name") or (function.get("name") if isinstance(function, dict) else None)
        named = next((tool for tool in tools if tool["name"] == name), None)
        if named is not None:
            return named
        choice = choice.get("type")
    if choice in ("required", "any") or len(tools) == 1:
        return next(iter(tools), None)
    return None


def _fence(messages: Sequence[Message]) -> str | None:
    """Returns the name of the fenced block that a prompt requires for commands. None: it mentions none."""
    if (match := _FENCES.search(opening_text(messages))) is not None:
        return match[1]
    systems = [message for message in messages if message.get("role") == "system"]
    return "" if "```" in opening_text(systems) else None
