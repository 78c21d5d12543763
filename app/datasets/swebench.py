"""Reads rows in the SWE-bench schema: a .jsonl file, a .json list, or a folder with rows.jsonl.

SWE-bench and its variants, SWE-Gym, SWE-rebench and SWE-bench-Live share it, each with columns of its own for the
image and for the test command. `build_context`, a folder beside the file, and `megaflow` are our additions.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from app.datasets.base import Reading
from app.datasets.base import Row as DatasetRow
from app.datasets.faults import FaultPlace
from app.datasets.policies import KEY, policies_of
from app.models.spec import (
    NAME,
    AgentTask,
    Build,
    Bundle,
    EnvironmentKind,
    EnvironmentSpec,
    PatchSolution,
    Resources,
    TestsGoal,
)

Row = dict[str, Any]

_IMAGE_COLUMNS = ("image_name", "docker_image", "image")
_NOT_TESTS = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml", ".rst")
_PYTEST = "pytest -rA"

# Facts about the classic repositories' own test runners; every other one of them is run by plain pytest.
_COMMANDS = {
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "sympy/sympy": "PYTHONWARNINGS=ignore::UserWarning,ignore::SyntaxWarning bin/test -C --verbose",
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
    "astropy/astropy": "pytest -rA -vv -o console_output_style=classic --tb=no",
    "mwaskom/seaborn": "pytest --no-header -rA",
}
_OLD_DJANGO = "./tests/runtests.py --verbosity 2"  # before 1.10 it had neither of the other options
_PARSERS = {"django/django": "django", "sympy/sympy": "sympy"}
# Under which names other datasets know the reports that ours read.
_PARSER_NAMES = {
    "pytest": (
        "pytest",
        "pytest_options",
        "pytest_v2",
        "astropy",
        "flask",
        "matplotlib",
        "requests",
        "seaborn",
        "xarray",
    ),
    "django": ("django",),
    "sympy": ("sympy",),
}
_KNOWN_PARSERS = {alias: ours for ours, aliases in _PARSER_NAMES.items() for alias in aliases}

# In the official images Python and the library live in a conda environment that nothing activates by itself.
_CONDA = """if [ -d /opt/miniconda3/envs/testbed ]; then
    . /opt/miniconda3/bin/activate
    conda activate testbed
fi
"""
_CONDA_PATH = (
    "/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
_DJANGO_LOCALE = "export LANG=C.UTF-8 LC_ALL=C.UTF-8 PYTHONIOENCODING=utf8\n"  # its tests print beyond ASCII


@dataclass(frozen=True, slots=True)
class SweBenchRows:
    """Rows in the SWE-bench schema; until each dataset has rules of its own."""

    name: str
    columns: ClassVar[frozenset[str]] = frozenset({"instance_id"})

    def recognises(self, row: Mapping[str, Any]) -> bool:
        return self.name == "own" and "org" not in row

    def task(self, row: DatasetRow, reading: Reading) -> AgentTask:
        folder = row.folder or Path("/nonexistent")
        return _Rows(folder / "rows.jsonl", row.dataset, reading).task(dict(row.values), row.place)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Makes tasks of one file's rows; a build context that several rows name is stored once."""

    file: Path
    dataset: str
    reading: Reading
    _packed: dict[Path, Bundle] = field(default_factory=dict)

    def task(self, row: Row, place: FaultPlace) -> AgentTask:
        instance_id = _text(row, "instance_id", place)
        if not re.fullmatch(NAME, instance_id) or ".." in instance_id.split("/"):
            raise place.fault("instance_id", "at most 200 letters, digits, and ._/+- after the first", instance_id)
        with place.named():
            return AgentTask(
                name=instance_id,
                dataset=self.dataset,
                description=_text(row, "problem_statement", place),
                environment=self._environment(row, instance_id, place),
                goal=_goal(row, place),
                solution=PatchSolution(patch=_text(row, "patch", place)) if row.get("patch") else None,
            )

    def _environment(self, row: Row, instance_id: str, place: FaultPlace) -> EnvironmentSpec:
        workdir = _text(row, "workdir", place) if row.get("workdir") else "/testbed"
        ours = policies_of(row.get(KEY), place)
        said = ours.environment() | {"resources": Resources(disk_bytes=ours.disk_bytes)}
        image = _image(row, instance_id, place)
        if image is None:
            build = Build(context=self._context(_text(row, "build_context", place), place))
            return EnvironmentSpec(kind=self.reading.kind, build=build, workdir=workdir, **said)
        official = "sweb.eval." in image and self.reading.kind is EnvironmentKind.DOCKER
        env = {"PATH": _CONDA_PATH} if official else {}
        return EnvironmentSpec(kind=self.reading.kind, image=image, workdir=workdir, env=env, **said)

    def _context(self, relative: str, place: FaultPlace) -> Bundle:
        home = self.file.parent.resolve()
        folder = (home / relative).resolve()
        if not folder.is_relative_to(home) or not (folder / "Dockerfile").is_file():
            raise place.fault("build_context", f"a folder below {home} with a Dockerfile", relative)
        if folder not in self._packed:
            self._packed[folder] = self.reading.pack(folder)
        return self._packed[folder]


