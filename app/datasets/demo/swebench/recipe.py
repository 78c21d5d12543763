"""The recipe of the demo's SWE-bench rows: rows.toml and the image contexts in, rows.jsonl out.

    python -m app.datasets.demo.swebench.recipe            write rows.jsonl
    python -m app.datasets.demo.swebench.recipe --check    leave with 1 when it is not what the recipe gives

Nothing in a row is claimed, everything is measured here on the host: each repository is made by its own setup.sh, the
library's real tests run before and after the gold patch, and what changed from failing to passing is FAIL_TO_PASS.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.images.build_sources import fetch_sources

HERE = Path(__file__).resolve().parent
ROWS = HERE / "rows.jsonl"
TEST_TIMEOUT_S = 120.0
PASSING = {"PASSED", "XFAIL"}


class RecipeWrong(Exception):
    """A context does not give a usable row; the message says what was expected of it."""


@dataclass(frozen=True)
class Measured:
    """What a context gives when it is really carried out."""

    base_commit: str
    patch: str
    test_patch: str
    fail_to_pass: list[str]
    pass_to_pass: list[str]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="regenerate the demo's SWE-bench rows")
    parser.add_argument("--check", action="store_true", help="write nothing; leave with 1 when rows.jsonl is out of date")
    parser.add_argument("--cache", type=Path, default=None, help="folder in which source archives are kept")
    chosen = parser.parse_args(argv)
    fresh = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in regenerate(cache=chosen.cache))
    if not chosen.check:
        ROWS.write_text(fresh, encoding="utf-8")
        return 0
    if ROWS.read_text(encoding="utf-8") == fresh:
        return 0
    print(f"{ROWS} is not what the recipe gives; run python -m {__spec__.name if __spec__ else 'recipe'}", file=sys.stderr)
    return 1


def regenerate(*, cache: Path | None = None) -> list[dict[str, Any]]:
    """All rows, in the order of rows.toml.

    Raises: RecipeWrong; ImageBuildFailed when a source archive cannot be had.
    """
    written = tomllib.loads((HERE / "rows.toml").read_text(encoding="utf-8"))["row"]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        measured = list(pool.map(lambda row: measure(row, cache=cache), written))
    return [_row(row, found) for row, found in zip(written, measured, strict=True)]


def measure(written: dict[str, Any], *, cache: Path | None = None) -> Measured:
    """Carry a row's context out in a temporary folder and run its tests with and without the gold patch."""
    context, test_cmd = HERE / written["context"], written["test_cmd"]
    with tempfile.TemporaryDirectory(prefix="megaflow-recipe-") as scratch:
        copy, repository = Path(scratch) / "context", Path(scratch) / "repository"
        shutil.copytree(context, copy)
        fetch_sources(copy, cache=cache)
        _run(["sh", str(copy / "setup.sh")], Path(scratch), WORKDIR=str(repository))
        base_commit = _git(repository, "rev-parse", "HEAD").strip()
        test_patch = _reverse(repository, copy / "hide-tests.patch")
        before = run_tests(repository, test_cmd)
        patch = _reverse(repository, copy / "bug.patch")
        after = run_tests(repository, test_cmd)
    return Measured(base_commit, patch, test_patch, *_compare(written, before, after))


def _compare(written: dict[str, Any], before: dict[str, str], after: dict[str, str]) -> tuple[list[str], list[str]]:
    """FAIL_TO_PASS and PASS_TO_PASS."""
    name_of_row = written["instance_id"]
    broken = sorted(name for name, status in after.items() if status not in PASSING | {"SKIPPED"})
    if broken:
        raise RecipeWrong(f"{name_of_row}: expected every test to pass with the gold patch, found {broken}")
    passing = sorted(name for name, status in after.items() if status in PASSING)
    fail_to_pass = [name for name in passing if before.get(name) not in PASSING]
    # A report names a test up to the first blank, as SWE-bench's parsers read it: ids with blanks cannot be told apart.
    torn = [name for name in fail_to_pass if not _whole(name)]
    if torn or not fail_to_pass:
        raise RecipeWrong(f"{name_of_row}: expected failing tests with ids without blanks, found {torn or 'none'}")
    unstable = tuple(written.get("unstable_ids", ()))
    pass_to_pass = [name for name in passing if before.get(name) in PASSING and _whole(name)]
    return fail_to_pass, [name for name in pass_to_pass if not name.startswith(unstable)]


def run_tests(repository: Path, test_cmd: str) -> dict[str, str]:
    """Each test's status in pytest's short summary, by node id."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    said = _run(["bash", "-c", test_cmd], repository, check=False, PATH=search, PYTHONDONTWRITEBYTECODE="1")
    statuses = {}
    for line in said.splitlines():
        status, _, rest = line.partition(" ")
        if status in {"PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"} and "::" in rest:
            statuses[rest.partition(" - ")[0].strip()] = status
    if not statuses:
        raise RecipeWrong(f"expected a pytest report of {test_cmd!r}, found {said[-2000:]!r}")
    return statuses


def _whole(name: str) -> bool:
    return name.isascii() and not any(letter.isspace() or letter == "\\" for letter in name)


def _reverse(repository: Path, planted: Path) -> str:
    """Take a planted patch back; returns what that changed, as a patch against the base commit."""
    _git(repository, "apply", "--reverse", "--index", str(planted))
    return _git(repository, "diff", "--cached", "--no-color", "--no-ext-diff", "--", *_files(repository, planted))


def _files(repository: Path, planted: Path) -> list[str]:
    listed = _git(repository, "apply", "--numstat", str(planted))
    return [line.split("\t")[2] for line in listed.splitlines()]


def _git(repository: Path, *arguments: str) -> str:
    return _run(
        ["git", "-c", f"safe.directory={repository}", *arguments],
        repository,
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
    )


def _run(command: list[str], cwd: Path, *, check: bool = True, **variables: str) -> str:
    quiet = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTEST_", "PYTHONPATH"))}
    done = subprocess.run(
        command, cwd=cwd, env=quiet | variables, capture_output=True, text=True, timeout=TEST_TIMEOUT_S, check=False
    )
    if check and done.returncode:
        raise RecipeWrong(f"expected {command} to succeed, found code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _row(written: dict[str, Any], found: Measured) -> dict[str, Any]:
    """One line of rows.jsonl: SWE-bench's columns, then what says how to build and judge it."""
    return {
        "instance_id": written["instance_id"],
        "repo": written["repo"],
        "base_commit": found.base_commit,
        "problem_statement": written["problem_statement"].strip() + "\n",
        "hints_text": written["hints_text"],
        "patch": found.patch,
        "test_patch": found.test_patch,
        "FAIL_TO_PASS": found.fail_to_pass,
        "PASS_TO_PASS": found.pass_to_pass,
        "version": written["version"],
        "created_at": written["created_at"],
        "environment_setup_commit": found.base_commit,
        "build_context": written["context"],
        "test_cmd": written["test_cmd"],
        "log_parser": "pytest",
    }


if __name__ == "__main__":
    sys.exit(main())
