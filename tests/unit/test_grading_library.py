"""The resident processes of grading libraries: real ones, which serve a small script in place of a library."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from app.errors import AgentUnavailable, GradingFailed, UnknownToLibrary
from app.grading.judges import judge
from app.grading.libraries import LIBRARIES, LibraryFiles
from app.grading.resident_libraries import GradingLibraries
from app.models.outcome import TestStatus
from app.models.spec import JudgeName, TestsGoal
from tests.waiting import eventually

SCRIPT = """
import os, re, socket, subprocess, time
from resident import RowUnknown, as_file

NAME = "pytest"

def describe(row):
    print("nobody reads this")
    match row.get("ask"):
        case "environment":
            return {"variables": sorted(os.environ), "home": os.path.expanduser("~"), "pid": os.getpid()}
        case "slowly":
            time.sleep(0.1)
            return {"pid": os.getpid()}
        case "network": socket.create_connection(("127.0.0.1", 9), timeout=1)
        case "program": subprocess.run(["true"])
        case "unknown": raise RowUnknown("no such repository 'x/y' (`repo`)", "repo")
        case "wrong": return ["no", "dict"]
    raise KeyError("repo")

def judge(goal, log, exit_code):
    match log:
        case "hang": time.sleep(60)
        case "loop": re.match(r"(a+)+$", "a" * 60 + "b")
        case "exit": os._exit(3)
        case "kill": os.kill(os.getpid(), 9)
        case "fill": return {"resolved": len(bytearray(3 << 30)) > 0, "statuses": {}}
        case "rubbish": return {"resolved": 1, "statuses": {}}
        case "odd": return {"resolved": True, "statuses": {"a": "SPLENDID"}}
    with as_file(log) as path, open(path) as file:
        found = dict(line.split() for line in file if len(line.split()) == 2)
    return {"resolved": exit_code == 0, "statuses": found}
