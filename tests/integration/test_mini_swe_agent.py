"""What is mini-swe-agent's own: its trajectory, its words, its commands. How it ends is the agents' contract's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from app.agents.base import AgentJob, ModelEndpoint
from app.agents.framework import Ended, Stop
from app.agents.installation import Installer
from app.agents.mini_swe_agent import adapter
from app.agents.mini_swe_agent.adapter import ENDINGS, MiniSweAgent
from app.agents.running import FrameworkAgent
from app.errors import AgentFailed, EnvironmentFailed
from app.models.endings import EndReason
from app.models.shell import CommandResult
from app.models.spec import Limits
from tests.waiting import eventually

KEY = "sk-a-secret-that-must-not-leak-0123456789"
BUG = "def total(items):\n    return sum(items[:-1])\n"
FIXED = "def total(items):\n    return sum(items)\n"

SCRIPTS = {
    "solve": """
match: total() forgets the last item
turns:
  - {thought: Let me look, command: "cat cart.py && env > seen.txt && pwd"}
  - {thought: A bash-only test that fails, command: "[[ -f nothing ]] || { echo to-stderr >&2; exit 3; }"}
  - {thought: Off by one, command: "sed -i 's/items\\\\[:-1\\\\]/items/' cart.py && git diff"}
  - {thought: Done., submit: true}
""",
    "words": """
match: the model only talks
turns:
  - {thought: one}
  - {thought: two}
  - {thought: three}
""",
    "slow_command": """
match: a command takes its time
turns:
  - {command: "echo started > started.txt; sleep 60"}
  - {submit: true}
""",
}


class HostShell:
    """Commands in a folder of this host; enough of an environment for an agent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: set[subprocess.Popen[bytes]] = set()
        self.gone = False

    def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        stdin: bytes | None = None,
    ) -> CommandResult:
        if self.gone:
            raise EnvironmentFailed("the container is gone")
        started = time.monotonic()
        process = subprocess.Popen(
            ["sh", "-c", command],
            cwd=cwd or self._folder,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._running.add(process)
        timed_out = False
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        self._running.discard(process)
        took = time.monotonic() - started
        return CommandResult(None if timed_out else process.returncode, out, err, timed_out, False, took)

    def close(self) -> None:
        for process in list(self._running):
            os.killpg(process.pid, signal.SIGKILL)

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        Path(path).write_bytes(content)

    def get(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def put_tree(self, archive: bytes, path: str) -> None:
        raise NotImplementedError


class Token:
    """A cancel token that a test pulls."""

    def __init__(self) -> None:
        self._set = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        return self._set.is_set()

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        if self.is_set():
            callback()
        return lambda: self._callbacks.remove(callback)

    def cancel(self) -> None:
        self._set.set()
        for callback in list(self._callbacks):
            callback()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("scripts")
    for name, content in SCRIPTS.items():
        (folder / f"{name}.yaml").write_text(content)
    port = free_port()
    argv = [sys.executable, "-m", "app.model_service.replay", "--port", str(port), "--scripts", str(folder)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: answers(f"http://127.0.0.1:{port}/health"))
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(10)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.ConnectError:
        return False


@pytest.fixture(scope="session")
def tools() -> Path:
    """Kept between test runs: half a gigabyte, addressed by its lock file."""
    return Path(tempfile.gettempdir()) / f"megaflow-test-tools-{os.getuid()}"


@pytest.fixture
def agent(tools: Path) -> FrameworkAgent:
    made = FrameworkAgent(MiniSweAgent(Installer(tools), call_timeout_s=60, call_attempts=2))
    made.check()
    return made


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "cart.py").write_text(BUG)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "start"]):
        subprocess.run([*git, *arguments], cwd=folder, check=True)
    return folder


@pytest.fixture
def shell(repository: Path) -> Iterator[HostShell]:
    made = HostShell(repository)
    yield made
    made.close()


