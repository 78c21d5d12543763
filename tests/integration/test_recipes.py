"""Recipes: what a row says of its environment, which release stands for its commit, and what is refused by name."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from app.errors import SpecInvalid
from app.evaluation.leaks import needles_of, scan
from app.grading.patches import lay_out_tests, require_base
from app.models.spec import AgentTask, EnvironmentSpec, JudgeName, PatchSolution, TestsGoal
from app.recipes import recipe, sources
from app.recipes.recipe import Recipe
from tests.unit.folder_shell import FolderShell, git

SHA = "ab" * 20
HEAD = "diff --git a/quiet.py b/quiet.py\n--- a/quiet.py\n+++ b/quiet.py\n"
GOLD = HEAD + "@@ -2,4 +2,4 @@\n # b\n # c\n def answer():\n-    return 1\n+    return 42\n"
TESTS = GOLD.replace("quiet.py", "test_quiet.py")
PATCHES = {"the gold patch": GOLD, "the test patch": TESTS}
BEFORE = datetime(2022, 1, 1, tzinfo=UTC)
BODY = "# a\n# b\n# c\ndef answer():\n    return 1\n"
GOOD = {"quiet.py": BODY, "test_quiet.py": BODY, "quiet.egg-info/x": "made", "PKG-INFO": "Requires-Dist: a>1\n\n"}


def release(version: str, files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"quiet-{version}/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content.encode()))
    return gzip.compress(buffer.getvalue(), mtime=0)


RELEASES = {
    "1.0": ("2021-01-01T00:00:00Z", release("1.0", GOOD)),
    "1.1": ("2021-06-01T00:00:00Z", release("1.1", {**GOOD, "quiet.py": "\n" + BODY})),  # other lines
    "1.2": ("2021-09-01T00:00:00Z", release("1.2", {"quiet.py": BODY})),  # as many releases: without tests
    "2.0": ("2022-06-01T00:00:00Z", release("2.0", GOOD)),  # after the row
}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[str, bytes]]]:
    """An index on loopback that tells upload times, to which pip alone is pointed; what it has may be changed."""
    offered = dict(RELEASES)

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/simple/quiet/":
                files = [
                    {"filename": f"quiet-{one}.tar.gz", "url": f"/files/quiet-{one}.tar.gz", "upload-time": at,
                     "hashes": {"sha256": hashlib.sha256(content).hexdigest()}}
                    for one, (at, content) in offered.items()
                ]  # fmt: skip
                body = json.dumps({"meta": {"api-version": "1.1"}, "name": "quiet", "files": files}).encode()
            else:
                body = offered[self.path.removeprefix("/files/quiet-").removesuffix(".tar.gz")][1]
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = tmp_path / "pip.conf"
    address = f"http://127.0.0.1:{server.server_port}"
    settings.write_text(f"[global]\nindex-url = {address}/simple\ntrusted-host = 127.0.0.1\nretries = 0\n")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    yield offered
    server.shutdown()
    server.server_close()


def fetched(tmp_path: Path, name: str = "quiet", **more: Any) -> sources.Source:
    asked = Recipe(**{"release": name, "commit": SHA, "image": "i", **more})
    return sources.fetched(asked, PATCHES, BEFORE, tmp_path / "sources", tmp_path / "cache")


def unpacked(tmp_path: Path, found: sources.Source) -> FolderShell:
    """The source as an image has it."""
    shell = FolderShell(tmp_path)
    place = shell.path("/testbed")
    (found.folder / "repository.git").rename(place / ".git")
    git(place, "config", "core.bare", "false")
    git(place, "reset", "--quiet", "--hard")
    return shell


# --- Releases -------------------------------------------------------------------------------------------------------


def test_the_newest_release_that_all_patches_fit_at_their_lines_is_taken(
    index: dict[str, tuple[str, bytes]], tmp_path: Path
) -> None:
    tops = gzip.compress(gzip.decompress(release("1.3", {"a": ""}))[:1024] + gzip.decompress(release("1.4", {"a": ""})))
    index["1.3"], index["1.4"] = ("2021-11-01T00:00:00Z", tops), ("2021-12-01T00:00:00Z", b"PK no tar")
    assert fetched(tmp_path).label == "quiet==1.0"


def test_one_whose_lines_moved_is_taken_where_none_is_exact_and_that_is_said(
    index: dict[str, tuple[str, bytes]], tmp_path: Path
) -> None:
    del index["1.0"]
    assert fetched(tmp_path).label == "quiet==1.1; patches apply at other lines"


def test_where_nothing_fits_every_release_is_named_with_the_reason(
    index: dict[str, tuple[str, bytes]], tmp_path: Path
) -> None:
    del index["1.0"], index["1.1"]
    with pytest.raises(SpecInvalid, match=r"quiet==1\.2: the test patch does not apply: test_quiet\.py: No such file"):
        fetched(tmp_path)
    with pytest.raises(SpecInvalid, match=r"expected a source release of quiet==9 .*; found none"):
        fetched(tmp_path / "other", "quiet==9")


def test_the_release_goes_by_the_name_of_the_rows_commit_for_git_and_for_grading(
    index: dict[str, tuple[str, bytes]], tmp_path: Path
) -> None:
    shell = unpacked(tmp_path, fetched(tmp_path))
    require_base(shell, SHA, "/testbed")
    lay_out_tests(shell, SHA, TESTS)
    assert "42" in shell.get("/testbed/test_quiet.py").decode()
    assert shell.run("git log --format=%H | wc -l", timeout_s=9).text().strip() == "1"
    assert not shell.run("ls quiet.egg-info", timeout_s=9).ok
    goal = TestsGoal(
        base_commit=SHA, test_command="c", judge=JudgeName.OWN, fail_to_pass=("a",), pass_to_pass=(), test_patch=TESTS
    )
    environment = EnvironmentSpec(image="i")
    task = AgentTask(name="t", description="d", environment=environment, goal=goal, solution=PatchSolution(patch=GOLD))
    assert not [one for one in scan(shell, needles_of(task)) if one.kind in ("gold", "commits")]
    with pytest.raises(Exception, match="the image does not belong to this row"):
        require_base(shell, "cd" * 20, "/testbed")


# --- Repositories ---------------------------------------------------------------------------------------------------


# --- What a row and a file say --------------------------------------------------------------------------------------


def row(judge: JudgeName = JudgeName.SWEBENCH_4) -> AgentTask:
    goal = TestsGoal(
        base_commit=SHA,
        test_command="c",
        judge=judge,
        fail_to_pass=("a",),
        pass_to_pass=(),
        row={"repo": "a/quiet"},
        log_parser="pytest",
    )
    return AgentTask(name="quiet-1", description="d", environment=EnvironmentSpec(image="made/by:rule"), goal=goal)


def answer(**changes: str) -> dict[str, str]:
    return {
        "python": "3.6", "packages": "requirements.txt\nnumpy==1.19", "requirements": "tests/r.txt", "pre_install": "",
        "install": "pip install .", **changes,
    }  # fmt: skip


def test_a_rows_recipe_is_its_harnesss_and_a_files_words_go_before() -> None:
    found = recipe.derived(row(), lambda *_: answer(), "", {})
    assert found == Recipe(
        image="made/by:rule", release="quiet", commit=SHA, python="3.6", packages=("numpy==1.19",),
        requirements=("tests/r.txt",), install=("pip install .",),
    )  # fmt: skip
    assert found.image_python == "3.9"
    said = {"python": "3.10", "packages": ["numpy"], "release": "other==2"}
    mine = recipe.derived(row(), lambda *_: answer(), "/ignored", said)
    assert (mine.release, mine.repository, mine.packages, mine.image_python) == ("other==2", "", ("numpy",), "3.11")
    assert recipe.derived(row(), lambda *_: answer(), "/there", {}).repository == "/there"


@pytest.mark.parametrize(
    ("judge", "changes", "why"),
    [
        (JudgeName.SWEBENCH_4, {"packages": "environment.yml"}, "a file of conda's"),
        (JudgeName.OWN, {}, "only rows of SWE-bench tell how to install"),
    ],
)
def test_what_no_harness_tells_is_refused(judge: JudgeName, changes: dict[str, str], why: str) -> None:
    with pytest.raises(SpecInvalid, match=why):
        recipe.derived(row(judge), lambda *_: answer(**changes), "", {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nonsense = 1", "field nonsense: expected no such key; found '1'"),
        ("python = 3", "field python: expected a text; found '3'"),
        ("commit = 'main'", "commit"),
        ("release = '--index-url=x'", "release"),
        ("= 1", "expected a recipe in TOML.*Invalid"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_by_its_field(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    with pytest.raises(SpecInvalid, match=f"(?s)recipe.toml: .*{why}"):
        recipe.read(file)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"image": "i"}, "one of `repository` and `release`"),
        ({"image": "i", "release": "a", "repository": "b", "commit": SHA}, "one of `repository` and `release`"),
        ({"image": "i", "repository": "b"}, "expected `commit`"),
        ({"release": "a==1"}, "expected `image`"),
    ],
)
def test_a_recipe_that_does_not_say_enough_is_refused(said: dict[str, str], why: str) -> None:
    with pytest.raises(SpecInvalid, match=why):
        Recipe.model_validate(said).checked()
