"""Reads SWE-bench Pro: rows whose test script and parser are in the dataset's own repository, one folder per task.

Its evaluation resets /app to the base commit, applies the patch, runs the last line of `before_repo_set_cmd` (it checks
out the hidden test files), then `run_script.sh` with the test files, then `parser.py` on its output. The folder
`run_scripts` of scaleapi/SWE-bench_Pro-os must be next to the rows.

Source: scaleapi/SWE-bench_Pro-os, swe_bench_pro_eval.py (create_entryscript, main) and run_scripts; prompts for agents:
helper_code/create_problem_statement.py; images: jefzda/sweap-images with the tag of `dockerhub_tag`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from app.datasets.base import Reading, Row
from app.datasets.rows.columns import RowColumns, present
from app.datasets.rows.environments import environment_of, script
from app.datasets.rows.goals import gold, named_tests, printed, written
from app.errors import SpecInvalid
from app.models.spec import AgentTask, JudgeName, TestsGoal
from app.task_files import read_text_inside

REPORT = "swe-bench-pro"
"""Parser that reads the results of the task's `parser.py`."""
SCRIPTS = "run_scripts"
"""Folder next to the rows, with a folder for each row."""
_FOLDER = "/workspace"
_GET = "get the folder run_scripts of the repository scaleapi/SWE-bench_Pro-os and put it beside the file of rows"


class SweBenchProRows:
    """Rules of SWE-bench Pro."""

    name: ClassVar[str] = "swe-bench-pro"
    columns: ClassVar[frozenset[str]] = frozenset(
        {"instance_id", "repo", "base_commit", "problem_statement", "fail_to_pass", "pass_to_pass", "dockerhub_tag"}
        | {"before_repo_set_cmd", "selected_test_files_to_run"}
    )

    def recognises(self, row: Mapping[str, Any]) -> bool:
        return present(row) >= {"before_repo_set_cmd", "selected_test_files_to_run"}

    def task(self, row: Row, reading: Reading) -> AgentTask:
        columns = RowColumns.of(row, self.columns, self.name)
        instance_id = columns.name()
        with row.place.named():
            commit = shlex.quote(columns.commit())
            return AgentTask(
                name=instance_id,
                dataset=row.dataset,
                description=_description(columns),
                environment=environment_of(
                    columns,
                    reading,
                    image=f"docker.io/jefzda/sweap-images:{columns.text('dockerhub_tag')}",
                    workdir="/app",
                    setup=(f"git reset -q --hard {commit} && git checkout -q {commit}",),
                ),
                goal=_goal(columns, row.folder, instance_id),
                solution=gold(columns, reading),
            )


def _description(columns: RowColumns) -> str:
    """Returns three columns under fixed headings, in the form of the dataset's own prompts."""
    parts = [columns.text("problem_statement")]
    for heading, column in (("Requirements:", "requirements"), ("New interfaces introduced:", "interface")):
        if text := columns.text_or_nothing(column):
            parts.append(f"{heading}\n{text}")
    return "\n\n".join(parts)


def _goal(columns: RowColumns, folder: Path | None, instance_id: str) -> TestsGoal:
    files = ",".join(columns.names("selected_test_files_to_run", literals=True))
    lay_out = columns.text("before_repo_set_cmd").strip().split("\n")[-1]
    texts = {name: _script(columns, folder, instance_id, name) for name in ("run_script.sh", "parser.py")}
    logs = f"{_FOLDER}/stdout.log {_FOLDER}/stderr.log"
    return TestsGoal(
        base_commit=columns.commit(),
        test_command=script(
            lay_out,
            f"mkdir -p {_FOLDER}",
            *(written(f"{_FOLDER}/{name}", text) for name, text in texts.items()),
            f"bash {_FOLDER}/run_script.sh {shlex.quote(files)} >{_FOLDER}/stdout.log 2>{_FOLDER}/stderr.log",
            f"cat {logs}",
            f"rm -f {_FOLDER}/output.json",
            f"python {_FOLDER}/parser.py {logs} {_FOLDER}/output.json",
            printed(f"{_FOLDER}/output.json"),
        ),
        judge=JudgeName.OWN,
        log_parser=REPORT,
        **named_tests(columns, "fail_to_pass", "pass_to_pass", literals=True),
    )


def _script(columns: RowColumns, folder: Path | None, instance_id: str, name: str) -> str:
    """Raises: DatasetInvalid: the task's scripts are missing."""
    if folder is None:
        raise columns.fault("instance_id", f"a folder {SCRIPTS} beside the rows", _GET)
    path = folder / SCRIPTS / instance_id / name
    try:
        return read_text_inside(folder / SCRIPTS, path)
    except (OSError, SpecInvalid) as error:
        raise columns.fault("instance_id", f"the file {SCRIPTS}/{instance_id}/{name}", f"{error}; {_GET}") from error
