"""Adapts swebench 4: classic rows, by its tables of repositories and versions. Served by resident.py.

Source: swebench 4.1.0, harness/test_spec/create_scripts.py (the commands), harness/grading.py (the verdict).
"""

from __future__ import annotations

from typing import Any

from resident import RowUnknown, absent, as_file, bare, column

absent("datasets", "requests")  # it uses them for rows of the hub and requirements on GitHub
bare("swebench", "swebench.harness")

from swebench.harness.constants import (  # noqa: E402
    END_TEST_OUTPUT,
    FAIL_ONLY_REPOS,
    FAIL_TO_PASS,
    MAP_REPO_TO_EXT,
    MAP_REPO_TO_REQS_PATHS,
    MAP_REPO_VERSION_TO_SPECS,
    PASS_TO_PASS,
    START_TEST_OUTPUT,
    EvalType,
    ResolvedStatus,
)
from swebench.harness.grading import get_eval_tests_report, get_logs_eval, get_resolution_status  # noqa: E402
from swebench.harness.log_parsers import MAP_REPO_TO_PARSER  # noqa: E402
from swebench.harness.test_spec.create_scripts import make_eval_script_list  # noqa: E402
from swebench.harness.test_spec.test_spec import TestSpec  # noqa: E402

NAME = "swebench"
_ENVIRONMENT, _FOLDER = "testbed", "/testbed"
_ACTIVATION = f"conda activate {_ENVIRONMENT}"


def describe(row: dict[str, Any]) -> dict[str, str]:
    """Returns the parts of its evaluation script: lines before the patches, the install step, the build after the
    hidden tests, and the tests; and the packages of its environment.
    """
    repo, version = _known(row)
    specs = MAP_REPO_VERSION_TO_SPECS[repo][version]
    lines = make_eval_script_list(
        {**row, "version": version}, specs, _ENVIRONMENT, _FOLDER, column(row, "base_commit"), column(row, "test_patch")
    )
    start, end = lines.index(f": '{START_TEST_OUTPUT}'"), lines.index(f": '{END_TEST_OUTPUT}'")
    safe = lines.index(f"git config --global --add safe.directory {_FOLDER}")
    reset = lines.index(lines[-1])  # the last line repeats the one before the hidden tests
    applied = next(at for at in range(reset, start) if lines[at].startswith("git apply"))
    activated = max((at for at in range(safe, reset) if lines[at] == _ACTIVATION), default=reset)
    return {
        "environment": "\n".join(lines[:safe]),
        "install": "\n".join(lines[activated + 1 : reset]),
        "build": "\n".join([*lines[reset + 1 : applied], *lines[applied + 1 : start]]),
        "test_command": "\n".join(lines[start + 1 : end]),
        "parser": MAP_REPO_TO_PARSER[repo].__name__,
        "python": specs.get("python", ""),
        "packages": "\n".join([*specs.get("packages", "").split(), *specs.get("pip_packages", [])]),
        "pre_install": "\n".join(specs.get("pre_install", [])),
        "requirements": "\n".join(MAP_REPO_TO_REQS_PATHS.get(repo, [])),
    }


def judge(goal: dict[str, Any], log: str, exit_code: int | None) -> dict[str, Any]:
    """Judges by its own reading of a log file. If its parser lists only failures, a run with an error exit code but no
    failures is not resolved: it never took place.
    """
    row = goal["row"]
    repo, version = _known(row)
    tests = {FAIL_TO_PASS: goal["fail_to_pass"], PASS_TO_PASS: goal["pass_to_pass"]}
    spec = TestSpec(
        instance_id=str(row.get("instance_id", "")), repo=repo, version=version, repo_script_list=[],
        eval_script_list=[], env_script_list=[], arch="x86_64", FAIL_TO_PASS=tests[FAIL_TO_PASS],
        PASS_TO_PASS=tests[PASS_TO_PASS], language=MAP_REPO_TO_EXT[repo], docker_specs={}, namespace=None,
    )  # fmt: skip
    with as_file(f"{START_TEST_OUTPUT}\n{log}\n{END_TEST_OUTPUT}\n") as path:
        statuses, readable = get_logs_eval(spec, path)
    fail_only = repo in FAIL_ONLY_REPOS
    if not readable or (fail_only and not statuses and exit_code != 0):
        return {"resolved": False, "statuses": {}}
    eval_type = EvalType.FAIL_ONLY if fail_only else EvalType.PASS_AND_FAIL
    report = get_eval_tests_report(statuses, tests, eval_type=eval_type)
    passed = {name for kind in tests for name in report[kind]["success"]}
    return {
        "resolved": get_resolution_status(report) == ResolvedStatus.FULL.value,
        "statuses": {
            name: statuses.get(name) or ("PASSED" if name in passed else "MISSING")
            for names in tests.values()
            for name in names
        },
    }


def _known(row: dict[str, Any]) -> tuple[str, str]:
    """Returns repository and version. Raises: RowUnknown."""
    repo, version = column(row, "repo"), str(row.get("version"))
    if repo not in MAP_REPO_VERSION_TO_SPECS:
        raise RowUnknown(
            f"swebench 4 knows no repository {repo!r} (`repo`); it has {len(MAP_REPO_VERSION_TO_SPECS)}", "repo"
        )
    versions = MAP_REPO_VERSION_TO_SPECS[repo]
    if version not in versions:
        known = ", ".join(versions)
        raise RowUnknown(f"swebench 4 knows no version {version!r} of {repo} (`version`); known: {known}", "version")
    if "test_cmd" not in versions[version] or repo not in MAP_REPO_TO_PARSER:
        raise RowUnknown(f"swebench 4 has no test command or no parser for version {version!r} of {repo}", "version")
    return repo, version
