"""Reads from a trajectory (ATIF) what a recorded attempt did to its environment. No I/O.

Every framework has tools of its own; here they become three actions. What only looks, or only thinks, is left out. A
tool that is unknown here is refused and not left out: a replay that silently did less would measure something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import OptionInvalid, SpecInvalid

PREFIX = "recording:"
"""Of the model's name, in a task for `replay`: the rest names the run whose attempts are done again."""

_STATEFUL = frozenset({"claude-code", "openhands", "swe-agent"})
"""Frameworks whose commands share one shell."""

_LOOKS_ONLY = frozenset(
    {
        # Claude Code
        "Read", "Glob", "Grep", "LS", "TodoWrite", "TodoRead", "Task", "Agent", "BashOutput", "KillShell", "KillBash",
        "WebFetch", "WebSearch", "ExitPlanMode", "EnterPlanMode", "ToolSearch", "TaskOutput", "TaskStop", "TaskCreate",
        "TaskUpdate", "TaskList", "TaskGet", "Skill", "AskUserQuestion", "StructuredOutput",
        # Qwen Code
        "read_file", "read_many_files", "list_directory", "glob", "grep_search", "search_file_content", "todo_write",
        "save_memory", "web_fetch", "web_search", "task", "agent", "exit_plan_mode", "skill",
        # OpenHands, SWE-agent
        "think", "task_tracker", "finish", "submit", "view", "view_file",
    }
)  # fmt: skip
_NOT_DONE = ("<tool_use_error>", "InputValidationError")
"""What a framework answers its model when it refused to carry a call out."""


@dataclass(frozen=True, slots=True)
class RecordedCommand:
    """A shell command. `apart`: it ran in a shell of its own; else in the one that the whole attempt shared."""

    text: str
    apart: bool = True
    cwd: str | None = None
    background: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """A whole file."""

    path: str
    content: str


@dataclass(frozen=True, slots=True)
class Edit:
    """A text in a file replaced by another; every one of them, or one that is there only once."""

    path: str
    old: str
    new: str
    everywhere: bool = False


@dataclass(frozen=True, slots=True)
class Insert:
    """Lines after the line of that number; 0: before the first."""

    path: str
    after_line: int
    text: str


Action = RecordedCommand | Write | Edit | Insert


def recorded_run(model_name: str) -> str:
    """The run that a task for `replay` names. Raises: SpecInvalid."""
    run = model_name.removeprefix(PREFIX)
    if run == model_name or not run.strip():
        raise OptionInvalid(
            f"agent 'replay': expected the model '{PREFIX}RUN', which names a run; found {model_name!r}"
        )
    return run.strip()


def actions(trajectory: bytes) -> list[Action]:
    """In the order in which they were done, by the main conversation and by all that stand below it.

    Raises: SpecInvalid: no trajectory, or a tool was used that cannot be done again.
    """
    told = _loaded(trajectory)
    agent = told.get("agent")
    name = str(agent.get("name", "")) if isinstance(agent, dict) else ""
    return [action for call in _calls(told) for action in _of(call, shared=name in _STATEFUL)]


@dataclass(frozen=True, slots=True)
class _Call:
    tool: str
    arguments: Mapping[str, Any]


def _loaded(trajectory: bytes) -> dict[str, Any]:
    try:
        told = json.loads(trajectory)
    except (ValueError, RecursionError) as error:
        raise SpecInvalid(f"expected a trajectory in ATIF, a JSON object; found {error}") from error
    if not isinstance(told, dict) or not isinstance(told.get("steps"), list):
        raise SpecInvalid("expected a trajectory in ATIF, a JSON object with `steps`; found another")
    return told


def _calls(told: Mapping[str, Any]) -> Iterator[_Call]:
    """What was carried out: the calls with a result, and those of the last answer, which have no result."""
    steps = sorted(_steps(told), key=lambda dated: dated[0])
    for at, (_, step) in enumerate(steps, start=1):
        done, refused = _results(step)
        for call in step.get("tool_calls") or ():
            if not isinstance(call, dict) or (id_ := call.get("tool_call_id")) in refused:
                continue
            if id_ in done or at == len(steps):
                yield _Call(str(call.get("function_name", "")), _arguments(call.get("arguments")))


