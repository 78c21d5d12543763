"""What is submitted: agent tasks that cost next to nothing, or that take a known time and leave witness of it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from app.artifacts import open_store
from app.artifacts.bundles import store_bundle
from app.models.spec import (
    AgentTask,
    Build,
    Bundle,
    EnvironmentKind,
    EnvironmentSpec,
    Limits,
    ScriptGoal,
    ScriptSolution,
)
from app.settings import Settings

BEAT_S = 0.1
"""Between two lines that a running attempt writes to its task's witness."""

_SOLVE = """\
i=0
while [ $i -lt {beats} ]; do
    echo "$$ $(date +%s.%N)" >> {witness}
    sleep {beat_s}
    i=$((i + 1))
done
echo done > "${{WORKDIR:-/app}}/answer"
"""
_TEST = """\
mkdir -p "${LOGS_DIR:-/logs}/verifier"
echo 1 > "${LOGS_DIR:-/logs}/verifier/reward.txt"
"""


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of task. `seconds` is what its agent takes, at least; 0: an agent that does nothing (`nop`)."""

    seconds: float = 0.0
    max_attempts: int = 6
    kind: EnvironmentKind = EnvironmentKind.LOCAL
    image: str | None = None
    apart: bool = False  # graded in an environment of its own

    @property
    def agent(self) -> str:
        return "oracle" if self.seconds else "nop"


def tasks(settings: Settings, names: list[str], work: Work) -> list[AgentTask]:
    """A task of its own for each name."""
    with tempfile.TemporaryDirectory() as folder:
        made = _Bundles(settings, Path(folder))
        context = made.bundle({"setup.sh": "true\n"})
        tests = made.bundle({"test.sh": _TEST})
        return [_task(settings, made, name, work, context, tests) for name in names]


def witness_folder(settings: Settings) -> Path:
    return settings.home / "witness"


def witness(settings: Settings, name: str) -> list[tuple[str, float]]:
    """(process of the agent, unix seconds) of every sign of life that the attempts of a task gave."""
    try:
        lines = (witness_folder(settings) / name).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(pid, float(at)) for pid, at in (line.split() for line in lines if line.count(" ") == 1)]


def _task(settings: Settings, made: _Bundles, name: str, work: Work, context: Bundle, tests: Bundle) -> AgentTask:
    solution = None
    if work.seconds:
        witness_folder(settings).mkdir(exist_ok=True)
        where = witness_folder(settings) / name if work.kind is EnvironmentKind.LOCAL else Path("/tmp/witness")
        script = _SOLVE.format(beats=max(1, round(work.seconds / BEAT_S)), beat_s=BEAT_S, witness=where)
        solution = ScriptSolution(
            files=made.bundle({"solve.sh": script}), command='bash "${SOLUTION_DIR:-/solution}/solve.sh"'
        )
    build = Build(context=context) if work.image is None else None
    return AgentTask(
        name=name,
        description=f"chaos {name}",
        environment=EnvironmentSpec(kind=work.kind, build=build, image=work.image, workdir="/app"),
        goal=ScriptGoal(
            tests=tests,
            command='bash "${TESTS_DIR:-/tests}/test.sh"',
            environment=EnvironmentSpec(kind=work.kind, build=build, image=work.image, workdir="/app")
            if work.apart
            else None,
        ),
        solution=solution,
        limits=Limits(
            max_attempts=work.max_attempts, environment_timeout_s=120, agent_timeout_s=120, grading_timeout_s=120
        ),
    )


class _Bundles:
    """Folders written, packed and stored."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._store = open_store(settings.artifacts(), endpoint_url=None)
        self._folder = folder
        self._count = 0

    def bundle(self, files: dict[str, str]) -> Bundle:
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content)
        return store_bundle(self._store, folder)