@pytest.fixture
def job(tmp_path: Path, repository: Path, base_url: str) -> AgentJob:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return AgentJob(
        task_name="cart-1",
        description="In cart.py, total() forgets the\nlast item. Use `[[` and {{ braces }} freely.",
        workdir=str(repository),
        limits=Limits(agent_timeout_s=90, command_timeout_s=30, max_steps=10),
        model=ModelEndpoint(base_url, "replay", SecretStr(KEY)),
        solution=None,
        solution_files=None,
        scratch=scratch,
    )


def kept(scratch: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in scratch.rglob("*") if path.is_file()}


@pytest.mark.agents
def test_it_solves_a_bug_leaves_its_trajectory_and_keeps_the_key_to_itself(
    agent: FrameworkAgent, job: AgentJob, shell: HostShell, repository: Path
) -> None:
    report = agent.run(job, shell, Token())
    assert report.end_reason is EndReason.SUBMITTED, report
    assert (repository / "cart.py").read_text() == FIXED
    assert report.steps == 4
    assert report.usage["prompt_tokens"] > report.usage["completion_tokens"] > 0
    assert report.files is not None
    told = json.loads((report.files / "mini.traj.json").read_text())
    assert told["info"]["exit_status"] == "Submitted"
    assert told["trajectory_format"] == "mini-swe-agent-1.1"
    assert job.description in told["messages"][1]["content"]
    seen = [message for message in told["messages"] if message["role"] == "tool"]
    assert f"{repository}\n" in seen[0]["extra"]["raw_output"]
    assert (seen[1]["extra"]["returncode"], seen[1]["extra"]["raw_output"]) == (3, "to-stderr\n")
    assert report.log is not None
    assert "Off by one" in report.log.read_text()
    inside = (repository / "seen.txt").read_text()
    assert "PAGER=cat" in inside
    assert KEY not in inside
    assert "OPENAI" not in inside
    assert [path for path, content in kept(job.scratch).items() if KEY.encode() in content] == []


@pytest.mark.agents
def test_a_model_that_calls_no_tools_solves_it_by_text(
    agent: FrameworkAgent, job: AgentJob, shell: HostShell, repository: Path
) -> None:
    report = agent.run(replace(job, arguments={"config": "mini_textbased"}), shell, Token())
    assert report.end_reason is EndReason.SUBMITTED, report
    assert (repository / "cart.py").read_text() == FIXED
    assert report.files is not None
    told = json.loads((report.files / "mini.traj.json").read_text())
    roles = {message["role"] for message in told["messages"]}
    assert "tool" not in roles
    assert any("```mswea_bash_command" in str(m["content"]) for m in told["messages"] if m["role"] == "assistant")


@pytest.mark.agents
def test_a_model_that_only_talks_is_an_agent_error(agent: FrameworkAgent, job: AgentJob, shell: HostShell) -> None:
    report = agent.run(replace(job, description="the model only talks"), shell, Token())
    assert report.end_reason is EndReason.AGENT_ERROR
    assert "RepeatedFormatError" in report.detail


@pytest.mark.agents
def test_a_task_without_a_script_ends_at_once_and_says_so(
    agent: FrameworkAgent, job: AgentJob, shell: HostShell
) -> None:
    report = agent.run(replace(job, description="no script knows this task"), shell, Token())
    assert report.end_reason is EndReason.MODEL_ERROR
    assert "NotFoundError" in report.detail, report  # which mini-swe-agent does not try again
    assert "add a script for this task" in report.detail


@pytest.mark.agents
def test_a_command_over_its_limit_is_an_observation(agent: FrameworkAgent, job: AgentJob, shell: HostShell) -> None:
    slow = replace(job, description="a command takes its time", limits=Limits(command_timeout_s=1))
    report = agent.run(slow, shell, Token())
    assert report.end_reason is EndReason.SUBMITTED, report
    assert report.files is not None
    assert "did not end within 1 seconds" in (report.files / "mini.traj.json").read_text()