"""
ASKED = JudgeName.SWESMITH


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GradingLibraries]:
    script = tmp_path / "judge.py"
    script.write_text(SCRIPT)
    monkeypatch.setitem(LIBRARIES, ASKED, LibraryFiles("grading-test", tmp_path / "lock", script))
    monkeypatch.setenv("MEGAFLOW_SECRET", "x")
    made = GradingLibraries(lambda name, lock: Path(sys.executable), request_s=6.0, cpu_s=2.0, memory_bytes=1 << 30)
    yield made
    made.close()


def goal(**changes: object) -> TestsGoal:
    fields = {"judge": ASKED, "fail_to_pass": ("a",), "pass_to_pass": ("b",), **changes}
    return TestsGoal.model_validate({"base_commit": "HEAD", "test_command": "c", **fields})


def pid(libraries: GradingLibraries) -> int:
    return int(libraries.describe(ASKED, {"ask": "environment"})["pid"])


def test_what_a_library_says_of_a_log_is_the_verdict_and_it_is_named_with_its_version(
    libraries: GradingLibraries,
) -> None:
    found = judge(goal(), "a PASSED\nb XFAIL\nc FAILED\n", 0, libraries)
    assert found.statuses == {"a": TestStatus.PASSED, "b": TestStatus.PASSED}
    assert found.resolved
    assert found.grader == f"pytest {pytest.__version__}"
    assert judge(goal(), "a ERROR\n", 1, libraries).statuses == {"a": TestStatus.ERROR, "b": TestStatus.MISSING}


def test_one_process_serves_all_requests_with_no_variable_and_no_home_of_ours(libraries: GradingLibraries) -> None:
    told = libraries.describe(ASKED, {"ask": "environment"})
    assert set(told["variables"]) <= {"HOME", "LANG", "LC_CTYPE", "PATH", "PYTHON_DOTENV_DISABLED"}
    assert told["home"] == "/nonexistent"
    judge(goal(), "", 0, libraries)
    assert pid(libraries) == told["pid"]


def test_a_library_reaches_no_network_and_starts_no_program(libraries: GradingLibraries) -> None:
    for ask in ("network", "program"):
        with pytest.raises(GradingFailed, match="PermissionError: a grading library may not do this"):
            libraries.describe(ASKED, {"ask": ask})


def test_a_row_that_a_library_does_not_know_is_refused_by_name(libraries: GradingLibraries) -> None:
    with pytest.raises(UnknownToLibrary, match=r"no such repository 'x/y' \(`repo`\)") as refused:
        libraries.describe(ASKED, {"ask": "unknown"})
    assert refused.value.column == "repo"


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("hang", "found no answer within 6 s"),
        ("loop", r"no answer within 6 s|killed by SIGXCPU"),
        ("exit", "exit code 3"),
        ("kill", "killed by SIGKILL"),
        ("fill", "MemoryError"),
        ("rubbish", "expected a verdict and statuses of pytest"),
        ("odd", "found ..SPLENDID"),
    ],
)
def test_a_log_that_breaks_a_library_fails_alone(libraries: GradingLibraries, log: str, why: str) -> None:
    with pytest.raises(GradingFailed, match=why):
        judge(goal(), log, 0, libraries)
    assert judge(goal(), "a PASSED\nb PASSED", 0, libraries).resolved


def test_a_library_that_was_killed_meanwhile_is_started_again(libraries: GradingLibraries) -> None:
    first = pid(libraries)
    os.kill(first, signal.SIGKILL)
    # It can be waited for only as a zombie: its command line is empty a moment earlier.
    eventually(lambda: Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[0] == "Z", "it has ended")
    assert pid(libraries) != first


def test_many_threads_share_one_process_and_get_their_own_answers(libraries: GradingLibraries) -> None:
    found: dict[int, dict[str, TestStatus]] = {}

    def ask(number: int) -> None:
        word = ("PASSED", "FAILED", "SKIPPED")[number % 3]
        found[number] = judge(goal(), f"a {word}\n" + "x" * 300_000, 0, libraries).statuses

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number]["a"].value for number in range(12)] == ["passed", "failed", "skipped"] * 4


def test_requests_at_once_spread_over_the_processes_that_there_may_be(
    tmp_path: Path, libraries: GradingLibraries
) -> None:
    with closing(GradingLibraries(lambda name, lock: Path(sys.executable), most_processes=2)) as several:
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(several.describe, ASKED, {"ask": "slowly"}) for _ in range(8)]
        pids = [one.result()["pid"] for one in asked]
        assert len(set(pids)) == 2
        assert len({pid(several) for _ in range(3)}) == 1


def pid_in_a_child(libraries: GradingLibraries, *, closed: bool) -> int:
    """Of the library's process that a forked child has, which then ends; not closed: as if it was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(pid(libraries)).encode())
        if closed:
            libraries.close()
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as told:
        return int(told.read())


def test_a_forked_child_has_a_process_of_its_own_and_leaves_its_parents_alone(libraries: GradingLibraries) -> None:
    before = pid(libraries)
    assert pid_in_a_child(libraries, closed=True) != before
    assert pid(libraries) == before


def test_a_process_ends_with_the_one_that_asked(libraries: GradingLibraries) -> None:
    left = pid_in_a_child(libraries, closed=False)
    eventually(
        lambda: not Path(f"/proc/{left}").exists() or not Path(f"/proc/{left}/cmdline").read_bytes(), "it has ended"
    )


def test_a_library_that_cannot_be_installed_or_imported_is_the_graders_failure(
    libraries: GradingLibraries, tmp_path: Path
) -> None:
    def unreachable(name: str, lock: Path) -> Path:
        raise AgentUnavailable(f"{name}: no index")

    with pytest.raises(GradingFailed, match=r"expected the grading library swesmith on this host; .* no index"):
        GradingLibraries(unreachable).describe(ASKED, {})
    (tmp_path / "judge.py").write_text("import no_such_library")
    with pytest.raises(GradingFailed, match="cannot be imported: ModuleNotFoundError"):
        libraries.describe(ASKED, {})
    with pytest.raises(GradingFailed, match="expected the grading library swesmith to be at hand"):
        judge(goal(), "", 0, None)
