"""Rows in the ways of other languages: Multilingual, Multi-SWE-bench and -RL, Live, SWE-rebench V2, SWE-bench Pro."""

from __future__ import annotations

import json
from typing import Any

from tests.matrix.fixture import KINDS, Fixture, Kind, TaskRow, classic, named, without
from tests.matrix.repository import (
    FIXED,
    HIDDEN_TESTS,
    KEPT,
    SENTENCE,
    TEST_FILE,
    Image,
    Patches,
    Repository,
    git,
    prepared,
)
from tests.matrix.rows_python import EDITABLE, swebench_image

_PLAIN: dict[str, Any] = {"FAIL_TO_PASS": [FIXED], "PASS_TO_PASS": list(KEPT)}


def multilingual(patches: Patches) -> Fixture:
    names = {**named("redis__redis-900{}"), Kind.PECULIAR: "jqlang__jq-9003"}
    about = {Kind.PECULIAR: ("jqlang/jq", "2839")}
    return Fixture(
        dataset="swe-bench-multilingual",
        title="SWE-bench Multilingual",
        source="the dataset card SWE-bench/SWE-bench_Multilingual; swebench 4.1.0, harness/constants/c.py",
        peculiarity="compiled once the hidden tests are in place, and reported in the words of jq's `make check`",
        names=names,
        rows=tuple(
            classic(patches, kind, name, *about.get(kind, ("redis/redis", "10764")), **_PLAIN)
            for kind, name in names.items()
        ),
        images=(Image(tuple(swebench_image("swebench", name) for name in names.values())),),
    )


# What /home/fix-run.sh is in the images. Source: multi-swe-bench 1.1.2, harness/repos/c/jqlang/jq.py and
# harness/repos/rust/BurntSushi/ripgrep_2609_to_772.py.
_JQ_RUN = """#!/bin/bash
set -e

cd /home/jq
git apply --whitespace=nowarn /home/test.patch /home/fix.patch
autoreconf -i
./configure --with-oniguruma=builtin
make clean
make -j8
make check

"""
_RIPGREP_RUN = """#!/bin/bash
cd /home/ripgrep
if ! git -C /home/ripgrep apply --whitespace=nowarn  /home/test.patch /home/fix.patch; then
    echo "Error: git apply failed" >&2
    exit 1
fi
source "$HOME/.cargo/env" && cargo test --verbose --all

"""


def _run(passed: tuple[str, ...], failed: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "passed_count": len(passed), "failed_count": len(failed), "skipped_count": 0,
        "passed_tests": list(passed), "failed_tests": list(failed), "skipped_tests": [],
    }  # fmt: skip


def _multi_row(patches: Patches, kind: Kind, org: str, repo: str, number: int, **more: Any) -> TaskRow:
    """Source: multi-swe-bench 1.1.2, harness/dataset.py and pull_request.py."""
    fixed = {FIXED: {"run": "NONE", "test": "FAIL", "fix": "PASS"}}
    return {
        "org": org, "repo": repo, "number": number, "state": "closed", "title": "Count the last item", "body": None,
        "base": {"label": f"{org}:main", "ref": "main", "sha": patches.base},
        "resolved_issues": [{"number": number - 1, "title": "Wrong totals", "body": f"{SENTENCE}\nCorrect it."}],
        "fix_patch": patches.wrong if kind is Kind.WRONG else patches.right, "test_patch": patches.hidden,
        "run_result": _run(KEPT), "test_patch_result": _run(KEPT, (FIXED,)), "fix_patch_result": _run((*KEPT, FIXED)),
        "fixed_tests": fixed, "f2p_tests": fixed, "s2p_tests": {}, "n2p_tests": {},
        "p2p_tests": {name: {"run": "PASS", "test": "PASS", "fix": "PASS"} for name in KEPT},
        "instance_id": f"{org}__{repo}-{number}", **more,
    }  # fmt: skip


def _multi_image(name: str, place: str, script: str, patch: str = "") -> Image:
    more = {"home/fix-run.sh": script, "home/fix.patch": patch, "home/test.patch": patch}
    return Image((name,), place=place, more=more)


