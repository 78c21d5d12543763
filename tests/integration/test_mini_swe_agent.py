"""mini-swe-agent itself, in its own environment, against a scripted model and a real repository."""

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

import httpx
import pytest
from pydantic import SecretStr

from app.agents.base import AgentJob, ModelEndpoint
from app.agents.installation import ensure
from app.agents.mini_swe_agent import adapter
from app.agents.mini_swe_agent.adapter import MiniSweAgent
from app.errors import AgentFailed, AgentUnavailable, EnvironmentFailed
from app.models.endings import EndReason
from app.models.shell import CommandResult
from app.models.spec import Limits

pytestmark = [pytest.mark.agents]

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
    "refused": f"""
match: the key is refused
turns:
  - {{status: 401, message: "Incorrect API key provided: {KEY}"}}
""",
    "context": """
match: the conversation is too long
turns:
  - {status: 400, message: "This model's maximum context length is 8 tokens."}
""",
    "garbage": """
match: the endpoint answers rubbish
turns:
  - {garbage: true}
""",
    "broken": """
match: the endpoint breaks down
turns:
  - {status: 500}
""",
    "words": """
match: the model only talks
turns:
  - {thought: one}
  - {thought: two}
  - {thought: three}
""",
    "slow_model": """
match: the model takes its time
turns:
  - {command: "echo started > started.txt"}
  - {delay_s: 60, submit: true}
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
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"))
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(10)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.ConnectError:
        return False


def wait_until(condition: Callable[[], bool], patience_s: float = 30) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def tools() -> Path:
    """Kept between test runs: half a gigabyte, addressed by its lock file."""
    return Path(tempfile.gettempdir()) / f"megaflow-test-tools-{os.getuid()}"


@pytest.fixture
def agent(tools: Path) -> MiniSweAgent:
    made = MiniSweAgent(tools, model_timeout_s=60, model_attempts=2)
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


def about(job: AgentJob, description: str) -> AgentJob:
    return replace(job, description=description)


def processes_of(scratch: Path) -> list[int]:
    """Processes that were started with the scratch folder in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(scratch).encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def kept(scratch: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in scratch.rglob("*") if path.is_file()}


def test_it_solves_a_bug_and_leaves_its_evidence(
    agent: MiniSweAgent, job: AgentJob, shell: HostShell, repository: Path
) -> None:
    report = agent.run(job, shell, Token())
    assert report.end_reason is EndReason.SUBMITTED, report
    assert (repository / "cart.py").read_text() == FIXED
    assert report.steps == 4
    assert report.usage["prompt_tokens"] > report.usage["completion_tokens"] > 0
    assert report.trajectory is not None
    told = json.loads(report.trajectory.read_text())
    assert told["info"]["exit_status"] == "Submitted"
    assert told["trajectory_format"] == "mini-swe-agent-1.1"
    assert job.description in told["messages"][1]["content"]
    seen = [message for message in told["messages"] if message["role"] == "tool"]
    assert f"{repository}\n" in seen[0]["extra"]["raw_output"]
    assert (seen[1]["extra"]["returncode"], seen[1]["extra"]["raw_output"]) == (3, "to-stderr\n")
    assert report.log is not None
    assert "Off by one" in report.log.read_text()
    assert processes_of(job.scratch) == []


def test_the_key_is_neither_in_the_evidence_nor_in_the_environment(
    agent: MiniSweAgent, job: AgentJob, shell: HostShell, repository: Path
) -> None:
    agent.run(job, shell, Token())
    seen = (repository / "seen.txt").read_text()
    assert "PAGER=cat" in seen
    assert KEY not in seen
    assert "OPENAI" not in seen
    assert [path for path, content in kept(job.scratch).items() if KEY.encode() in content] == []


@pytest.mark.slow
def test_an_endpoint_that_is_down_is_a_model_error_in_bounded_time(
    tools: Path, job: AgentJob, shell: HostShell
) -> None:
    nobody = ModelEndpoint(f"http://127.0.0.1:{free_port()}/v1", "replay")
    started = time.monotonic()
    report = MiniSweAgent(tools).run(replace(job, model=nobody), shell, Token())
    assert report.end_reason is EndReason.MODEL_ERROR, report
    assert time.monotonic() - started < 60


def test_a_refused_key_is_a_model_error_at_once_and_not_quoted(
    agent: MiniSweAgent, job: AgentJob, shell: HostShell
) -> None:
    report = agent.run(about(job, "the key is refused"), shell, Token())
    assert report.end_reason is EndReason.MODEL_ERROR, report
    assert "AuthenticationError" in report.detail
    assert "[api key]" in report.detail
    assert KEY not in report.detail
    assert [path for path, content in kept(job.scratch).items() if KEY.encode() in content] == []


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ("the endpoint answers rubbish", EndReason.MODEL_ERROR),
        ("the endpoint breaks down", EndReason.MODEL_ERROR),
        ("the conversation is too long", EndReason.CONTEXT_EXHAUSTED),
        ("the model only talks", EndReason.AGENT_ERROR),
    ],
)
def test_endings_by_name(
    agent: MiniSweAgent, job: AgentJob, shell: HostShell, description: str, reason: EndReason
) -> None:
    report = agent.run(about(job, description), shell, Token())
    assert report.end_reason is reason, report
    assert report.detail
    assert report.trajectory is not None


