"""Reads users' own rows, and the demo's: SWE-bench's columns and a test command; nothing is added to them.

`test_cmd` is run unchanged. `log_parser` is pytest, or a parser of swebench 5 by its name (`parse_log_…`). The image is
named, or built from `build_context`, a folder next to the rows; if its commit is not known beforehand, `base_commit` is
HEAD.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from app.datasets.base import Reading, Row
from app.datasets.rows.columns import RowColumns, present
from app.datasets.rows.environments import TESTBED, environment_of, script
from app.datasets.rows.goals import NEEDED, gold, judged_by_parser, named_tests, swebench_parser
from app.models.spec import AgentTask, Build, EnvironmentSpec, JudgeName, TestsGoal

OWN_PARSERS = ("pytest",)
_SWEBENCH = "parse_log_"
_IMAGES = ("image_name", "docker_image", "image")
_OTHERS = ("eval_script", "install_config", "test_cmds", "before_repo_set_cmd", "reference_commit")


class OwnRows:
    """Rules of rows that specify themselves how they are tested."""

    name: ClassVar[str] = "own"
    columns: ClassVar[frozenset[str]] = (NEEDED - {"repo"}) | {"test_cmd"}

    def recognises(self, row: Mapping[str, Any]) -> bool:
        return "test_cmd" in present(row) and not present(row) & {*_OTHERS}

    def task(self, row: Row, reading: Reading) -> AgentTask:
        columns = RowColumns.of(row, self.columns, self.name)
        columns.none_of(_OTHERS, "a row of one's own says what is run in `test_cmd` alone")
        columns.patch("patch")
        with row.place.named():
            return AgentTask(
                name=columns.name(),
                dataset=row.dataset,
                description=columns.text("problem_statement"),
                environment=_environment(columns, row.folder, reading),
                goal=_goal(columns, reading),
                solution=gold(columns, reading),
            )


def _environment(columns: RowColumns, folder: Path | None, reading: Reading) -> EnvironmentSpec:
    workdir = columns.text("workdir") if columns.given("workdir") else TESTBED
    for column in _IMAGES:
        if columns.given(column):
            if columns.given("build_context"):
                raise columns.fault("build_context", f"nothing beside {column}: an image is named or built, not both")
            return environment_of(columns, reading, image=columns.text(column), workdir=workdir)
    if not columns.given("build_context"):
        raise columns.fault("image_name", "an image here, or a folder with a Dockerfile in build_context")
    build = Build(context=reading.pack(_context(columns, folder)))
    return environment_of(columns, reading, build=build, workdir=workdir)


def _context(columns: RowColumns, folder: Path | None) -> Path:
    relative = columns.text("build_context")
    home = folder.resolve() if folder is not None else None
    context = (home / relative).resolve() if home is not None and "\0" not in relative else None
    if home is None or context is None or not context.is_relative_to(home) or not (context / "Dockerfile").is_file():
        raise columns.fault("build_context", f"a folder below {home or 'that of the rows'} with a Dockerfile")
    return context


def _goal(columns: RowColumns, reading: Reading) -> TestsGoal:
    parser = columns.text_or_nothing("log_parser") or OWN_PARSERS[0]
    is_swebench = parser.startswith(_SWEBENCH)
    if is_swebench:
        swebench_parser(columns, reading, parser)
    elif parser not in OWN_PARSERS:
        raise columns.fault("log_parser", f"one of {', '.join(OWN_PARSERS)}, or {_SWEBENCH}… of swebench 5")
    tests = named_tests(columns)
    if both := sorted({*tests["fail_to_pass"]} & {*tests["pass_to_pass"]}):
        more = f", and {len(both) - 1} more" if len(both) > 1 else ""
        raise columns.fault("FAIL_TO_PASS", "each test in this list or in PASS_TO_PASS", f"in both: {both[0]!r}{more}")
    return TestsGoal(
        base_commit=columns.commit(names=("HEAD",)),
        test_patch=columns.patch("test_patch"),
        test_command=script(*columns.commands("test_cmd")),
        judge=JudgeName.SWEBENCH_5 if is_swebench else JudgeName.OWN,
        log_parser=parser,
        row=judged_by_parser(columns) if is_swebench else {},
        **tests,
    )