def multi_swe_bench(patches: Patches) -> Fixture:
    numbers = dict(zip(KINDS, (9011, 9012, 9013), strict=True))
    plain = "mswebench/jqlang_m_jq:pr-{}".format
    return Fixture(
        dataset="multi-swe-bench",
        title="Multi-SWE-bench",
        source="multi-swe-bench 1.1.2, harness/dataset.py; harness/repos/c/jqlang/jq.py",
        peculiarity="the image holds the answer in /home/fix.patch: what is graded must take its place, also nothing",
        names={kind: f"jqlang__jq-{number}" for kind, number in numbers.items()},
        rows=tuple(_multi_row(patches, kind, "jqlang", "jq", number, lang="c") for kind, number in numbers.items()),
        images=tuple(
            _multi_image(plain(number), "/home/jq", _JQ_RUN, patches.right if kind is Kind.PECULIAR else "")
            for kind, number in numbers.items()
        ),
    )


def multi_swe_rl(patches: Patches) -> Fixture:
    numbers = dict(zip(KINDS, (9021, 9022, 9023), strict=True))
    more = {"number_interval": "ripgrep_2609_to_772", "tag": "", "lang": "rust"}
    rows = [_multi_row(patches, kind, "jqlang", "jq", numbers[kind], lang="c") for kind in (Kind.RIGHT, Kind.WRONG)] + [
        _multi_row(patches, Kind.PECULIAR, "BurntSushi", "ripgrep", numbers[Kind.PECULIAR], **more)
    ]
    return Fixture(
        dataset="multi-swe-rl",
        title="Multi-SWE-RL",
        source="multi-swe-bench 1.1.2, harness/dataset.py; harness/repos/rust/BurntSushi/ripgrep_2609_to_772.py",
        peculiarity="`number_interval` names another class of the package: envagent's images, cargo's report",
        names=dict(zip(KINDS, (str(row["instance_id"]) for row in rows), strict=True)),
        rows=tuple(rows),
        images=(
            _multi_image("mswebench/jqlang_m_jq:pr-9021", "/home/jq", _JQ_RUN),
            _multi_image("mswebench/jqlang_m_jq:pr-9022", "/home/jq", _JQ_RUN),
            _multi_image("envagent/burntsushi_m_ripgrep:pr-9023", "/home/ripgrep", _RIPGREP_RUN),
        ),
    )


_PROGRAM = """import re

def parser(log: str) -> dict[str, str]:
    words = {"ok": "pass", "FAILED": "fail", "ignored": "skip"}
    return {name: words[word] for name, word in re.findall(r"^test (\\S+) \\.\\.\\. (\\w+)$", log, re.M)}
"""


def swe_bench_live(patches: Patches) -> Fixture:
    names = named("amoffat__sh-900{}")
    python = {"test_cmds": [f"pytest -rA {TEST_FILE}"], "log_parser": "pytest", "pull_number": "740"}
    rust = {
        **_PLAIN, "docker_image": "starryzhang/sweb.eval.x86_64.a_1776_b-743", "log_parser": _PROGRAM,
        "rebuild_cmds": ["mkdir -p build", "cp -r src/. build/"], "print_cmds": ["cat /tmp/report.txt"],
        "test_cmds": ["python3 tools/check.py cargo >/tmp/report.txt"],
    }  # fmt: skip
    image = {kind: swebench_image("starryzhang", name) for kind, name in names.items()}
    return Fixture(
        dataset="swe-bench-live",
        title="SWE-bench-Live",
        source="microsoft/SWE-bench-Live, evaluation/evaluation.py and curation/push_dataset/push_multilang.py",
        peculiarity="the row's own program reads the report, of what `print_cmds` print, after `rebuild_cmds`",
        names=names,
        rows=tuple(
            without(classic(patches, kind, name, "a/b", "1", **rust), "environment_setup_commit", "version")
            if kind is Kind.PECULIAR
            else classic(patches, kind, name, "amoffat/sh", "1", **python)
            for kind, name in names.items()
        ),
        images=(
            Image((image[Kind.RIGHT], image[Kind.WRONG]), imported_from=EDITABLE),
            Image((str(rust["docker_image"]),)),
        ),
    )