def test_a_task_without_a_script_ends_at_once_and_says_so(agent: MiniSweAgent, job: AgentJob, shell: HostShell) -> None:
    report = agent.run(about(job, "no script knows this task"), shell, Token())
    assert report.end_reason is EndReason.MODEL_ERROR
    assert "NotFoundError" in report.detail, report  # which mini-swe-agent does not try again
    assert "known scripts" in report.detail


def test_the_step_limit_ends_it(agent: MiniSweAgent, job: AgentJob, shell: HostShell) -> None:
    report = agent.run(replace(job, limits=Limits(max_steps=2)), shell, Token())
    assert (report.end_reason, report.steps) == (EndReason.STEP_LIMIT, 2)


def test_its_time_limit_ends_it(agent: MiniSweAgent, job: AgentJob, shell: HostShell, repository: Path) -> None:
    slow = replace(about(job, "the model takes its time"), limits=Limits(agent_timeout_s=9))
    started = time.monotonic()
    report = agent.run(slow, shell, Token())
    assert report.end_reason is EndReason.AGENT_TIMEOUT
    assert time.monotonic() - started < 15
    assert report.trajectory is not None
    assert processes_of(job.scratch) == []


def test_a_command_over_its_limit_is_an_observation(agent: MiniSweAgent, job: AgentJob, shell: HostShell) -> None:
    limits = Limits(command_timeout_s=1)
    report = agent.run(replace(about(job, "a command takes its time"), limits=limits), shell, Token())
    assert report.end_reason is EndReason.SUBMITTED, report
    assert report.trajectory is not None
    assert "did not end within 1 seconds" in report.trajectory.read_text()


@pytest.mark.parametrize("description", ["the model takes its time", "a command takes its time"])
def test_a_cancel_ends_the_whole_tree(
    agent: MiniSweAgent, job: AgentJob, shell: HostShell, repository: Path, description: str
) -> None:
    token = Token()

    def cancel_when_working() -> None:
        wait_until((repository / "started.txt").exists)
        assert processes_of(job.scratch) != []
        token.cancel()

    canceller = threading.Thread(target=cancel_when_working)
    canceller.start()
    started = time.monotonic()
    report = agent.run(about(job, description), shell, token)
    canceller.join()
    assert report.end_reason is EndReason.CANCELLED
    assert time.monotonic() - started < 25
    assert processes_of(job.scratch) == []


def test_a_job_cancelled_before_it_starts_ends_at_once(agent: MiniSweAgent, job: AgentJob, shell: HostShell) -> None:
    token = Token()
    token.cancel()
    assert agent.run(job, shell, token).end_reason is EndReason.CANCELLED


def test_an_environment_that_goes_away_is_raised_as_such(agent: MiniSweAgent, job: AgentJob, shell: HostShell) -> None:
    shell.gone = True
    with pytest.raises(EnvironmentFailed, match="the container is gone"):
        agent.run(job, shell, Token())


def test_a_job_without_a_model_is_refused(agent: MiniSweAgent, job: AgentJob, shell: HostShell) -> None:
    with pytest.raises(AgentFailed, match="expected a model"):
        agent.run(replace(job, model=None), shell, Token())


def test_processes_that_ask_at_the_same_time_install_once(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("# nothing\n")
    program = (
        "import sys; from pathlib import Path; from app.agents.installation import ensure;"
        "print(ensure(Path(sys.argv[1]), 'nothing', Path(sys.argv[2]), first_use=('-c', 'pass')))"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "tools"), str(lock)]
    asking = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in asking]
    assert [process.returncode for process in asking] == [0, 0, 0]
    assert sum(output.count("agent.installing") for output in said) == 1
    assert len({output.splitlines()[-1] for output in said}) == 1


def test_what_was_left_half_installed_is_made_anew(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("# nothing\n")
    venv = ensure(tmp_path / "tools", "nothing", lock)
    (venv / ".complete").unlink()
    (venv / "rubble").touch()
    assert ensure(tmp_path / "tools", "nothing", lock) == venv
    assert not (venv / "rubble").exists()
    lock.write_text("# something else\n")
    assert ensure(tmp_path / "tools", "nothing", lock) != venv


def test_what_cannot_be_installed_is_refused_with_the_reason(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("this is not a requirement at all\n")
    with pytest.raises(AgentUnavailable, match=r"expected .* to succeed; found exit code"):
        ensure(tmp_path / "tools", "nothing", lock)
    with pytest.raises(AgentUnavailable, match="expected its lock file"):
        ensure(tmp_path / "tools", "nothing", tmp_path / "absent.lock")
    lock.write_text("# nothing\n")
    with pytest.raises(AgentUnavailable, match="no such framework"):
        ensure(tmp_path / "tools", "nothing", lock, first_use=("-c", "raise SystemExit('no such framework')"))


def test_the_version_that_is_named_is_the_one_that_is_locked() -> None:
    lock = Path(adapter.__file__).with_name("requirements.lock").read_text()
    assert f"\nmini-swe-agent=={MiniSweAgent.version} " in lock
    assert "://" not in lock  # hashes only: any index will do
