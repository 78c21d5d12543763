"""The leak scan: what is looked for, what the commands print, and real git repositories that tell too much."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from app.evaluation import leaks
from app.evaluation.leaks import LeakFinding, LeakKind, Needles, needles_of
from app.models.spec import AgentTask, Bundle, EnvironmentSpec, PatchSolution, ScriptGoal, ScriptSolution, TestsGoal
from megaflow.contract.environments.fixture import tar_of
from tests.unit.folder_shell import committed, git

FIXED = "def total(items):\n    amount = sum(price * count for price, count in items)\n    return round(amount, 2)\n"
GOLD = """\
diff --git a/shop.py b/shop.py
--- a/shop.py
+++ b/shop.py
@@ -1,2 +1,3 @@
 def total(items):
-    return sum(items) + 0 * 12345678
+    amount = sum(price * count for price, count in items)
+    return round(amount, 2)
"""
LINES = frozenset({"amount = sum(price * count for price, count in items)", "return round(amount, 2)"})


def a_task(patch: str = GOLD, *, reverse: bool = False) -> AgentTask:
    goal = TestsGoal(base_commit="HEAD", test_command="pytest", fail_to_pass=("t.py::t",), pass_to_pass=())
    environment = EnvironmentSpec(image="i:1")
    solution = PatchSolution(patch=patch, reverse=reverse)
    return AgentTask(name="a", description="d", environment=environment, goal=goal, solution=solution)


def test_of_a_patch_the_new_lines_are_looked_for_and_moved_or_short_ones_are_not() -> None:
    moved = GOLD + "-    a line that only moves elsewhere\n+  a line that only moves elsewhere\n+    x = 1\n"
    assert leaks.new_lines(moved) == LINES
    assert leaks.new_lines(GOLD, reverse=True) == frozenset({"return sum(items) + 0 * 12345678"})
    assert needles_of(a_task()).touched == ("shop.py",)


def test_of_a_solution_and_tests_in_folders_lines_and_whole_files_are_looked_for() -> None:
    solve = b"#!/bin/bash\ncp /solution/fixed.py /app/shop.py\n" + b"# " + b"x" * 60 + b"\n"
    task = a_task().model_copy(
        update={
            "goal": ScriptGoal(tests=Bundle(sha256="0" * 64, size_bytes=1)),
            "solution": ScriptSolution(files=Bundle(sha256="1" * 64, size_bytes=1)),
        }
    )
    found = needles_of(task, tar_of({"solve.sh": solve}), tar_of({"check.py": b"t" * 80, "small": b"t"}))
    assert "cp /solution/fixed.py /app/shop.py" in found.lines[LeakKind.GOLD]
    assert found.files[hashlib.sha256(solve).hexdigest()] == (LeakKind.GOLD, "solve.sh")
    assert {name for kind, name in found.files.values() if kind is LeakKind.TESTS} == {"check.py"}


def test_a_solution_that_is_too_short_to_be_told_apart_is_not_looked_for() -> None:
    assert needles_of(a_task("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")).lines == {}


def test_matches_are_read_also_where_a_path_holds_colons() -> None:
    wanted = Needles(lines={LeakKind.GOLD: LINES}, share={LeakKind.GOLD: 0.8})
    printed = "/a:b/c.py:return round(amount, 2)\n/x:something else\n\n/a:b/c.py:" + max(LINES, key=len)
    assert leaks.matches(printed, wanted) == {"/a:b/c.py": set(LINES)}


def test_a_file_with_most_of_the_lines_is_a_finding_and_one_with_some_is_not() -> None:
    wanted = Needles(lines={LeakKind.GOLD: LINES}, share={LeakKind.GOLD: 0.8})
    (finding,) = leaks.text_findings({"/whole": set(LINES), "/part": {"return round(amount, 2)"}}, wanted)
    assert finding == LeakFinding(LeakKind.GOLD, "/whole", "2 of 2 of its lines")


def test_history_is_read_into_commits_reflog_and_unreachable_objects() -> None:
    printed = (
        f"commit {'a' * 40} Mend the total\nreflog {'a' * 40} commit: Mend\nreflog {'b' * 40} checkout\n"
        f"unreachable blob {'c' * 40}\nunreachable commit {'d' * 40}\nunreachable blob {'e' * 40}\n"
    )
    assert [str(one) for one in leaks.history_findings(printed)] == [
        "commits: .git: 1 after the base: aaaaaaaaaaaa Mend the total",
        "reflog: .git: tells of 2 commits",
        "unreachable: .git: 2 blob, 1 commit",
    ]
    assert leaks.history_findings(f"reflog {'b' * 40} clone\n") == []


def test_files_as_the_gold_patch_leaves_them_are_told_by_their_hash_unless_tiny() -> None:
    digest = hashlib.sha256(FIXED.encode()).hexdigest()
    files = leaks.solved_files(f"{digest} {len(FIXED)} shop.py\n{'0' * 64} 3 __init__.py\nrubbish\n")
    assert files == {digest: (LeakKind.GOLD, "shop.py")}
    found = leaks.file_findings(f"{digest}  /usr/lib/shop/shop.py\n{'1' * 64}  /app/shop.py\n", files)
    assert [str(one) for one in found] == ["gold: /usr/lib/shop/shop.py: the same file as shop.py"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository at its base, which also holds the fix in an amended, unreachable commit."""
    place = tmp_path / "repository"
    committed(place, {"shop.py": "def total(items):\n    return sum(items) + 0 * 12345678\n"})
    (place / "shop.py").write_text(FIXED)
    git(place, "commit", "-qam", "Fix the total")
    git(place, "reset", "-q", "--hard", "HEAD~1")
    return place


