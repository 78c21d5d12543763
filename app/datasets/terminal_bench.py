"""Reads task folders of the first Terminal-Bench: task.yaml, Dockerfile, run-tests.sh, tests/, solution.sh.

Its harness runs run-tests.sh and reads pytest's summary; a task is solved when every test passed. Here a script in the
environment reads the summary, so one kind of goal serves both formats.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.compose_file.file import Project, document, read_project
from app.compose_file.model import Service, ServiceBuild
from app.compose_file.mounts import MountKind
from app.compose_file.values import idle
from app.datasets.base import DatasetFormat, Reading
from app.datasets.faults import FaultPlace
from app.datasets.harbor import compose_file, image_workdir, recipe_of
from app.datasets.policies import KEY, Policies, policies_of
from app.errors import DatasetInvalid
from app.models.spec import (
    AgentTask,
    Build,
    Bundle,
    Compose,
    EnvironmentSpec,
    Limits,
    Network,
    Resources,
    ScriptGoal,
    ScriptSolution,
)
from app.task_files import inside

# Runs the tests, prints their output, and writes 1 when pytest's summary lists passed tests and no others.
_JUDGE = """#!/bin/bash
tests="${TESTS_DIR:-/tests}"
verifier="${LOGS_DIR:-/logs}/verifier"
export TEST_DIR="$tests"
bash "$tests/run-tests.sh" >"$verifier/run-tests.txt" 2>&1
cat "$verifier/run-tests.txt"
sed 's/\\x1b\\[[0-9;]*m//g' "$verifier/run-tests.txt" | awk '
    /short test summary info/ { summary = 1; next }
    summary && /^PASSED / { passed++ }
    summary && /^(FAILED|ERROR) / { failed++ }
    END { print (passed && !failed) ? 1 : 0 }
' >"$verifier/reward.txt"
"""


class _TaskYaml(BaseModel):
    """task.yaml; the defaults are Terminal-Bench's own."""

    model_config = ConfigDict(extra="allow")  # `_refuse_unknown` has checked the others
    instruction: str = Field(min_length=1)
    parser_name: Literal["pytest"] = "pytest"
    max_agent_timeout_sec: float = Field(default=360.0, gt=0)
    max_test_timeout_sec: float = Field(default=60.0, gt=0)


def _task_folders(path: Path) -> list[Path]:
    if (path / "task.yaml").is_file():
        return [path]
    return sorted(child for child in path.iterdir() if (child / "task.yaml").is_file())


def _task(folder: Path, dataset: Path, reading: Reading) -> AgentTask:
    place = FaultPlace(str(folder / "task.yaml"))
    with place.named():
        values = _yaml(folder / "task.yaml")
        _refuse_unknown(values, place)
        config = _TaskYaml.model_validate(values)
        if not inside(folder, folder / "run-tests.sh").is_file():
            raise DatasetInvalid(f"{folder / 'run-tests.sh'}: expected a file of that name; found none")
        policies = policies_of(values.get(KEY), place, without=("reward_range",))  # its harness gives 0 or 1
        return AgentTask(
            name=os.path.basename(os.path.abspath(folder)),  # a link's own name
            dataset=dataset.resolve().name,
            description=config.instruction,
            environment=_environment(folder, reading, place, policies),
            goal=ScriptGoal(
                tests=_tests(folder, reading),
                command='bash "${TESTS_DIR:-/tests}/megaflow-judge.sh"',
                tests_path="/tests",
                logs_path="/logs",
            ),
            solution=_solution(folder, reading),
            limits=Limits(agent_timeout_s=config.max_agent_timeout_sec, grading_timeout_s=config.max_test_timeout_sec),
        )


# Keys that do not change the meaning of a task here.
_HARMLESS = frozenset(
    {
        "author_email", "author_name", "category", "difficulty", "disable_asciinema", "estimated_duration_sec",
        "expert_time_estimate_min", "junior_time_estimate_min", "name", "tags", "version",
    }
)  # fmt: skip


def _refuse_unknown(found: Any, place: FaultPlace) -> None:
    """Raises: DatasetInvalid: a key with an unknown meaning, or a request that is not supported here."""
    if not isinstance(found, dict):
        raise DatasetInvalid(f"{place.where}: expected a map; found a {type(found).__name__}")
    if found.get("run_tests_in_same_shell"):
        raise place.fault("run_tests_in_same_shell", "false: tests run in a shell of their own", True)
    known = {*_TaskYaml.model_fields, *_HARMLESS, KEY, "run_tests_in_same_shell"}
    for key in found:
        if key not in known:
            raise place.fault(str(key), f"one of {', '.join(sorted(known))}", found[key], "remove it")


