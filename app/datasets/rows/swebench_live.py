"""Reads SWE-bench-Live and its MultiLang: rows that include commands to build, test and print, and a parser.

Order of its evaluation: test patch, patch, `rebuild_cmds`, `test_cmds`, `print_cmds`. Only the output of the last print
is read, or, if there is none (the Python rows), the output of the tests. `log_parser` is `pytest` or a Python program
with a function `parser(log) -> {name: pass|fail|skip}`.

Source: microsoft/SWE-bench-Live, evaluation/evaluation.py (evaluate_instance, get_default_image_name), launch/launch/
scripts/parser.py (run_parser), curation/push_dataset/push_multilang.py (columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from app.datasets.base import Reading, Row
from app.datasets.rows.columns import RowColumns, present
from app.datasets.rows.environments import image_of, script
from app.datasets.rows.goals import NEEDED, judged_by_parser, named_tests, printed, row_task, swebench_parser, written
from app.models.spec import AgentTask, JudgeName, TestsGoal

REPORT = "swe-bench-live"
"""Parser that reads the results of a row's own program."""
_PYTEST = "parse_log_pytest"
_FOLDER = "/tmp/megaflow-live"
_MOST_PROGRAM = 1 << 20  # characters
_RUN_PARSER = """import json
program = {{}}
exec(open("{folder}/parser.py").read(), program)
found = program["parser"](open("{folder}/log", errors="replace").read())
words = {{"pass": "PASSED", "fail": "FAILED", "skip": "SKIPPED"}}
tests = [{{"name": name, "status": words.get(str(status).lower(), "FAILED")}} for name, status in found.items()]
json.dump({{"tests": tests}}, open("{folder}/report.json", "w"))
"""


class SweBenchLiveRows:
    """Rules of SWE-bench-Live."""

    name: ClassVar[str] = "swe-bench-live"
    columns: ClassVar[frozenset[str]] = NEEDED | {"test_patch", "test_cmds", "log_parser"}

    def recognises(self, row: Mapping[str, Any]) -> bool:
        names = present(row)
        return names >= {"test_cmds", "log_parser"} and not names & {"install_config", "eval_script"}

    def task(self, row: Row, reading: Reading) -> AgentTask:
        columns = RowColumns.of(row, self.columns, self.name)
        image = image_of(columns, "docker_image", owner="starryzhang")
        if "sweb.eval.win." in image:
            raise columns.fault(
                "docker_image", "an image for Linux", "rows for Windows cannot run here: leave them out"
            )
        with row.place.named():
            return row_task(row, columns, reading, _goal(columns, reading), image=image)


def _goal(columns: RowColumns, reading: Reading) -> TestsGoal:
    build = " ; ".join(columns.commands_or_none("rebuild_cmds"))
    run, show = " ; ".join(columns.commands("test_cmds")), " ; ".join(columns.commands_or_none("print_cmds"))
    parser = columns.text("log_parser")
    if is_program := parser.strip().lower() != "pytest":
        command = _with_program(columns, run, show, parser)
    else:
        swebench_parser(columns, reading, _PYTEST)
        command = script(f"{{ {run}\n}} >/dev/null 2>&1" if show else run, show)
    return TestsGoal(
        base_commit=columns.commit(),
        test_patch=columns.patch("test_patch", needed=True),
        build_command=build,
        test_command=command,
        judge=JudgeName.OWN if is_program else JudgeName.SWEBENCH_5,
        log_parser=REPORT if is_program else _PYTEST,
        row={} if is_program else judged_by_parser(columns),
        **named_tests(columns),
    )


def _with_program(columns: RowColumns, run: str, show: str, parser: str) -> str:
    """Raises: DatasetInvalid: the parser is neither a known name nor a program."""
    if "def parser(" not in parser or len(parser) > _MOST_PROGRAM:
        raise columns.fault("log_parser", "pytest, or a Python program that defines parser(log)")
    log, quiet = f">{_FOLDER}/log 2>&1", ">/dev/null 2>&1"
    return script(
        f"mkdir -p {_FOLDER}",
        f"{{ {run}\n}} {quiet if show else log}",
        f"{{ {show}\n}} {log}" if show else "",
        f"cat {_FOLDER}/log",
        written(f"{_FOLDER}/parser.py", parser),
        written(f"{_FOLDER}/report.py", _RUN_PARSER.format(folder=_FOLDER)),
        f"python3 -I {_FOLDER}/report.py",  # -I: tests can write modules next to it
        printed(f"{_FOLDER}/report.json"),
    )
