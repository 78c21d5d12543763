"""Reads one row by the rules of a dataset. What the grading libraries say of a few repositories stands here."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.artifacts.bundles import pack
from app.datasets.base import Reading, Row
from app.datasets.faults import FaultPlace
from app.datasets.rows import ADAPTERS
from app.errors import UnknownToLibrary
from app.models.spec import AgentTask, EnvironmentKind, JudgeName, TestsGoal

SHA = "a" * 40
TEST_PATCH = """diff --git a/tests/test_one.py b/tests/test_one.py
--- a/tests/test_one.py
+++ b/tests/test_one.py
@@ -1 +1 @@
-a
+b
diff --git a/tests/data.json b/tests/data.json
--- a/tests/data.json
+++ b/tests/data.json
@@ -1 +1 @@
-a
+b
"""
PATCH = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n"
CLASSIC: dict[str, Any] = {
    "repo": "django/django", "instance_id": "django__django-13251", "base_commit": SHA, "patch": PATCH,
    "test_patch": TEST_PATCH, "problem_statement": "It is broken.\u2028Mend it.", "hints_text": "",
    "created_at": "2020-07-28T11:59:53Z", "version": "3.2", "environment_setup_commit": "b" * 40,
    "FAIL_TO_PASS": '["test_a (queries.tests.One)"]', "PASS_TO_PASS": ["test_b (queries.tests.One)"],
}  # fmt: skip
"""Source: the dataset card of SWE-bench/SWE-bench_Verified: its columns, and the lists in both forms."""

# As swebench 4.1.0 answers for these rows.
_SWEBENCH_4: dict[tuple[str, str], dict[str, str]] = {
    ("django/django", "3.2"): {
        "environment": "source /opt/miniconda3/bin/activate\nconda activate testbed\ncd /testbed\n"
        "sed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen\nexport LANG=en_US.UTF-8\n"
        "export LANGUAGE=en_US:en\nexport LC_ALL=en_US.UTF-8",
        "install": "python -m pip install -e .", "build": "",
        "test_command": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 test_one",
        "parser": "parse_log_django",
    },
    ("redis/redis", "10764"): {
        "environment": "cd /testbed", "install": "", "build": "make distclean\nmake",
        "test_command": 'TERM=dumb ./runtest --durable --single unit/type/zset --only "BZMPOP"',
        "parser": "parse_log_redis",
    },
}  # fmt: skip
_SWEBENCH_5 = {"parse_log_pytest", "parse_log_pytest_v2", "parse_log_cargo", "parse_log_gotest", "parse_log_jq"}
_SWESMITH = {
    "swesmith/oauthlib__oauthlib.1fd52536": {
        "test_command": "source /opt/miniconda3/bin/activate; conda activate testbed; pytest --verbose",
        "test_files": ["tests/test_tokens.py"],
        "parser": "Oauthlib1fd52536",
    }
}
# As multi-swe-bench 1.1.2 has them: harness/repos/rust/BurntSushi; a numbered one is of another class of images.
_MULTI = {
    "": {
        "test_command": "bash /home/fix-run.sh", "parser": "Ripgrep", "image": "mswebench/burntsushi_m_ripgrep:pr-2209",
    },
    "ripgrep_2209_to_1000": {
        "test_command": "bash /home/fix-run.sh", "parser": "Numbered", "image": "envagent/burntsushi_m_ripgrep:pr-2209",
    },
}  # fmt: skip


def library(judge: JudgeName, row: Mapping[str, Any]) -> dict[str, Any]:
    """What the real ones answer, for the rows of these tests."""
    known: Mapping[Any, dict[str, Any]] = {
        JudgeName.SWEBENCH_4: _SWEBENCH_4,
        JudgeName.SWEBENCH_5: {
            name: {"parser": name, "test_command": f"{row.get('eval_script')}# its exit code"} for name in _SWEBENCH_5
        },
        JudgeName.SWESMITH: _SWESMITH,
        JudgeName.MULTI_SWE_BENCH: _MULTI,
    }[judge]
    key = {
        JudgeName.SWEBENCH_4: lambda: (row["repo"], row["version"]),
        JudgeName.SWEBENCH_5: lambda: row["log_parser"],
        JudgeName.SWESMITH: lambda: row["repo"],
        JudgeName.MULTI_SWE_BENCH: lambda: row.get("number_interval", "") if row["org"] == "BurntSushi" else row["org"],
    }[judge]()
    if key not in known:
        field = "version" if judge is JudgeName.SWEBENCH_4 and row["repo"] in {repo for repo, _ in known} else ""
        raise UnknownToLibrary(f"unknown to {judge.value}: {key!r}", field)
    return known[key]


def read(
    dataset: str,
    row: Mapping[str, Any],
    folder: Path | None = None,
    kind: EnvironmentKind = EnvironmentKind.DOCKER,
    *,
    strict: bool = False,
) -> AgentTask:
    """By the rules that stand under that name."""
    reading = Reading(pack=lambda one: pack(one)[0], kind=kind, describe=library, strict=strict)
    return ADAPTERS[dataset].task(Row(row, FaultPlace("rows.jsonl, row 1"), dataset, folder), reading)


def goal_of(task: AgentTask) -> TestsGoal:
    assert isinstance(task.goal, TestsGoal)
    return task.goal


def without(row: Mapping[str, Any], *columns: str, **changes: Any) -> dict[str, Any]:
    return {column: value for column, value in {**row, **changes}.items() if column not in columns}


def bash(command: str, folder: Path, *, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command as the environment does: by bash, in the working folder."""
    return subprocess.run(["bash", "-c", command], cwd=folder, input=stdin, capture_output=True, text=True, check=False)
