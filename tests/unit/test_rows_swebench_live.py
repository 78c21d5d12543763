"""SWE-bench-Live and MultiLang. Columns: microsoft/SWE-bench-Live, evaluation.py and push_multilang.py."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from app.errors import DatasetInvalid
from app.grading.reports import PARSERS
from app.models.outcome import TestStatus
from app.models.spec import JudgeName
from tests.unit.row_reading import CLASSIC, bash, goal_of, read, without

PYTHON = without(
    CLASSIC, repo="amoffat/sh", instance_id="amoffat__sh-744", log_parser="pytest", test_cmds=["pytest -rA"],
    FAIL_TO_PASS=["tests/sh_test.py::FunctionalTests::test_a"], PASS_TO_PASS=[], pull_number="744",
)  # fmt: skip
PROGRAM = """import re

def parser(log: str) -> dict[str, str]:
    words = {"ok": "pass", "FAILED": "fail", "ignored": "skip"}
    return {name: words[word] for name, word in re.findall(r"^test (\\S+) \\.\\.\\. (\\w+)$", log, re.M)}
"""
RUST = without(
    PYTHON, "environment_setup_commit", "version", repo="a/b", instance_id="a__b-1", log_parser=PROGRAM,
    docker_image="starryzhang/sweb.eval.x86_64.a_1776_b-1", rebuild_cmds=["touch built"],
    test_cmds=["[ -f built ] && echo 'test one ... ok' >log.txt", "echo 'test two ... FAILED' >>log.txt; echo test x"],
    print_cmds=["cat log.txt"], FAIL_TO_PASS=["one"], PASS_TO_PASS=["two"],
)  # fmt: skip


def run(row: dict[str, Any], tmp_path: Path) -> str:
    goal = goal_of(read("swe-bench-live", row))
    assert bash(goal.build_command, tmp_path).returncode == 0
    command = goal.test_command.replace("/tmp/megaflow-live", str(tmp_path / "live"))
    done = bash(command, tmp_path)
    return done.stdout + done.stderr


def test_a_python_row_is_read_by_pytest_s_parser_and_brings_its_commands() -> None:
    task = read("swe-bench-live", PYTHON)
    goal = goal_of(task)
    assert task.environment.image == "docker.io/starryzhang/sweb.eval.x86_64.amoffat_1776_sh-744:latest"
    assert (task.environment.workdir, task.environment.env) == ("/testbed", {})
    assert (goal.judge, goal.log_parser, goal.test_command) == (
        JudgeName.SWEBENCH_5, "parse_log_pytest", "pytest -rA",
    )  # fmt: skip


def test_only_what_is_printed_last_is_read() -> None:
    row = without(PYTHON, rebuild_cmds=["make"], test_cmds=["a", "b"], print_cmds=["cat log"])
    goal = goal_of(read("swe-bench-live", row))
    assert (goal.build_command, goal.test_command) == ("make", "{ a ; b\n} >/dev/null 2>&1\ncat log")
    assert goal.row["eval_type"] == "pass_and_fail"


def test_the_program_of_a_row_reads_the_report_inside(tmp_path: Path) -> None:
    goal = goal_of(read("swe-bench-live", RUST))
    assert (goal.judge, goal.log_parser) == (JudgeName.OWN, "swe-bench-live")
    said = run(RUST, tmp_path)
    assert PARSERS[goal.log_parser](said) == {"one": TestStatus.PASSED, "two": TestStatus.FAILED}
    assert "test x" not in said


def test_a_module_that_a_test_wrote_beside_the_report_is_not_read(tmp_path: Path) -> None:
    forge = f"def dump(what, file):\n    file.write('{{}}')\nopen({str(tmp_path / 'read')!r}, 'w')"
    planted = f"printf '%s\\n' {shlex.quote(forge)} >/tmp/megaflow-live/json.py"
    said = run(without(RUST, test_cmds=[planted, *RUST["test_cmds"]]), tmp_path)
    assert PARSERS["swe-bench-live"](said) == {"one": TestStatus.PASSED, "two": TestStatus.FAILED}
    assert (tmp_path / "live" / "json.py").exists()
    assert not (tmp_path / "read").exists()


def test_a_program_that_fails_reports_nothing(tmp_path: Path) -> None:
    said = run(without(RUST, log_parser="def parser(log):\n    raise ValueError\n"), tmp_path)
    assert "ValueError" in said
    assert PARSERS["swe-bench-live"](said) == {}


def test_a_program_that_needs_its_own_functions_finds_them(tmp_path: Path) -> None:
    program = "def status():\n    return 'skip'\n\ndef parser(log):\n    return {'a': status()}\n"
    assert PARSERS["swe-bench-live"](run(without(RUST, log_parser=program), tmp_path)) == {"a": TestStatus.SKIPPED}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (without(PYTHON, log_parser="cargo"), "field log_parser: expected pytest, or a Python program"),
        (without(PYTHON, log_parser=7), "field log_parser: expected a text"),
        (without(PYTHON, test_cmds=[]), "field test_cmds: expected a command"),
        (without(PYTHON, test_cmds=[1]), "field test_cmds: expected a command"),
        (without(PYTHON, "test_cmds"), "field test_cmds: expected the columns of swe-bench-live"),
        (without(RUST, docker_image="starryzhang/sweb.eval.win.a_1776_b-1"), "expected an image for Linux"),
    ],
)  # fmt: skip
def test_what_the_rules_do_not_say_is_refused_by_name(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        read("swe-bench-live", row)
