"""Is every demo task real? Built, broken, solved by its gold answer and by its script, judged by its own tests.

Nothing of MegaFlow's worker is used: this holds the dataset against plain `docker` commands.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.datasets.demo.swebench import recipe
from app.images.build_sources import fetch_sources
from tests.often import params

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "app" / "datasets" / "demo"
BASE_FOLDER = ROOT / "worker_images" / "base"
BASE_IMAGE = "megaflow/base:bookworm"
ROWS = {row["instance_id"]: row for row in map(json.loads, (DEMO / "swebench" / "rows.jsonl").read_text().splitlines())}


def docker(*arguments: str, given: str | None = None, check: bool = True) -> str:
    done = subprocess.run(
        ["docker", *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "DOCKER_BUILDKIT": "0"},
    )
    assert not check or done.returncode == 0, (
        f"docker {' '.join(arguments)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    )
    return done.stdout


class Box:
    """A running container; every command gets a shell of its own, like an agent's."""

    def __init__(self, identity: str) -> None:
        self.identity = identity

    def run(self, command: str, *, given: str | None = None, check: bool = True) -> str:
        return docker("exec", "-i", self.identity, "bash", "-c", command, given=given, check=check)


@contextmanager
def box(image: str) -> Iterator[Box]:
    identity = docker(
        "run", "-d", "--rm", "--init", "--network", "none", "--label", "megaflow=test", image, "sleep", "600"
    ).strip()
    try:
        yield Box(identity)
    finally:
        docker("kill", identity)


@pytest.fixture(scope="session")
def images(base_image_tag: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Every row's image, built without a network, by its name."""
    scratch = tmp_path_factory.mktemp("contexts")
    contexts = {name: DEMO / "swebench" / row["build_context"] for name, row in ROWS.items()}

    def build(name: str) -> str:
        copy, tag = scratch / name, f"megaflow/demo-test:{name}"
        shutil.copytree(contexts[name], copy)
        fetch_sources(copy)
        arguments = [
            "--build-arg",
            f"BASE_IMAGE={base_image_tag}",
            "--label",
            "megaflow=test",
            "--force-rm",
            "--tag",
            tag,
        ]
        docker("build", "--network", "none", *arguments, str(copy))
        return tag

    with ThreadPoolExecutor(max_workers=4) as pool:
        built = dict(zip(contexts, pool.map(build, contexts), strict=True))
    yield built
    docker("rmi", *built.values())


def script_of(name: str) -> list[dict[str, Any]]:
    turns = yaml.safe_load((DEMO / "replay" / f"{name}.yaml").read_text())["turns"]
    return [turn for turn in turns if "command" in turn]


def statuses(report: str) -> dict[str, str]:
    found = re.findall(r"^(PASSED|FAILED|ERROR|XFAIL) (\S+)", report, flags=re.MULTILINE)
    return {name: status for status, name in found}


def resolved(row: dict[str, Any], measured: dict[str, str]) -> bool:
    return all(measured.get(name) in {"PASSED", "XFAIL"} for name in row["FAIL_TO_PASS"] + row["PASS_TO_PASS"])


@pytest.mark.docker
@pytest.mark.parametrize("name", params(ROWS, ["more-itertools__more-itertools-1"]))
def test_a_script_solves_its_row_in_a_clean_checkout(name: str, images: dict[str, str]) -> None:
    row = ROWS[name]
    with box(images[name]) as container:
        for turn in script_of(name):
            container.run(turn["command"], check=False)
        patch = container.run(f"git add --all && git diff --cached --binary {row['base_commit']}")
    with box(images[name]) as judge:
        judge.run("git apply -", given=patch)
        judge.run("git apply -", given=row["test_patch"])
        measured = statuses(judge.run(row["test_cmd"], check=False))
    assert re.findall(r"^diff --git a/(\S+)", patch, re.M) == re.findall(r"^diff --git a/(\S+)", row["patch"], re.M)
    assert resolved(row, measured)


@pytest.mark.docker
@pytest.mark.parametrize("name", ROWS)
def test_an_image_holds_the_planted_commit_and_no_way_to_the_answer(name: str, images: dict[str, str]) -> None:
    row = ROWS[name]
    with box(images[name]) as container:
        assert container.run("pwd; git rev-parse HEAD; git status --porcelain") == f"/testbed\n{row['base_commit']}\n"
        assert container.run("git fsck --no-reflogs --unreachable --no-progress; git rev-list --count --all") == "1\n"
        assert container.run("find / -xdev -name '*.patch' -o -xdev -name sources.txt -o -xdev -path /build") == ""
        assert container.run("grep -rlF bug.patch /testbed --include='*' || true") == ""


@pytest.mark.docker
@pytest.mark.parametrize("name", ROWS)
def test_an_image_has_no_other_copy_of_the_library(name: str, images: dict[str, str]) -> None:
    (file,) = re.findall(r"^diff --git a/(\S+)", ROWS[name]["patch"], re.M)
    package = file.removeprefix("src/").partition("/")[0]
    names = f"-iname '{package}*' -o -iname '{package.replace('_', '-')}*' -o -name '*.whl'"
    with box(images[name]) as container:
        assert container.run(f"find / -xdev -path /testbed -prune -o \\( {names} \\) -print") == ""


@pytest.mark.docker
def test_the_base_has_every_package_of_the_list_and_its_label(base_image_tag: str) -> None:
    listed = [line for line in (BASE_FOLDER / "packages.txt").read_text().splitlines() if line and line[0] != "#"]
    with box(base_image_tag) as container:
        shown = container.run(
            f"dpkg-query --show --showformat '${{Package}} ${{db:Status-Status}}\\n' {' '.join(listed)}"
        )
    assert sorted(shown.splitlines()) == sorted(f"{package} installed" for package in listed)
    assert docker("image", "inspect", "--format", '{{index .Config.Labels "megaflow.base"}}', base_image_tag).strip()


def test_the_base_script_says_what_to_do_without_an_engine() -> None:
    done = subprocess.run(
        ["sh", str(BASE_FOLDER / "build-from-packages.sh"), "megaflow/never:built"],
        env={**os.environ, "DOCKER_HOST": "unix:///nonexistent/docker.sock"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 69
    assert "no container engine answers" in done.stderr
    assert "try: " in done.stderr


@pytest.mark.extra
def test_the_rows_are_what_the_recipe_measures_on_this_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = os.umask(0o077)  # base_commit must not depend on it
    try:
        code = recipe.main(["--check", "--cache", str(tmp_path)])
    finally:
        os.umask(before)
    assert code == 0, capsys.readouterr().err
