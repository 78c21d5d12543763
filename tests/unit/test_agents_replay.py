"""The agent that does again what was recorded: every framework's tools, on a real folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.agents.base import AgentJob
from app.agents.replay import Edit, Insert, RecordedCommand, ReplayAgent, Write, actions, recorded_run
from app.errors import SpecInvalid
from app.models.endings import EndReason
from app.models.shell import CommandResult, StatefulShell
from app.models.spec import Limits
from app.workers.lease import StopToken
from megaflow.contract.agents.trial import NeverCancelled
from tests.unit.folder_shell import FolderShell
from tests.unit.frameworks import a_job

BUG = "def total(items):\n    return sum(items[:-1])\n"


class Shell(FolderShell):
    """With a shell that remembers its folder, as the frameworks' own do."""

    def shell(self, *, cwd: str | None = None, env: object = None) -> StatefulShell:
        return _Remembering(self)


class _Remembering:
    def __init__(self, shell: FolderShell) -> None:
        self._shell = shell
        self._before = ""

    def run(self, command: str, *, timeout_s: float) -> CommandResult:
        self._before += command + "\n"
        return self._shell.run(self._before, timeout_s=timeout_s)

    def close(self) -> None:
        pass


def recording(*calls: tuple[str, Any], agent: str = "mini-swe-agent", refused: int | None = None) -> bytes:
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": "please"}]
    for at, (tool, arguments) in enumerate(calls):
        call = {"tool_call_id": f"c{at}", "function_name": tool, "arguments": arguments}
        content = "<tool_use_error>File has not been read yet.</tool_use_error>" if at == refused else "ok"
        seen = {"results": [{"source_call_id": f"c{at}", "content": content}]}
        steps.append({"step_id": at + 2, "source": "agent", "message": "", "tool_calls": [call], "observation": seen})
    told = {"schema_version": "ATIF-v1.5", "agent": {"name": agent, "version": "1"}, "steps": steps}
    return json.dumps(told).encode()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    made = Shell(tmp_path / "root")
    made.put("/testbed/cart.py", BUG.encode(), mode=0o755)
    return made


@pytest.fixture
def job(tmp_path: Path) -> AgentJob:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    limits = Limits(agent_timeout_s=30, command_timeout_s=10)
    return a_job(scratch, limits=limits)


def replay(job: AgentJob, shell: Shell, told: bytes, end: EndReason | None = None) -> Any:

    return ReplayAgent().run(replace(job, recording=told, recorded_end=end), shell, NeverCancelled())


@pytest.mark.parametrize(
    ("agent", "calls"),
    [
        ("mini-swe-agent", [("bash", {"command": "sed -i 's/\\[:-1\\]//' cart.py"})]),
        ("swe-agent", [("bash", {"command": "sed -i 's/\\[:-1\\]//' cart.py"}), ("submit", {})]),
        (
            "claude-code",
            [
                ("Read", {"file_path": "/testbed/cart.py"}),
                ("Edit", {"file_path": "/testbed/cart.py", "old_string": "items[:-1]", "new_string": "items"}),
            ],
        ),
        ("claude-code", [("Write", {"file_path": "/testbed/cart.py", "content": BUG.replace("[:-1]", "")})]),
        (
            "claude-code",
            [
                (
                    "MultiEdit",
                    {"file_path": "/testbed/cart.py", "edits": [{"old_string": "[:-1]", "new_string": ""}]},
                )
            ],
        ),
        (
            "qwen-code",
            [
                ("run_shell_command", {"command": "cat cart.py", "is_background": False}),
                ("edit", {"file_path": "/testbed/cart.py", "old_string": "[:-1]", "new_string": ""}),
            ],
        ),
        (
            "openhands",
            [
                ("terminal", {"command": "cat cart.py"}),
                (
                    "file_editor",
                    {"command": "str_replace", "path": "/testbed/cart.py", "old_str": "[:-1]", "new_str": ""},
                ),
                ("finish", {"message": "done"}),
            ],
        ),
    ],
)
def test_what_each_framework_did_is_done_again(
    job: AgentJob, shell: Shell, agent: str, calls: list[tuple[str, Any]]
) -> None:
    report = replay(job, shell, recording(*calls, agent=agent))
    assert report.end_reason is EndReason.SUBMITTED
    assert shell.get("/testbed/cart.py").decode() == BUG.replace("[:-1]", "")
    assert shell.path("/testbed/cart.py").stat().st_mode & 0o777 == 0o755, "an edited script can still be run"
    assert report.log.read_text()


def test_shared_shells_remember_and_the_others_do_not(job: AgentJob, shell: Shell) -> None:
    calls = [("Bash", {"command": "mkdir -p deep && cd deep"}), ("Bash", {"command": "echo x > here"})]
    replay(job, shell, recording(*calls, agent="claude-code"))
    assert shell.path("/testbed/deep/here").exists()
    replay(job, shell, recording(("bash", {"command": "cd deep"}), ("bash", {"command": "echo x > there"})))
    assert shell.path("/testbed/there").exists()