def swe_rebench_v2(patches: Patches) -> Fixture:
    names = named("example__shop-10{}")
    config = {"install": [], "log_parser": "parse_log_cargo", "log_parsers": None, "test_cmd": ["cargo test"]}
    image = "docker.io/swerebenchv2/example-shop:10-ad6bff3"
    commands = ["mkdir -p build", "cp -r src/. build/", "python3 tools/check.py cargo"]
    parts = {Kind.PECULIAR: {**config, "test_cmd": commands}}
    return Fixture(
        dataset="swe-rebench-v2",
        title="SWE-rebench V2",
        source="SWE-rebench/SWE-rebench-V2, scripts/eval.py and sample.json",
        peculiarity="several commands, one after the other, in /<repo>",
        names=names,
        rows=tuple(
            without(
                classic(
                    patches, kind, name, "example/shop", "1", **_PLAIN, pr_description="Count the last item",
                    language="rust", image_name=image, install_config=parts.get(kind, config),
                ),
                "environment_setup_commit", "version",
            )
            for kind, name in names.items()
        ),
        images=(Image((image,), place="/shop"),),
        in_table=False,
    )  # fmt: skip


def _later_tests(repository: Repository) -> str:
    """The hidden tests as a commit of their own, beside the base at which the image stands."""
    git(repository.folder, "checkout", "-q", "-b", "later")
    found = repository.commit("the tests", HIDDEN_TESTS)
    git(repository.folder, "checkout", "-q", "main")
    return found


_PRO_PARSER = """import json, re, sys
log = open(sys.argv[1]).read()
words = {"PASS": "PASSED", "FAIL": "FAILED"}
tests = [{"name": name, "status": words[word]} for word, name in re.findall(r"^(PASS|FAIL): (\\S+)$", log, re.M)]
json.dump({"tests": tests}, open(sys.argv[3], "w"))
"""


def swe_bench_pro(patches: Patches) -> Fixture:
    ids = {kind: f"instance_example__shop-{str(number) * 40}" for number, kind in enumerate(KINDS, 1)}
    later = prepared(_later_tests)
    run = "mkdir -p build && cp -r src/. build/\npython3 tools/check.py automake\n"
    own = {Kind.PECULIAR: f'[ "$1" = {TEST_FILE} ] || exit 1\n{run}'}
    scripts = {
        f"run_scripts/{name}/{file}": text
        for kind, name in ids.items()
        for file, text in (("run_script.sh", own.get(kind, run)), ("parser.py", _PRO_PARSER))
    }
    lay_out = f"git reset --hard {patches.base}\ngit clean -fd \ngit checkout {patches.base} \n"
    return Fixture(
        dataset="swe-bench-pro",
        title="SWE-bench Pro",
        source="the dataset card ScaleAI/SWE-bench_Pro; scaleapi/SWE-bench_Pro-os, swe_bench_pro_eval.py",
        peculiarity="scripts beside the rows, and only the last line of `before_repo_set_cmd`; its script takes files",
        names=ids,
        rows=tuple(
            {
                "instance_id": name, "repo": "example/shop", "base_commit": patches.base,
                "patch": patches.wrong if kind is Kind.WRONG else patches.right, "test_patch": patches.hidden,
                "problem_statement": SENTENCE, "requirements": "- Correct it.", "interface": "", "repo_language": "c",
                "fail_to_pass": str([FIXED]), "pass_to_pass": json.dumps(KEPT),
                "before_repo_set_cmd": f"{lay_out}git checkout {later} -- {TEST_FILE}",
                "selected_test_files_to_run": str([TEST_FILE]), "dockerhub_tag": "example.shop-matrix",
            }
            for kind, name in ids.items()
        ),
        files=scripts,
        images=(Image(("jefzda/sweap-images:example.shop-matrix",), place="/app", prepare=_later_tests),),
        in_table=False,
    )  # fmt: skip
