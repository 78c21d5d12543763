"""`megaflow dataset list | show | lint`, and the options of `submit` that choose tasks."""

from __future__ import annotations

import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from app.cli import cli
from app.cli.submission_options import joined
from app.cli.tables import SafeConsole
from app.datasets.catalogue import CATALOGUE
from app.datasets.selection import Selection
from app.errors import SpecInvalid
from app.evaluation import Submission, prepare
from app.settings import Settings
from tests.unit.dataset_adapters import write
from tests.unit.row_reading import PATCH

ROW: dict[str, Any] = {
    "instance_id": "a__b-1", "repo": "a/b", "base_commit": "c" * 40, "problem_statement": "p", "patch": PATCH,
    "test_patch": "", "FAIL_TO_PASS": ["t.py::t"], "PASS_TO_PASS": [], "test_cmd": "pytest -rA", "log_parser": "pytest",
    "image": "example.org/image:1", "created_at": "2024-05-01", "language": "python",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAFLOW_HOME", str(tmp_path / "home"))


def run(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(cli, ["dataset", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def rows(tmp_path: Path, *changes: dict[str, Any], name: str = "mine.jsonl") -> Path:
    return write(tmp_path / name, [{**ROW, "instance_id": f"a__b-{n}", **one} for n, one in enumerate(changes)])


def test_the_list_has_every_known_dataset_with_its_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {one["name"]: one for one in json.loads(run("list", "--json").stdout)}
    assert set(found) == set(CATALOGUE)
    assert found["swe-bench-verified"]["from"] == "SWE-bench/SWE-bench_Verified"
    assert found["terminal-bench-2"]["from"].startswith("https://")
    lines = run("list").stdout.splitlines()
    assert lines[0].split("\t")[:3] == ["dataset", "tasks", "from"]
    assert len(lines) == 1 + len(CATALOGUE)
    console = SafeConsole(file=(out := io.StringIO()), width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr("app.cli.dataset.console", console)
    run("list")
    assert all(one.hub_id is None or one.hub_id in out.getvalue() for one in CATALOGUE.values()), "they are whole"
    assert all(len(line) <= 80 for line in out.getvalue().splitlines())


def test_show_tells_what_a_dataset_holds_on_eighty_columns(tmp_path: Path) -> None:
    file = rows(tmp_path, {}, {"repo": "a/c"}, {"repo": "a/c", "created_at": "2024-07-01"})
    found = json.loads(run("show", f"own={file}", "--json").stdout)
    assert (found["name"], found["adapter"], found["tasks"]) == ("mine", "own", 3)
    assert found["repositories"] == {"a/c": 2, "a/b": 1}
    assert found["first"] == ["a__b-0", "a__b-1", "a__b-2"]
    assert set(found["columns"]) == set(ROW)
    assert re.fullmatch("[0-9a-f]{64}", found["content_hash"])
    said = run("show", f"own={file}").stdout
    assert "2024-05-01 to 2024-07-01" in said
    assert all(len(line) <= 80 for line in said.splitlines() if str(tmp_path) not in line)


def test_lint_names_every_fault_with_row_and_field(tmp_path: Path) -> None:
    bad = [{"base_commit": 7}, {"instance_id": None}, {"problem_statement": ""}, {"patch": ""}, {"base_commit": "main"}]
    file = rows(tmp_path, {}, *bad)
    found = json.loads(run("lint", f"own={file}", "--json", code=65).stdout)
    assert sorted((one["where"].split(" (")[0], one["field"]) for one in found["faults"]) == [
        (f"{file}, row 2", "base_commit"),
        (f"{file}, row 3", "instance_id"),
        (f"{file}, row 4", "problem_statement"),
        (f"{file}, row 5", "patch"),
        (f"{file}, row 6", "base_commit"),
    ]
    said = run("lint", f"own={file}", code=65).output
    assert "expected a text that is not empty; found 7" in said
    assert "5 faults" in said


def test_lint_names_what_a_readable_row_contradicts_itself_in(tmp_path: Path) -> None:
    both = {"FAIL_TO_PASS": ["t.py::a"], "PASS_TO_PASS": ["t.py::a", "t.py::b"]}
    other = {"instance_id": "django__django-7", "repo": "a/c"}
    file = rows(tmp_path, {}, both, other, {"patch": "hello"})
    found = json.loads(run("lint", f"own={file}", "--json", code=65).stdout)
    assert found["tasks"] == 1
    assert [(one["field"], one["message"].partition("expected ")[2]) for one in found["faults"]] == [
        ("FAIL_TO_PASS", "each test in this list or in PASS_TO_PASS; found ['t.py::a']; in both: 't.py::a'"),
        ("repo", "the repository that the id 'django__django-7' names; found 'a/c'"),
        ("patch", "a diff, with `diff --git a/… b/…` or `--- ` and `+++ ` at the beginning of lines; found 'hello'"),
    ]


SIGNED = f"{PATCH}-- \n2.39.5\n\n"
TWICE = PATCH + PATCH.replace("x.py", "y.py").replace("diff --git a/y.py b/y.py\n", "")
OF_CRLF = PATCH.replace("-a\n+b\n", "-a\r\n+b\r\n\\ No newline at end of file\n")
HUNK = "@@ -1 +1 @@"


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"test_patch": PATCH}, "test_patch", "another patch than that in patch; found 'diff --git a/x.py"),
        ({"FAIL_TO_PASS": ["t", "u", "t"]}, "FAIL_TO_PASS", "each test once; found 't'; it is there twice"),
        ({"PASS_TO_PASS": ["u", "u"]}, "PASS_TO_PASS", "each test once; found 'u'; it is there twice"),
        (
            {"FAIL_TO_PASS": [], "PASS_TO_PASS": ["t"]},
            "FAIL_TO_PASS",
            "at least one test; found []; who changes nothing would pass",
        ),
        (
            {"instance_id": "A__b-0"},
            "instance_id",
            "an id that differs from 'a__b-0' by more than upper and lower case",
        ),
        ({"patch": PATCH.replace(HUNK, "@@ -1,2 +1,2 @@")}, "patch", "line 7: the hunk has fewer lines than it says"),
        ({"patch": PATCH.replace(HUNK, "@@ -1,2 +1 @@") + SIGNED}, "patch", "line 7: the hunk has fewer lines"),
        ({"patch": PATCH.replace(HUNK, "@@ -1 +0,0 @@")}, "patch", "line 6: the hunk has more lines than it says"),
        ({"patch": PATCH.replace(HUNK, "@@ -0,0 +1 @@")}, "patch", "line 5: the hunk has other lines than it says"),
        ({"patch": f"{PATCH} c\n"}, "patch", "found ' c'; line 7: the hunk has more lines than it says"),
        ({"patch": PATCH.replace("\n", "\r\n")}, "patch", "line 1: its lines end with CR LF"),
    ],
)
def test_lint_names_what_would_be_graded_wrongly(tmp_path: Path, change: dict[str, Any], field: str, said: str) -> None:
    file = rows(tmp_path, {}, change)
    found = json.loads(run("lint", f"own={file}", "--json", code=65).stdout)
    assert (found["tasks"], [one["field"] for one in found["faults"]]) == (1, [field])
    assert said in found["faults"][0]["message"]
    assert len(prepare(submission(f"own={file}"), Settings(home=tmp_path / "home")).specs) == 2


@pytest.mark.parametrize("patch", [SIGNED, TWICE, OF_CRLF, PATCH + PATCH.replace("x.py", "z.py"), f"{PATCH}\n"])
def test_lint_takes_the_patches_that_git_takes(tmp_path: Path, patch: str) -> None:
    assert json.loads(run("lint", f"own={rows(tmp_path, {'patch': patch})}", "--json").stdout)["faults"] == []
    applied = subprocess.run(
        ["git", "apply", "--numstat", "-"], input=patch, text=True, capture_output=True, check=False
    )
    assert applied.returncode == 0, applied.stderr


# --- Submissions ----------------------------------------------------------------------------------------------------


def submission(dataset: str, **asked: Any) -> Submission:
    return Submission(dataset=dataset, agent="nop", selection=Selection(**asked))


def test_what_is_submitted_says_where_it_is_from(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    one = rows(tmp_path, {}, {}, {"language": "go"})
    two = rows(tmp_path, {}, name="two.jsonl")
    prepared = prepare(submission(f"own={one},own={two}", languages=("python",), sample=2), settings)
    assert len(prepared.specs) == prepared.provenance["chosen"] == 2
    assert prepared.provenance["tasks"] == 4
    assert prepared.provenance["selection"] == {"languages": ["python"], "sample": 2, "sample_seed": 0}
    told = prepared.provenance["datasets"]
    assert [(of["name"], of["argument"], of["tasks"], of["revision"]) for of in told] == [
        ("mine", f"own={one}", 3, None),
        ("two", f"own={two}", 1, None),
    ]
    assert told[0]["content_hash"] != told[1]["content_hash"]
    json.dumps(prepared.provenance)


def test_a_selection_by_pass_rate_asks_for_a_ledger(tmp_path: Path) -> None:
    asked = submission(f"own={rows(tmp_path, {})}", pass_rate="0<p<1", pass_rate_from="r")
    with pytest.raises(SpecInvalid, match="expected a ledger to read the pass rates of run 'r'"):
        prepare(asked, Settings(home=tmp_path / "home"))


def test_several_datasets_are_one_argument_unless_a_path_has_a_comma(tmp_path: Path) -> None:
    assert joined(["a", "b"]) == "a,b"
    file = rows(tmp_path, {}, name="a,b.jsonl")
    assert joined([str(file)]) == str(file)
    with pytest.raises(SpecInvalid, match="without a comma in a path"):
        joined([str(file), "demo"])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--pass-rate", "0<p<1"), "together with the run"),
        (("--pass-rate", "high", "--from", "r"), "such as '0<p<1'"),
        (("--since", "2024-02-01", "--until", "2024-01-01"), "expected an end after 2024-02-01"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(SpecInvalid, match=complaint):
        CliRunner().invoke(cli, ["submit", "demo", "-a", "nop", *options], catch_exceptions=False)


def test_a_run_file_may_name_several_datasets_and_dates(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("dataset: [swe-gym, no-such-name]\nagent: nop\nsince: 2024-05-31\nuntil: 2024-01-01\nsample: 5\n")
    with pytest.raises(SpecInvalid, match="expected an end after 2024-05-31"):
        CliRunner().invoke(cli, ["submit", "-c", str(file), "--dry-run"], catch_exceptions=False)


def test_a_key_twice_in_one_row_is_a_fault(tmp_path: Path) -> None:
    file = rows(tmp_path, {})
    file.write_text(file.read_text().replace('"repo"', '"repo": "x/y", "repo"'))
    assert "expected JSON; found the key 'repo' twice in one object" in run("lint", f"own={file}", code=65).output
