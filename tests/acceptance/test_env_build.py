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
RECIPES = {
    "django__django-16255": ROWS.parent / "recipes" / "django-16255.toml",
    "sympy__sympy-13031": ROWS.parent / "recipes" / "sympy-13031.toml",
}
"""What makes their releases the base commit."""
VALID = {"django__django-15136", "django__django-15781", "django__django-17029", *RECIPES}
QUARANTINED = {"django__django-13251", "pydicom__pydicom-1458"}
"""docs/reference/real_rows.md says why, and why not the others."""
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


def rewards(system: System, rows: Path) -> list[float]:
    """Of one run of the rows' own patches."""
    before = {one.id for one in system.rows("SELECT id FROM runs")}
    done = system.megaflow("submit", str(rows), "--agent", "oracle", "--wait", timeout_s=900)
    assert "scored" in done.stdout + done.stderr, done.stderr
    [run] = {one.id for one in system.rows("SELECT id FROM runs")} - before
    query = "SELECT (verdict->>'reward')::float AS reward FROM tasks WHERE run_id = :run"
    return [one.reward for one in system.rows(query, run=run)]


@pytest.mark.extra
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
        assert rewards(system, tmp_path / "rows.jsonl") == [1.0]
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
    asked = {name: f"{ROWS}:{name}" for name in rows}
    for name, recipe in RECIPES.items():
        asked[name] = str(tmp_path / recipe.name)
        (tmp_path / recipe.name).write_text(f'task = "{ROWS}:{name}"\n{recipe.read_text()}')
    done = system.megaflow("env", "build", *asked.values(), "--times", "1", "--json", timeout_s=3000)
    assert (done.returncode, done.stdout[:1]) == (1, "{"), done.stderr
    told = json.loads(done.stdout)
    by_name = {one["task"]: one for one in told["environments"]}
    built = [name for name, one in by_name.items() if one["image"]]
    try:
        states = {name: by_name[name]["validation"]["state"] for name in built}
        assert states == {**dict.fromkeys(VALID, "valid"), **dict.fromkeys(QUARANTINED, "quarantined")}
        assert all("does not apply" in by_name[name]["error"] for name in rows.keys() - states.keys())
        for name in VALID:
            found = by_name[name]["validation"]["rewards"]
            assert (found["oracle"], found["nop"]) == ([1.0], [0.0])
        assert (told["built"]["count"], told["kept"]["count"]) == (7, 5)
        (tmp_path / "wrong.jsonl").write_text("".join(f"{json.dumps(wrong(rows[name]))}\n" for name in VALID))
        assert rewards(system, tmp_path / "wrong.jsonl") == [0.0] * len(VALID)
    finally:
        for name in built:
            engine.images.remove(by_name[name]["image"]["image"])


def wrong(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its gold patch's code replaced: it fails where it adds lines."""
    patch = re.sub(r"^\+(?!\+\+ )( *)\S.*$", r"+\1raise RuntimeError", row["patch"], flags=re.MULTILINE)
    return {**row, "patch": patch}
