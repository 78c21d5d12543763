"""Defines the agent that repeats a recorded attempt without a model: commands and edits, in order, from the trajectory.

Every framework has its own tools. Here they become a few actions. Tools that only read or think are skipped. An unknown
tool is refused, not skipped: a replay that silently did less would measure something else.
"""

from __future__ import annotations

import json
import posixpath
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from app.agents.base import Agent, AgentJob, AgentReport
from app.errors import OptionInvalid, SpecInvalid
from app.models.endings import BLAME, Blame, EndReason
from app.models.shell import CancelToken, CommandResult, Shell, StatefulShell

PREFIX = "recording:"
"""Prefix of the model's name in a task for `replay`. The rest names the run whose attempts are repeated."""

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
"""Answers of a framework to its model when it refused to execute a call."""


@dataclass(frozen=True, slots=True)
class RecordedCommand:
    """A shell command. `apart`: it ran in its own shell; otherwise in the shell that the whole attempt shared."""

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
    """Replaces a text in a file: every occurrence if `everywhere`, otherwise a text that must occur exactly once."""

    path: str
    old: str
    new: str
    everywhere: bool = False


@dataclass(frozen=True, slots=True)
class Insert:
    """Inserts lines after the line of that number; 0: before the first."""

    path: str
    after_line: int
    text: str


Action = RecordedCommand | Write | Edit | Insert


def recorded_run(model_name: str) -> str:
    """Returns the run that a task for `replay` names. Raises: OptionInvalid: none."""
    run = model_name.removeprefix(PREFIX)
    if run == model_name or not run.strip():
        raise OptionInvalid(
            f"agent 'replay': expected the model '{PREFIX}RUN', which names a run; found {model_name!r}"
        )
    return run.strip()


def actions(trajectory: bytes) -> list[Action]:
    """Returns the recorded actions in order of execution, of the main conversation and of all its subagents.

    Raises: SpecInvalid: no trajectory, or a tool was used that cannot be repeated.
    """
    trajectory_json = _loaded(trajectory)
    agent = trajectory_json.get("agent")
    name = str(agent.get("name", "")) if isinstance(agent, dict) else ""
    return [action for call in _calls(trajectory_json) for action in _of(call, shared=name in _STATEFUL)]


@dataclass(frozen=True, slots=True)
class _Call:
    tool: str
    arguments: Mapping[str, Any]


def _loaded(trajectory: bytes) -> dict[str, Any]:
    try:
        trajectory_json = json.loads(trajectory)
    except (ValueError, RecursionError) as error:
        raise SpecInvalid(f"expected a trajectory in ATIF, a JSON object; found {error}") from error
    if not isinstance(trajectory_json, dict) or not isinstance(trajectory_json.get("steps"), list):
        raise SpecInvalid("expected a trajectory in ATIF, a JSON object with `steps`; found another")
    return trajectory_json


def _calls(told: Mapping[str, Any]) -> Iterator[_Call]:
    """Yields the executed calls: those with a result, and those of the last step, which have no result."""
    steps = sorted(_steps(told), key=lambda dated: dated[0])
    for at, (_, step) in enumerate(steps, start=1):
        answered, refused = _results(step)
        for call in step.get("tool_calls") or ():
            if not isinstance(call, dict) or (id_ := call.get("tool_call_id")) in refused:
                continue
            if id_ in answered or at == len(steps):
                yield _Call(str(call.get("function_name", "")), _arguments(call.get("arguments")))