def ran(command: str, place: Path, stdin: bytes = b"") -> str:
    done = subprocess.run(["sh", "-c", command], cwd=place, input=stdin, capture_output=True, check=False)
    return done.stdout.decode()


def test_the_commands_find_a_fix_that_only_the_reflog_still_knows(repository: Path, tmp_path: Path) -> None:
    told = ran(leaks.GIT + leaks._COMMITS.format(base="HEAD", most=20, objects=100), repository)
    assert {one.kind for one in leaks.history_findings(told)} >= {LeakKind.COMMITS, LeakKind.REFLOG}
    patterns = tmp_path / "patterns"
    patterns.write_text("\n".join(LINES) + "\n")
    objects = leaks._OBJECTS.format(base="HEAD", objects=100, patterns=patterns, most=10_000)
    assert set(ran(leaks.GIT + objects, repository).split("\n")) >= LINES


@pytest.mark.parametrize("unzip", ["unzip", "python3"])
def test_the_commands_look_into_archives_and_large_files(tmp_path: Path, unzip: str) -> None:
    place, names = tmp_path / "image", ("shop-2-py3-none-any.whl", "a name.zip", "pip/http-v2/1/2/3.body")
    (place / "pip" / "http-v2" / "1" / "2").mkdir(parents=True)
    for name in names:
        with zipfile.ZipFile(place / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("shop.py", FIXED)
    (place / "shop-2.tar.gz").write_bytes(gzip.compress(tar_of({"shop-2/shop.py": FIXED.encode()})))
    (place / "large").write_bytes(b"\n" * (5 << 20) + FIXED.encode())
    patterns = tmp_path / "patterns"
    patterns.write_text("\n".join(LINES) + "\n")
    programs = tmp_path / "programs"
    programs.mkdir()
    for program in ("find", "xargs", "sh", "grep", "sort", "head", "tar", "gzip", unzip):
        there = os.path.realpath(sys.executable) if program == "python3" else shutil.which(program)
        (programs / program).symlink_to(there or pytest.skip(f"needs {program}"))
    wanted = Needles(lines={LeakKind.GOLD: LINES}, share={LeakKind.GOLD: 0.8})
    told = "".join(ran(f"PATH={programs}; {one}", place) for one in leaks.text_commands(str(patterns), str(place)))
    found = {one.place.removeprefix(f"{place}/") for one in leaks.text_findings(leaks.matches(told, wanted), wanted)}
    assert found == {*names, "shop-2.tar.gz", "large"}


def test_the_commands_apply_the_gold_patch_aside_and_change_nothing(repository: Path) -> None:
    before = (repository / "shop.py").read_text()
    command = leaks._APPLIED.format(base="HEAD", how="", paths="shop.py")
    found = leaks.solved_files(ran(leaks.GIT + command, repository, GOLD.encode()))
    assert found == {hashlib.sha256(FIXED.encode()).hexdigest(): (LeakKind.GOLD, "shop.py")}
    assert (repository / "shop.py").read_text() == before
    assert ran("git status --porcelain", repository) == ""
