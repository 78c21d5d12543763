"""Adapts swesmith: rows whose `patch` is the bug, by the profile of their repository. Served by resident.py.

Source: swesmith 0.0.9, harness/utils.py (the script), harness/grading.py (the verdict); it needs swebench 4.
"""

from __future__ import annotations

from typing import Any

from resident import RowUnknown, absent, as_file, bare

absent(
    "datasets", "requests", "docker", "docker.errors", "docker.models", "docker.models.containers", "ghapi", "ghapi.all"
)
bare("swebench", "swebench.harness")

from swebench.harness.constants import FAIL_TO_PASS, PASS_TO_PASS, ResolvedStatus  # noqa: E402
from swesmith.constants import TEST_OUTPUT_END, TEST_OUTPUT_START  # noqa: E402
from swesmith.harness.grading import get_eval_tests_report, get_resolution_status, read_test_output  # noqa: E402
from swesmith.profiles import registry  # noqa: E402

NAME = "swesmith"


def describe(row: dict[str, Any]) -> dict[str, Any]:
    """Returns its test command, the image, and the test files that are restored after the patch."""
    profile = _profile(row)
    try:
        command, _ = profile.get_test_cmd(row)
        fail_to_pass, pass_to_pass = profile.get_test_files(row)
    except (AssertionError, PermissionError, ValueError, NotImplementedError) as error:  # it would clone the repository
        raise RowUnknown(
            f"swesmith cannot tell the tests of {profile.repo_name} by the row alone (`FAIL_TO_PASS`, `PASS_TO_PASS`,"
            f" `instance_id`): {type(error).__name__}: {error}",
            "FAIL_TO_PASS",
        ) from error
    return {
        "environment": "cd /testbed",
        "install": "",
        "build": "",
        "test_command": command,
        "parser": type(profile).__name__,
        "image": profile.image_name,
        "test_files": sorted({*fail_to_pass, *pass_to_pass}),
    }


def judge(goal: dict[str, Any], log: str, exit_code: int | None) -> dict[str, Any]:
    """Judges by the profile's parser."""
    del exit_code  # its rule does not use it
    profile = _profile(goal["row"])
    tests = {FAIL_TO_PASS: goal["fail_to_pass"], PASS_TO_PASS: goal["pass_to_pass"]}
    with as_file(f"+ : '{TEST_OUTPUT_START}'\n{log}\n+ : '{TEST_OUTPUT_END}'\n") as path:
        output, readable = read_test_output(path)
    if not readable:
        return {"resolved": False, "statuses": {}}
    statuses = profile.log_parser(output)
    report = get_eval_tests_report(statuses, tests)
    return {
        "resolved": get_resolution_status(report) == ResolvedStatus.FULL.value,
        "statuses": {name: statuses.get(name, "MISSING") for names in tests.values() for name in names},
    }


def _profile(row: dict[str, Any]) -> Any:
    """Raises: RowUnknown."""
    try:
        return registry.get_from_inst(row)
    except KeyError as error:
        raise RowUnknown(
            f"swesmith has no profile of the row's `repo` or `instance_id`: {error.args[0]}", "repo"
        ) from error