class ShortOfMemory(HostShell):
    """Whose every command says too much and is short of memory."""

    def run(self, command: str, **how: Any) -> CommandResult:
        result = super().run(command, **how)
        return replace(result, truncated=True, logs=("0001.stdout",), out_of_memory=True)


@pytest.mark.agents
def test_an_observation_says_where_all_of_it_is_and_that_memory_was_short(
    agent: FrameworkAgent, job: AgentJob, repository: Path
) -> None:
    report = agent.run(job, ShortOfMemory(repository), Token())
    assert report.files is not None
    told = (report.files / "mini.traj.json").read_text()
    assert "left out because it was too long; all of it is kept for the user as 0001.stdout]" in told
    assert "the environment's memory limit was reached: processes were killed for it]" in told


@pytest.mark.agents
def test_an_environment_that_goes_away_is_raised_as_such(
    agent: FrameworkAgent, job: AgentJob, shell: HostShell
) -> None:
    shell.gone = True
    with pytest.raises(EnvironmentFailed, match="the container is gone"):
        agent.run(job, shell, Token())


@pytest.mark.agents
def test_a_job_without_a_model_is_refused(agent: FrameworkAgent, job: AgentJob, shell: HostShell) -> None:
    with pytest.raises(AgentFailed, match="expected a model"):
        agent.run(replace(job, model=None), shell, Token())


# --- What its endings mean, without it ------------------------------------------------------------------------------


@pytest.fixture
def ended(tmp_path: Path) -> Ended:
    for name in ("stdout", "stderr"):
        (tmp_path / name).write_text(f"the end of {name}\n")
    (tmp_path / "home").mkdir()
    return Ended(Stop.ITSELF, 0, tmp_path / "stdout", tmp_path / "stderr", tmp_path / "home")


@pytest.mark.parametrize("word", [word for word in ENDINGS if word.isidentifier() and word != "killed"])
def test_every_word_of_its_trajectory_means_what_the_table_says(ended: Ended, word: str) -> None:
    stats = {"model_stats": {"api_calls": 2}}
    last = {"role": "exit", "extra": {"exit_status": word, "exception_str": "why"}}
    found = MiniSweAgent(Installer(ended.home))
    (ended.home / "mini.traj.json").write_text(json.dumps({"info": {"exit_status": word, **stats}, "messages": [last]}))
    told = found.ending(ended)
    assert (told.reason, told.steps) == (ENDINGS[word], 2)
    assert (told.detail == "") == (word == "Submitted")


@pytest.mark.parametrize(
    "told", [[], {}, {"info": []}, {"info": {}}, {"info": {"exit_status": ""}}, {"info": {"model_stats": 3}}]
)
def test_a_trajectory_without_an_end_is_an_agent_error_with_what_it_wrote(ended: Ended, told: object) -> None:
    (ended.home / "mini.traj.json").write_text(json.dumps(told))
    found = MiniSweAgent(Installer(ended.home)).ending(ended)
    assert found.reason is EndReason.AGENT_ERROR
    assert "the end of stderr" in found.detail


def test_an_unknown_exception_is_an_agent_error_and_a_kill_is_not_its_doing(ended: Ended) -> None:
    (ended.home / "mini.traj.json").write_text(json.dumps({"info": {"exit_status": "ZeroDivisionError"}}))
    framework = MiniSweAgent(Installer(ended.home))
    assert framework.ending(ended).reason is EndReason.AGENT_ERROR
    (ended.home / "mini.traj.json").unlink()
    assert framework.ending(replace(ended, returncode=-9)).reason is EndReason.INFRASTRUCTURE


def test_the_version_that_is_named_is_the_one_that_is_locked() -> None:
    lock = Path(adapter.__file__).with_name("requirements.lock").read_text()
    assert f"\nmini-swe-agent=={MiniSweAgent.version} " in lock
    assert "://" not in lock  # hashes only: any index will do
