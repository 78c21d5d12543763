"""`megaflow env build`: rows become images that a submission finds, and that validation has judged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.acceptance.conftest import System
from tests.unit.folder_shell import committed

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

ROWS = Path(__file__).parents[1] / "integration" / "grading" / "swebench_rows.jsonl"
BUILT = {
    "django__django-13251", "django__django-15136", "django__django-15781", "django__django-16255",
    "django__django-17029", "pydicom__pydicom-1458", "sympy__sympy-13031",
}  # fmt: skip
"""docs/reference/real_rows.md says why not the others."""
# What Django's own prints of a run.
RUNTESTS = """#!/usr/bin/env python
import quiet
print("test_answer (quiet.tests.One.test_answer) ... " + ("ok" if quiet.answer() == 42 else "FAIL"))
print("test_kept (quiet.tests.One.test_kept) ... ok")
"""
SETUP = "from setuptools import setup\nsetup(name='quiet', version='1', py_modules=['quiet'])\n"


def change(file: str, old: str, new: str) -> str:
    return (
        f"diff --git a/{file} b/{file}\n--- a/{file}\n+++ b/{file}\n@@ -1,2 +1,2 @@\n def answer():\n-{old}\n+{new}\n"
    )


@pytest.fixture
def engine() -> Any:
    client = docker.from_env()
    yield client
    client.close()


def test_a_row_is_built_from_a_repository_and_found_by_a_submission(
    system: System, tmp_path: Path, engine: Any
) -> None:
    origin, body = tmp_path / "origin", "def answer():\n    return 1\n"
    files = {"quiet.py": body, "setup.py": SETUP, "tests/one.py": body, "tests/requirements/py3.txt": "tomli\n"}
    for folder in ("tests/requirements",):
        (origin / folder).mkdir(parents=True)
    (origin / "tests" / "runtests.py").write_text(RUNTESTS)
    (origin / "tests" / "runtests.py").chmod(0o755)
    base = committed(origin, files)
    name = f"quiet__quiet-{base[:8]}"
    row = {
        "repo": "django/django", "version": "5.0", "instance_id": name, "base_commit": base,
        "environment_setup_commit": base, "problem_statement": "p", "created_at": "2023-06-29T13:18:26Z",
        "patch": change("quiet.py", "    return 1", "    return 42"),
        "test_patch": change("tests/one.py", "    return 1", "    return 2"),
        "FAIL_TO_PASS": ["test_answer (quiet.tests.One.test_answer)"],
        "PASS_TO_PASS": ["test_kept (quiet.tests.One.test_kept)"],
    }  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    asked = ("env", "build", f"{tmp_path}/rows.jsonl:{name}", "--repository", str(origin), "--times", "1", "--json")
    done = system.megaflow(*asked, timeout_s=500)
    assert done.returncode == 0, done.stderr + done.stdout
    image = f"swebench/sweb.eval.x86_64.{name.replace('__', '_1776_')}:latest"
    try:
        [found] = json.loads(done.stdout)["environments"]
        assert found["validation"]["state"] == "valid"
        assert found["validation"]["image_id"] == found["image"]["image_id"] == engine.images.get(image).id
        assert found["image"]["image_bytes"] > 0
        run = system.json("submit", f"{tmp_path}/rows.jsonl", "--agent", "oracle", "--wait")
        assert "1" in json.dumps(run)
    finally:
        engine.images.remove(image)

    broken = tmp_path / "recipe.toml"
    broken.write_text(
        f'task = "{tmp_path}/rows.jsonl:{name}"\nrepository = "{origin}"\ninstall = ["echo so; exit 7"]\n'
    )
    failed = system.megaflow("env", "build", str(broken), "--json", timeout_s=300)
    assert failed.returncode == 1
    [found] = json.loads(failed.stdout)["environments"]
    assert "could not be built" in found["error"]
    assert "non-zero code: 7" in found["error"]


@pytest.mark.extra
@pytest.mark.timeout(3600)
def test_real_rows_are_built_from_releases_with_gold_resolved_and_nothing_else(
    system: System, tmp_path: Path, engine: Any
) -> None:
    rows = {row["instance_id"]: row for row in map(json.loads, ROWS.read_text().splitlines())}
    done = system.megaflow(
        "env", "build", *(f"{ROWS}:{name}" for name in rows), "--times", "1", "--json", timeout_s=3000
    )
    told = json.loads(done.stdout)
    try:
        states = {
            one["task"]: one["validation"]["state"] if one["validation"] else one["error"]
            for one in told["environments"]
        }
        assert {name for name, state in states.items() if state == "valid"} == BUILT, states
        for one in told["environments"]:
            if one["validation"]:
                assert (one["validation"]["rewards"]["oracle"], one["validation"]["rewards"]["nop"]) == ([1.0], [0.0])
            else:
                assert "does not apply" in one["error"]
        assert told["kept"]["count"] == len(BUILT)
        wrong = [
            {
                **rows[name],
                "patch": re.sub(r"^\+(?!\+\+)(\s*).*\S.*$", r"+\1pass", rows[name]["patch"], flags=re.MULTILINE),
            }
            for name in BUILT
        ]
        (tmp_path / "wrong.jsonl").write_text("".join(json.dumps(one) + "\n" for one in wrong))
        run = system.megaflow(
            "submit", f"{tmp_path}/wrong.jsonl", "--agent", "oracle", "--wait", "--json", timeout_s=900
        )
        assert run.returncode == 0, run.stderr
        status = json.loads(run.stdout)
        assert status
    finally:
        for name in BUILT:
            engine.images.remove(f"swebench/sweb.eval.x86_64.{name.replace('__', '_1776_')}:latest")