def _steps(told: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The agent's steps of this trajectory and of all below it, with their time; each once."""
    time = ""
    for step in told.get("steps") or ():
        if not isinstance(step, dict):
            continue
        time = str(step.get("timestamp") or time)
        if step.get("source") == "agent" and not step.get("is_copied_context"):
            yield time, step
    for below in told.get("subagent_trajectories") or ():
        if isinstance(below, dict):
            yield from _steps(below)


def _results(step: Mapping[str, Any]) -> tuple[set[object], set[object]]:
    observation = step.get("observation")
    results = observation.get("results") if isinstance(observation, dict) else None
    found = [result for result in results or () if isinstance(result, dict)]
    refused = [result for result in found if str(result.get("content", "")).lstrip().startswith(_NOT_DONE)]
    return {result.get("source_call_id") for result in found}, {result.get("source_call_id") for result in refused}


def _arguments(found: object) -> Mapping[str, Any]:
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            found = {}  # what the model wrote was no JSON: no framework did anything with it
    return found if isinstance(found, dict) else {}


def _of(call: _Call, *, shared: bool) -> list[Action]:
    if call.tool in _LOOKS_ONLY:
        return []
    if (read := _TOOLS.get(call.tool)) is None:
        raise SpecInvalid(
            f"agent 'replay': expected tools that can be done again ({', '.join(sorted(_TOOLS))}); found {call.tool!r}"
        )
    try:
        return read(call.arguments, shared)
    except KeyError:
        return []  # an argument was missing: the framework refused it, and nothing happened


def _command(arguments: Mapping[str, Any], shared: bool) -> list[Action]:
    text = arguments["command"]
    if not isinstance(text, str) or not text.strip() or arguments.get("is_input") in (True, "true"):
        return []
    folder = arguments.get("directory")
    background = arguments.get("run_in_background", arguments.get("is_background")) is True
    return [RecordedCommand(text, not shared, str(folder) if folder else None, background)]


def _write(arguments: Mapping[str, Any], shared: bool) -> list[Action]:
    return [Write(str(arguments["file_path"]), str(arguments["content"]))]


def _edit(arguments: Mapping[str, Any], shared: bool) -> list[Action]:
    return [_one_edit(str(arguments["file_path"]), arguments)]


def _edits(arguments: Mapping[str, Any], shared: bool) -> list[Action]:
    found = arguments["edits"]
    return [_one_edit(str(arguments["file_path"]), edit) for edit in found if isinstance(edit, dict)]


def _one_edit(path: str, arguments: Mapping[str, Any]) -> Action:
    old, new = str(arguments["old_string"]), str(arguments["new_string"])
    if not old:
        return Write(path, new)
    several = arguments.get("expected_replacements")
    everywhere = arguments.get("replace_all") is True or (isinstance(several, int) and several > 1)
    return Edit(path, old, new, everywhere)


def _editor(arguments: Mapping[str, Any], shared: bool) -> list[Action]:
    path = str(arguments["path"])
    match arguments["command"]:
        case "create":
            return [Write(path, str(arguments["file_text"]))]
        case "str_replace":
            return [Edit(path, str(arguments["old_str"]), str(arguments.get("new_str") or ""))]
        case "insert":
            return [Insert(path, int(arguments["insert_line"]), str(arguments.get("new_str") or ""))]
        case "undo_edit":
            raise SpecInvalid("agent 'replay': expected edits that can be done again; found an `undo_edit`")
        case _:
            return []


_TOOLS: Mapping[str, Callable[[Mapping[str, Any], bool], list[Action]]] = {
    "bash": _command,  # mini-swe-agent, SWE-agent
    "Bash": _command,  # Claude Code
    "run_shell_command": _command,  # Qwen Code
    "terminal": _command,  # OpenHands
    "execute_bash": _command,
    "Write": _write,
    "write_file": _write,
    "Edit": _edit,
    "edit": _edit,
    "replace": _edit,
    "MultiEdit": _edits,
    "file_editor": _editor,
    "str_replace_editor": _editor,
    "str_replace_based_edit_tool": _editor,
}
