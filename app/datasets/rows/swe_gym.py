"""SWE-Gym and SWE-Gym Lite: classic columns, whose repositories only SWE-Gym's fork of SWE-bench knows.

The fork is on no package index, so its facts stand in `swe_gym_versions.py`. It evaluates as SWE-bench 2 did: activate,
`eval_commands`, `install` after the patch, then the test command with the files of the test patch; for mypy with the
names of the cases that the patch brings.

Source: SWE-Gym/SWE-Bench-Fork at 242429c1, harness/test_spec.py (make_eval_script_list, make_test_command),
harness/utils.py (get_test_directives), harness/log_parsers.py; images: xingyaoww, as OpenHands uses them
(evaluation/benchmarks/swe_bench: `_s_` in place of `__`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, ClassVar

from app.datasets.base import Reading, Row
from app.datasets.rows.columns import RowColumns
from app.datasets.rows.environments import CONDA, image_by_id, script
from app.datasets.rows.goals import NEEDED, judged_by_parser, named_tests, patched_files, row_task, swebench_parser
from app.datasets.rows.swe_gym_versions import VERSIONS, GymCommands
from app.models.spec import AgentTask, JudgeName, TestsGoal

PYDANTIC_REPORT = "swe-gym-pydantic"
"""Our parser of the reports that the fork reads in a way of its own."""
_PYTEST = "parse_log_pytest"
_CASE = re.compile(r"\[case ([^\]]+)\]")


class SweGymRows:
    """The rules of SWE-Gym."""

    name: ClassVar[str] = "swe-gym"
    columns: ClassVar[frozenset[str]] = NEEDED | {"version", "test_patch"}

    def recognises(self, row: Mapping[str, Any]) -> bool:
        """Never: its columns are SWE-bench's, so who has its rows must say so."""
        return False

    def task(self, row: Row, reading: Reading) -> AgentTask:
        columns = RowColumns.of(row, self.columns, self.name)
        with row.place.named():
            return row_task(
                row,
                columns,
                reading,
                _goal(columns, reading),
                image=image_by_id("xingyaoww", columns.name(), "_s_"),
                commands=CONDA,
            )


def _goal(columns: RowColumns, reading: Reading) -> TestsGoal:
    repository = "/".join(columns.repository()).lower()
    known = _commands(columns, repository)
    test_patch = columns.patch("test_patch", needed=True)
    before = script(CONDA, known.before)
    pydantic = repository == "pydantic/pydantic"
    if not pydantic:
        swebench_parser(columns, reading, _PYTEST, "repo")
    return TestsGoal(
        base_commit=columns.commit(),
        test_patch=test_patch,
        install_command=script(before, known.install),
        test_command=script(before, f"{known.test} {_chosen(columns, repository, test_patch)}"),
        judge=JudgeName.OWN if pydantic else JudgeName.SWEBENCH_5,
        log_parser=PYDANTIC_REPORT if pydantic else _PYTEST,
        row={} if pydantic else judged_by_parser(columns),
        **named_tests(columns),
    )


def _commands(columns: RowColumns, repository: str) -> GymCommands:
    """Raises: DatasetInvalid: the fork knows no such repository, or no such version of it."""
    if repository not in VERSIONS:
        raise columns.fault("repo", f"one of {', '.join(sorted(VERSIONS))}")
    version = columns.text("version")
    found = next((one for one in VERSIONS[repository] if version in one.versions.split()), None)
    if found is None:
        known = " ".join(one.versions for one in VERSIONS[repository])
        raise columns.fault("version", f"one of {repository} that SWE-Gym has commands for: {known}")
    return found


def _chosen(columns: RowColumns, repository: str, test_patch: str) -> str:
    """What follows the test command. Raises: DatasetInvalid: the patch names no test."""
    if repository == "python/mypy":
        cases = " or ".join(_CASE.findall(test_patch))
        chosen = shlex.quote(cases) if cases else ""
    else:
        chosen = " ".join(patched_files(test_patch))
    if not chosen:
        raise columns.fault("test_patch", "a patch of test files")
    return chosen
