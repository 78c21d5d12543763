"""The oracle agent and the script grader at work in a local environment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.agents.base import AgentJob
from app.agents.oracle import OracleAgent
from app.agents.patch import head_commit, take_patch
from app.environments.contract import Environment
from app.environments.runtimes.local import LocalProvider
from app.grading.base import GradingInput
from app.grading.script_goal import ScriptGrader
from app.models.endings import EndReason
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
from megaflow.contract.environments.ground import tags_of, tar_of

BUNDLE = Bundle(sha256="0" * 64, size_bytes=1)
GOAL = ScriptGoal(tests=BUNDLE, command='bash "$TESTS_DIR/test.sh"')
CONTEXT = tar_of({"setup.sh": b"mkdir -p $MEGAFLOW_ROOT/testbed"})
SPEC = EnvironmentSpec(
    kind=EnvironmentKind.LOCAL, build=Build(context=Bundle(sha256="1" * 64, size_bytes=len(CONTEXT)))
)
TASK = AgentTask(
    name="task",
    description="Write 42.",
    environment=SPEC,
    goal=GOAL,
    solution=ScriptSolution(files=BUNDLE, command='bash "$SOLUTION_DIR/solve.sh"'),
)
SOLUTION = tar_of({"solve.sh": b"#!/bin/bash\nset -euo pipefail\necho 42 > $WORKDIR/answer\n"})
TESTS = tar_of(
    {
        "test.sh": b"#!/bin/bash\nset -u\nmkdir -p $LOGS_DIR/verifier\n"
        b'if [ "$(cat $WORKDIR/answer)" = 42 ]; then echo 1; else echo 0; fi > $LOGS_DIR/verifier/reward.txt\n'
    }
)
Make = Callable[..., Environment]


class Never:
    """Nobody cancels."""

    def is_set(self) -> bool:
        return False

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]:
        return threading.Event().set


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Environment] = []

    def make() -> Environment:
        provider = LocalProvider(Settings(home=tmp_path), fetch_bundle=lambda bundle: CONTEXT)
        made.append(provider.create(SPEC, tags_of("test"), timeout_s=30))
        return made[-1]

    yield make
    for environment in made:
        environment.destroy()


def solve(environment: Environment, tmp_path: Path) -> EndReason:
    job = AgentJob(
        task_name="task",
        description=TASK.description,
        workdir=SPEC.workdir,
        limits=Limits(),
        model=None,
        solution=TASK.solution,
        solution_files=SOLUTION,
        scratch=tmp_path,
    )
    return OracleAgent().run(job, environment, Never()).end_reason


def test_the_oracle_solves_and_the_grader_sees_it(make: Make, tmp_path: Path) -> None:
    environment = make()
    assert head_commit(environment, SPEC.workdir) is None
    solve(environment, tmp_path)
    assert take_patch(environment, SPEC.workdir, None) is None  # no repository
    assert ScriptGrader(GOAL).grade(GradingInput(TASK, None, TESTS), environment).verdict.reward == 1.0


def test_who_does_nothing_gets_nothing(make: Make) -> None:
    assert ScriptGrader(GOAL).grade(GradingInput(TASK, None, TESTS), make()).verdict.reward == 0.0