def _text(row: Row, column: str, place: FaultPlace) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise place.fault(column, "a text that is not empty", value)
    return value


def _names(row: Row, column: str, place: FaultPlace) -> tuple[str, ...]:
    """A list, or a JSON list in a string: both are about."""
    value = row.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = row[column]
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise place.fault(column, "a list of test names, or one as a JSON string", row.get(column))
    return tuple(value)


def _image(row: Row, instance_id: str, place: FaultPlace) -> str | None:
    """The image's reference; None when the row brings a build context."""
    for column in _IMAGE_COLUMNS:
        if row.get(column):
            return _text(row, column, place)
    if row.get("build_context"):
        return None
    return f"docker.io/swebench/sweb.eval.x86_64.{instance_id.replace('__', '_1776_').lower()}:latest"


def _goal(row: Row, place: FaultPlace) -> TestsGoal:
    fail_to_pass, pass_to_pass = _names(row, "FAIL_TO_PASS", place), _names(row, "PASS_TO_PASS", place)
    if not fail_to_pass and not pass_to_pass:
        raise place.fault("FAIL_TO_PASS", "at least one test here or in PASS_TO_PASS", [])
    test_patch = row.get("test_patch") or ""
    if not isinstance(test_patch, str):
        raise place.fault("test_patch", "a patch as text", test_patch)
    command, lays_out_tests = _command(row, test_patch, (*fail_to_pass, *pass_to_pass), place)
    return TestsGoal(
        base_commit=_text(row, "base_commit", place),
        test_patch="" if lays_out_tests else test_patch,
        test_command=command,
        log_parser=_parser(row, place),
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
    )


def _command(row: Row, test_patch: str, names: tuple[str, ...], place: FaultPlace) -> tuple[str, bool]:
    """The test command, and whether it checks out and patches the test files by itself."""
    config = row.get("install_config") or {}
    conda = "" if row.get("build_context") else _CONDA
    if row.get("test_cmd"):
        return conda + _commands(row, "test_cmd", place), False
    if row.get("test_cmds"):
        return conda + _commands(row, "test_cmds", place), False
    if isinstance(config, dict) and config.get("test_cmd"):
        return f"{conda}{_commands(config, 'test_cmd', place)} {_arguments(_test_files(test_patch, names))}", False
    if row.get("eval_script"):
        return _text(row, "eval_script", place), True
    return conda + _by_repository(row, test_patch, names, place), False


def _commands(row: Row, column: str, place: FaultPlace) -> str:
    value = row[column]
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list) or not all(isinstance(line, str) and line.strip() for line in lines):
        raise place.fault(column, "a command, or a list of commands", value)
    return "\n".join(lines)


def _by_repository(row: Row, test_patch: str, names: tuple[str, ...], place: FaultPlace) -> str:
    repository = _text(row, "repo", place)
    files = _test_files(test_patch, names)
    if repository == "django/django":
        command = _OLD_DJANGO if _before_1_10(str(row.get("version", ""))) else _COMMANDS[repository]
        return f"{_DJANGO_LOCALE}{command} {_arguments(_django_modules(files))}"
    if repository not in _COMMANDS and not any("::" in name for name in names):
        raise place.fault("test_cmd", f"the test command of {repository}, whose runner we do not know", None)
    return f"{_COMMANDS.get(repository, _PYTEST)} {_arguments(files)}"


def _before_1_10(version: str) -> bool:
    found = re.match(r"^1\.(\d+)", version)
    return found is not None and int(found[1]) < 10


def _test_files(test_patch: str, names: tuple[str, ...]) -> list[str]:
    """The test files that the patch leaves behind; those of the named tests when it has only data."""
    files: dict[str, None] = {}
    for part in re.split(r"^(?=diff --git )", test_patch, flags=re.MULTILINE):
        found = re.match(r"^diff --git a/.* b/(.*)$", part, flags=re.MULTILINE)
        gone = re.search(r"^deleted file mode ", part, flags=re.MULTILINE)
        if found and not gone and not found[1].endswith(_NOT_TESTS):
            files[found[1]] = None
    return list(files or dict.fromkeys(name.split("::")[0] for name in names if "::" in name))


def _django_modules(files: list[str]) -> list[str]:
    """`tests/queries/models.py` is `queries.models` to Django's runner."""
    inside = (PurePosixPath(file) for file in files if file.endswith(".py"))
    return [".".join(file.with_suffix("").parts).removeprefix("tests.") for file in inside]


def _arguments(words: list[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def _parser(row: Row, place: FaultPlace) -> str:
    config = row.get("install_config")
    named = row.get("log_parser") or (config.get("log_parser") if isinstance(config, dict) else None)
    if named is None:
        return _PARSERS.get(str(row.get("repo")), "pytest")
    ours = _KNOWN_PARSERS.get(str(named).removeprefix("parse_log_"))
    if ours is None:
        raise place.fault("log_parser", f"one of {', '.join(sorted(_KNOWN_PARSERS))}", named)
    return ours
