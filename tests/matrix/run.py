"""Submits every framework on every fixture, and oracle, nop and cheat, to a stack of its own; reads what came of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import docker
from docker.errors import ImageNotFound
from pydantic import BaseModel

from app.client import MegaFlow, Run
from app.datasets.selection import Selection
from app.errors import MegaFlowError, WaitTimeout
from app.evaluation import Submission
from app.models.outcome import TaskResult
from app.models.spec import Mode, ModelChoice
from app.settings import Settings
from app.stack import lifecycle
from app.stack.engine import engine_url
from tests.integration.inside_fixture import kept_tools
from tests.matrix.fixture import Fixture, Kind
from tests.matrix.repository import SCRIPT, git
from tests.services import free_port, short_folder

FRAMEWORKS = ("swe-agent", "openhands", "mini-swe-agent", "qwen-code", "claude-code")
"""In the order of the paper's table."""
OURS = ("oracle", "nop", "cheat")
STAND_IN = Path(__file__).parents[1] / "stand_ins" / "swe_agent"
SOURCE = "MEGAFLOW_SWE_AGENT_SOURCE"
_AT_ONCE = 2

Report = Callable[[str], None]


class Record(BaseModel):
    """One task by one agent: what was expected and what came of it."""

    dataset: str
    task: str
    kind: Kind
    agent: str
    agent_version: str = ""
    stand_in: bool = False
    mode: str
    date: str
    expected: float
    state: str  # of the task; `refused`: it was not accepted
    end_reason: str | None = None
    reward: float | None = None
    grader: str = ""
    detail: str = ""
    attempts: int = 0
    runtime: str = ""  # of the environment: `oci`, `docker`
    image_id: str = ""
    artifacts: dict[str, str] = {}  # by kind: the sha256 of its bytes

    @property
    def as_expected(self) -> bool:
        """Whether the agent ended by itself, with the verdict that is right."""
        return (self.end_reason, self.reward) == ("submitted", self.expected)

    @property
    def reason(self) -> str:
        """Why it is not as expected."""
        if self.reward is None:
            return self.detail or self.state
        got = f"{self.end_reason}, reward {self.reward:g} instead of {self.expected:g}"
        return f"{got}: {self.detail}" if self.detail else got


@contextmanager
def stack(report: Report) -> Iterator[MegaFlow]:
    """A stack of its own that replays the matrix's script; frameworks are kept between runs, as tests keep them."""
    with short_folder() as folder:
        settings = Settings(
            home=folder / "h",
            installation=f"matrix-{uuid.uuid4().hex[:8]}",
            flower_port=free_port(),
            web_port=free_port(),
            replay_port=free_port(),
            gateway_port=free_port(),
            replay_scripts=(scripts(folder / "scripts"),),
            swe_agent_source=os.environ.get(SOURCE) or stand_in(folder / "swe-agent"),
            ephemeral_capacity=_AT_ONCE,
            persistent_slots=_AT_ONCE,
            boot_timeout_s=120.0,
        )
        kept_tools().mkdir(exist_ok=True)
        settings.home.mkdir()
        settings.tools.symlink_to(kept_tools())
        try:
            lifecycle.up(settings, report)
            with MegaFlow(settings) as flow:
                yield flow
        finally:
            lifecycle.down(settings, report, purge=True)


def scripts(folder: Path) -> Path:
    """The replayed model's conversation."""
    folder.mkdir()
    (folder / "matrix.yaml").write_text(SCRIPT)
    return folder