def test_a_call_that_the_framework_refused_is_not_done(job: AgentJob, shell: Shell) -> None:
    edit = ("Edit", {"file_path": "/testbed/cart.py", "old_string": "[:-1]", "new_string": ""})
    replay(job, shell, recording(edit, agent="claude-code", refused=0))
    assert shell.get("/testbed/cart.py").decode() == BUG


def test_it_ends_as_the_recorded_one_did(job: AgentJob, shell: Shell) -> None:
    assert replay(job, shell, recording(), EndReason.STEP_LIMIT).end_reason is EndReason.STEP_LIMIT


def test_a_command_without_end_ends_with_its_time_and_the_next_follows(job: AgentJob, shell: Shell) -> None:

    short = replace(job, limits=Limits(agent_timeout_s=60, command_timeout_s=0.5))
    told = recording(("bash", {"command": "tail -f /dev/null"}), ("bash", {"command": "echo x > after"}))
    assert replay(short, shell, told).steps == 2
    assert shell.path("/testbed/after").exists()


def test_a_cancel_is_heard_between_two_actions(job: AgentJob, shell: Shell) -> None:

    token = StopToken()
    token.stop(EndReason.CANCELLED)
    told = replace(job, recording=recording(("bash", {"command": "echo x > done"})))
    assert ReplayAgent().run(told, shell, token).end_reason is EndReason.CANCELLED
    assert not shell.path("/testbed/done").exists()


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        (b"{", "ATIF"),
        (b"[]", "ATIF"),
        (b"{}", "steps"),
        (recording(("teleport", {})), "'teleport'"),
        (recording(("file_editor", {"command": "undo_edit", "path": "/x"})), "undo_edit"),
    ],
)
def test_what_cannot_be_done_again_is_refused_before_anything_is_done(
    job: AgentJob, shell: Shell, told: bytes, complaint: str
) -> None:
    with pytest.raises(SpecInvalid, match=complaint):
        replay(job, shell, told)


def test_no_recording_and_one_without_a_result_are_refused(job: AgentJob, shell: Shell) -> None:
    with pytest.raises(SpecInvalid, match="expected a recorded attempt"):
        ReplayAgent().run(job, shell, NeverCancelled())
    with pytest.raises(SpecInvalid, match="model_error"):
        replay(job, shell, recording(), EndReason.MODEL_ERROR)


def test_actions_are_read_as_what_they_are() -> None:
    told = recording(
        ("run_shell_command", {"command": "make", "directory": "/src", "is_background": True}),
        ("bash", json.dumps({"command": "as a text"})),
        ("str_replace_editor", {"command": "create", "path": "/new", "file_text": "x"}),
        ("str_replace_editor", {"command": "view", "path": "/new"}),
        ("replace", {"file_path": "/f", "old_string": "a", "new_string": "b", "expected_replacements": 2}),
        ("Edit", {"file_path": "/g", "old_string": "", "new_string": "all"}),
        ("str_replace_editor", {"command": "insert", "path": "/h", "insert_line": 0, "new_str": "l"}),
    )
    assert actions(told) == [
        RecordedCommand("make", apart=True, cwd="/src", background=True),
        RecordedCommand("as a text"),
        Write("/new", "x"),
        Edit("/f", "a", "b", everywhere=True),
        Write("/g", "all"),
        Insert("/h", 0, "l"),
    ]


def step(at: int, tool: str, command: str, *, result: bool = True, **more: Any) -> dict[str, Any]:
    call = {"tool_call_id": f"c{at}", "function_name": tool, "arguments": {"command": command}}
    seen = {"observation": {"results": [{"source_call_id": f"c{at}", "content": "ok"}]}} if result else {}
    time = f"2026-01-01T00:00:{at:02}+00:00"
    return {"timestamp": time, "source": "agent", "message": "", "tool_calls": [call], **seen, **more}


def test_what_other_branches_did_is_done_in_its_place_and_what_nobody_did_is_not() -> None:
    below = [step(2, "Bash", "by a sub-agent"), step(3, "Bash", "an answer that was given up", result=False)]
    told = {
        "agent": {"name": "claude-code"},
        "steps": [
            {"source": "user", "message": "please"},
            step(1, "Bash", "first"),
            step(1, "Bash", "first", is_copied_context=True),
            step(4, "Bash", "last", result=False),
        ],
        "subagent_trajectories": [{"steps": below, "subagent_trajectories": [{"steps": [step(3, "Bash", "deeper")]}]}],
    }
    texts = [action.text for action in actions(json.dumps(told).encode()) if isinstance(action, RecordedCommand)]
    assert texts == ["first", "by a sub-agent", "deeper", "last"]


def test_a_run_is_named_by_the_model() -> None:
    assert recorded_run("recording:my run") == "my run"
    for wrong in ("replay", "recording:", "recording: "):
        with pytest.raises(SpecInvalid, match="recording:RUN"):
            recorded_run(wrong)


def test_its_time_is_bounded_as_a_whole(job: AgentJob, shell: Shell) -> None:

    short = replace(job, limits=Limits(agent_timeout_s=0.5, command_timeout_s=10))
    told = recording(("bash", {"command": "tail -f /dev/null"}), ("bash", {"command": "echo x > after"}))
    report = replay(short, shell, told)
    assert report.end_reason is EndReason.AGENT_TIMEOUT
    assert not shell.path("/testbed/after").exists()