def _yaml(file: Path) -> Any:
    from app.compose_file import bounded_yaml  # only this format needs YAML

    try:
        return bounded_yaml.read(file.parent, file)
    except (OSError, ValueError) as error:
        raise DatasetInvalid(f"{file}: expected YAML; found {error}") from error


def _environment(folder: Path, reading: Reading, place: FaultPlace, ours: Policies) -> EnvironmentSpec:
    """Returns the environment. Every task has a compose file; usually it adds nothing to the Dockerfile."""
    file = compose_file(folder)
    project = None if file is None else read_project(folder, file, _main(folder / file))
    if project is not None and _usual(project):
        project = None
    context = _gathered(reading, {child.name: child for child in folder.iterdir() if child.name not in _HIDDEN})
    if project is not None:
        _refuse_hidden(project, folder)
    limits = {} if project is None else dataclasses.asdict(_client(project).limits)
    bounds = {key: value for key, value in limits.items() if value is not None}
    compose = None if project is None else Compose(context=context, file=str(file), service=project.main)
    # The format's containers have a network, and its usual run-tests.sh downloads pytest.
    policy_fields = {"network": Network.OPEN} | ours.environment()
    return EnvironmentSpec(
        kind=reading.kind,
        build=Build(context=context) if project is None else None,
        compose=compose,
        workdir=_workdir(folder, project, place),
        resources=Resources(**(bounds | {"disk_bytes": ours.disk_bytes})),
        **policy_fields,
    )


def _workdir(folder: Path, project: Project | None, place: FaultPlace) -> str:
    dockerfile = folder / "Dockerfile" if project is None else recipe_of(folder, _client(project))
    if project is None and not dockerfile.is_file():
        raise DatasetInvalid(f"{dockerfile}: expected a file of that name; found none")
    return (project and _client(project).working_dir) or image_workdir(folder, dockerfile, place)


def _main(file: Path) -> str:
    services = list(document(file.parent, file)["services"])
    return str(services[0]) if len(services) == 1 else _CLIENT


def _client(project: Project) -> Service:
    return project.services[project.main]


def _usual(project: Project) -> bool:
    """Whether the file requests only the image of the Dockerfile next to it, with a command that keeps it alive."""
    client = _client(project)
    plain = Service(name=client.name, image=client.image, build=ServiceBuild())
    command = [*(client.entrypoint or ()), *(client.command or ())]
    own_command = bool(command) and not idle(command)
    essential = client.model_copy(
        update={
            "command": client.command if own_command else None,
            "entrypoint": client.entrypoint if own_command else None,
            "environment": {key: one for key, one in client.variables.items() if key != "TEST_DIR"},
            "env_file": {},
            "volumes": tuple(one for one in client.volumes if one.kind is not MountKind.FOLDER),
        }
    )
    return len(project.services) == 1 and essential == plain


def _refuse_hidden(project: Project, folder: Path) -> None:
    """Refuses services that use hidden files: what no image may contain, no service may have either."""
    for one in project.services.values():
        sources = [mount.source for mount in one.mounts] + ([one.build.context] if one.build else [])
        for source in sources:
            if Path(source).parts[:1] and Path(source).parts[0] in _HIDDEN:
                raise DatasetInvalid(f"{folder}: service {one.name}: expected nothing of the tests; found {source}")


_CLIENT = "client"
"""Service in which the agent acts."""
_HIDDEN = ("tests", "run-tests.sh", "solution.sh", "solution.yaml", "task.yaml")  # no image may contain these


def _tests(folder: Path, reading: Reading) -> Bundle:
    tests = inside(folder, folder / "tests")
    files = {child.name: child for child in tests.iterdir()} if tests.is_dir() else {}
    return _gathered(reading, {**files, "run-tests.sh": folder / "run-tests.sh"}, {"megaflow-judge.sh": _JUDGE})


def _solution(folder: Path, reading: Reading) -> ScriptSolution | None:
    script = folder / "solution.sh"
    if not script.is_file():
        return None  # a solution.yaml is keystrokes for a terminal, which is not supported
    files = _gathered(reading, {script.name: script})
    return ScriptSolution(files=files, command='bash "${SOLUTION_DIR:-/solution}/solution.sh"', path="/solution")


def _gathered(reading: Reading, parts: dict[str, Path], made: dict[str, str] | None = None) -> Bundle:
    with tempfile.TemporaryDirectory(prefix="megaflow-dataset-") as scratch:
        for name, source in parts.items():
            target = Path(scratch) / name
            if source.is_dir() and not source.is_symlink():
                shutil.copytree(source, target, symlinks=True)
            else:
                shutil.copy2(source, target, follow_symlinks=False)
        for name, text in (made or {}).items():
            (Path(scratch) / name).write_text(text)
        return reading.pack(Path(scratch))


TERMINAL_BENCH = DatasetFormat("terminal-bench", _task_folders, _task)