def stand_in(folder: Path) -> str:
    """The stand-in of SWE-agent as a repository: its address with its commit."""
    shutil.copytree(STAND_IN, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        git(folder, *words)
    return f"file://{folder}@{git(folder, 'rev-parse', 'HEAD').strip()}"


def build_all(fixtures: Sequence[Fixture], settings: Settings) -> None:
    """Their images in the local engine, under the names that rows, or their rules, give them."""
    with closing(docker.DockerClient(base_url=engine_url(settings))) as client:
        for image in (image for fixture in fixtures for image in fixture.images):
            image.build(client, settings.base_image)


def remove_all(fixtures: Sequence[Fixture], settings: Settings) -> None:
    """The names that `build_all` gave."""
    with closing(docker.DockerClient(base_url=engine_url(settings))) as client:
        for name in {name for fixture in fixtures for image in fixture.images for name in image.names}:
            with suppress(ImageNotFound):  # a matrix beside this one has removed it
                client.images.remove(name, noprune=False)


def modes(number: int) -> dict[Kind, Mode]:
    """In which mode the tasks of a cell run: one in each, the other way round in every second row of the table."""
    first, second = (Mode.EPHEMERAL, Mode.PERSISTENT) if number % 2 == 0 else (Mode.PERSISTENT, Mode.EPHEMERAL)
    return {Kind.RIGHT: first, Kind.WRONG: Mode.PERSISTENT, Kind.PECULIAR: second}


class Matrix:
    """One run of fixtures by agents."""

    def __init__(self, flow: MegaFlow, folder: Path, report: Report) -> None:
        self._flow = flow
        self._folder = folder
        self._report = report
        self._runs: list[tuple[Fixture, Kind, Run]] = []
        self.records: list[Record] = []

    def submit(self, fixture: Fixture, number: int, agents: Sequence[str], kinds: Sequence[Kind]) -> None:
        """Through the public client; a refusal is a record, too."""
        argument = fixture.write(self._folder / f"{number}-{'-'.join(agents)}")
        for kind in kinds:
            mode = Mode.PERSISTENT if set(agents) <= {*OURS} else modes(number)[kind]
            submission = Submission(
                dataset=argument,
                agent=",".join(agents),
                mode=mode,
                model=None if set(agents) <= {*OURS} else ModelChoice(name="replay"),
                selection=Selection(only=(fixture.names[kind],)),
                name=f"{fixture.title} {kind.value}",
            )
            try:
                self._runs.append((fixture, kind, self._flow.submit(submission)))
            except MegaFlowError as error:
                self._report(f"{fixture.title}, {kind.value}: refused: {error}")
                self.records += [
                    self._record(fixture, kind, agent, mode, state="refused", detail=str(error)) for agent in agents
                ]

    def wait(self, within_s: float) -> None:
        """Read every result; what has not ended by then is recorded as such."""
        until = time.monotonic() + within_s
        for fixture, kind, run in self._runs:
            for handle in run.handles:
                try:
                    result = handle.result(timeout=max(0.1, until - time.monotonic()))
                except WaitTimeout:
                    handle.cancel()
                    result = handle.result(timeout=60)
                record = self._read(fixture, kind, result)
                self.records.append(record)
                said = "ok" if record.as_expected else record.reason
                self._report(f"{fixture.title}, {record.task}, {record.agent} ({record.mode}): {said}")
        self._runs.clear()

    def _record(
        self, fixture: Fixture, kind: Kind, agent: str, mode: Mode, *, state: str, detail: str = "", **more: object
    ) -> Record:
        return Record.model_validate(
            {
                "dataset": fixture.title,
                "task": fixture.names[kind],
                "kind": kind,
                "agent": agent,
                "stand_in": agent == "swe-agent" and not os.environ.get(SOURCE),
                "mode": mode.value,
                "date": datetime.now(UTC).date().isoformat(),
                "expected": fixture.expected(agent, kind),
                "state": state,
                "detail": detail,
                **more,
            }
        )

    def _read(self, fixture: Fixture, kind: Kind, result: TaskResult) -> Record:
        verdict, attempt = result.verdict, result.attempt
        environment = attempt.environment if attempt else {}
        return self._record(
            fixture,
            kind,
            result.agent,
            result.mode,
            state=result.state.value,
            detail=_detail(result),
            agent_version=str(environment.get("agent_version", "")),
            runtime=str(environment.get("kind", "")),
            image_id=str(environment.get("image_id", "")),
            end_reason=result.end_reason.value if result.end_reason else None,
            reward=result.reward,
            grader=verdict.grader if verdict else "",
            attempts=len(result.attempts),
            artifacts={one.kind.value: one.sha256 for one in result.artifacts if one.sha256},
        )


def _detail(result: TaskResult) -> str:
    if result.verdict is not None:
        return result.verdict.detail + (f"; suspect: {result.verdict.suspect}" if result.verdict.suspect else "")
    return f"{result.failure.error}: {result.failure.message}" if result.failure else ""


def commit_of(folder: Path) -> str:
    """What git calls the tree that ran."""
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