def _steps(told: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the agent's steps of this trajectory and of its subagents, with their time; each once."""
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
    entries = [result for result in results or () if isinstance(result, dict)]
    refused = [result for result in entries if str(result.get("content", "")).lstrip().startswith(_NOT_DONE)]
    return {result.get("source_call_id") for result in entries}, {result.get("source_call_id") for result in refused}


def _arguments(found: object) -> Mapping[str, Any]:
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            found = {}  # the model wrote invalid JSON: no framework executed it
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
        return []  # an argument was missing: the framework refused the call, and nothing happened


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
    edits = arguments["edits"]
    return [_one_edit(str(arguments["file_path"]), edit) for edit in edits if isinstance(edit, dict)]


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


_LONGEST_OUTPUT_BYTES = 4000  # of one command, in the log


class ReplayAgent(Agent):
    """Replays `AgentJob.recording`. The output of its commands is logged and decides nothing."""

    name = "replay"
    version = "1"

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        """Raises: SpecInvalid: no recording, or an attempt that cannot be repeated or had no result."""
        todo, end = _plan(job)
        log = job.scratch / "agent.log"
        deadline = time.monotonic() + job.limits.agent_timeout_s
        done_count = 0
        with log.open("wb") as sink:
            hands = _Hands(job, shell, sink)
            try:
                for action in todo:
                    if cancel.is_set():
                        return AgentReport(EndReason.CANCELLED, log=log, steps=done_count)
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        why = f"time was up after {done_count} of {len(todo)} recorded actions"
                        return AgentReport(EndReason.AGENT_TIMEOUT, why, log=log, steps=done_count)
                    hands.do(action, min(left_s, job.limits.command_timeout_s))
                    done_count += 1
            finally:
                hands.close()
        if cancel.is_set():
            return AgentReport(EndReason.CANCELLED, log=log, steps=done_count)
        return AgentReport(end, f"did {done_count} recorded actions again", log=log, steps=done_count)


def _plan(job: AgentJob) -> tuple[list[Action], EndReason]:
    if job.recording is None:
        raise SpecInvalid(f"agent 'replay' on {job.task_name}: expected a recorded attempt; found none; name a run")
    end = job.recorded_end or EndReason.SUBMITTED
    if BLAME[end] is not Blame.RESULT:
        raise SpecInvalid(
            f"agent 'replay' on {job.task_name}: expected an attempt that ended with a result; found one that ended"
            f" with {end}; name another run"
        )
    return actions(job.recording), end


class _Hands:
    """Executes actions. A missing file, or a text missing in a file, is a normal answer, as in the recording."""

    def __init__(self, job: AgentJob, shell: Shell, sink: BinaryIO) -> None:
        self._workdir = job.workdir
        self._shell = shell
        self._sink = sink
        self._shared: StatefulShell | None = None

    def do(self, action: Action, timeout_s: float) -> None:
        match action:
            case RecordedCommand():
                self._command(action, timeout_s)
            case Write(path, content):
                self._write(path, content.encode("utf-8", "surrogatepass"))
            case Edit():
                self._edit(action)
            case Insert():
                self._insert(action)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()

    def _command(self, action: RecordedCommand, timeout_s: float) -> None:
        self._say(f"$ {action.text}")
        result = self._run(action, timeout_s)
        code = "no end in time" if result.timed_out else f"exit code {result.exit_code}"
        self._say(f"{result.text()[-_LONGEST_OUTPUT_BYTES:]}[{code}]")

    def _run(self, action: RecordedCommand, timeout_s: float) -> CommandResult:
        if action.background:
            quoted = shlex.quote(action.text)
            return self._apart(f"nohup bash -c {quoted} >/dev/null 2>&1 &", action.cwd, timeout_s)
        if action.apart:
            return self._apart(action.text, action.cwd, timeout_s)
        if self._shared is None:
            self._shared = self._shell.shell(cwd=self._workdir)
        return self._shared.run(action.text, timeout_s=timeout_s)

    def _apart(self, text: str, cwd: str | None, timeout_s: float) -> CommandResult:
        """Runs the command as the frameworks do: with bash if the environment has it, otherwise with sh."""
        quoted = shlex.quote(text)
        command = f"if command -v bash >/dev/null; then exec bash -c {quoted}; fi; exec sh -c {quoted}"
        return self._shell.run(command, cwd=cwd or self._workdir, timeout_s=timeout_s)

    def _edit(self, edit: Edit) -> None:
        text = self._read(edit.path)
        count = text.count(edit.old) if text is not None and edit.old else 0
        if text is None or count == 0 or (count > 1 and not edit.everywhere):
            self._say(f"edit {edit.path}: the text is there {count} times; nothing is changed")
            return
        self._write(edit.path, text.replace(edit.old, edit.new).encode("utf-8", "surrogateescape"))

    def _insert(self, insert: Insert) -> None:
        text = self._read(insert.path)
        lines = [] if text is None else text.split("\n")
        if text is None or not 0 <= insert.after_line <= len(lines):
            self._say(f"insert into {insert.path}: there is no line {insert.after_line}; nothing is changed")
            return
        lines[insert.after_line : insert.after_line] = insert.text.split("\n")
        self._write(insert.path, "\n".join(lines).encode("utf-8", "surrogateescape"))

    def _read(self, path: str) -> str | None:
        with suppress(FileNotFoundError):
            return self._shell.get(self._absolute(path)).decode("utf-8", "surrogateescape")
        return None

    def _write(self, path: str, content: bytes) -> None:
        path = self._absolute(path)
        self._shell.put(path, content, mode=self._mode(path))
        self._say(f"wrote {path}, {len(content)} bytes")

    def _mode(self, path: str) -> int:
        """Returns the mode of the existing file: an edited script stays executable."""
        folder, name = posixpath.split(path)
        mode = self._shell.run(f"stat -c %a ./{shlex.quote(name)}", cwd=folder, timeout_s=30).stdout.strip()
        return int(mode, 8) if mode.isdigit() else 0o644

    def _absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self._workdir.rstrip('/')}/{path}"

    def _say(self, *lines: str) -> None:
        self._sink.writelines(_encoded(lines))


def _encoded(lines: Iterable[str]) -> Iterable[bytes]:
    return (f"{line}\n".encode("utf-8", "replace") for line in lines)
