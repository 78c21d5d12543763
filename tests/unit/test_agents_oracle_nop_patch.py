"""The two agents without a model, and the patch that is taken after any of them. Real git."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from app.agents import Agent, FrameworkOptions, patch
from app.agents import agent_named as named
from app.agents.catalogue import AGENTS
from app.agents.installation import Installer
from app.agents.patch import head_commit, take_patch
from app.errors import AgentFailed, RowBroken, UnknownName
from app.models.endings import PERMANENT, EndReason, reason_of
from app.models.spec import Bundle, Limits, PatchSolution, ScriptSolution
from megaflow.contract.agents.trial import NeverCancelled
from megaflow.contract.environments.fixture import tar_of
from tests.unit.folder_shell import FolderShell, committed, git
from tests.unit.frameworks import a_job

ANSWER = "--- a/value.py\n+++ b/value.py\n@@ -1 +1 @@\n-value = 1\n+value = 2"  # without its last newline, as in rows


def agent_named(name: str) -> Agent:
    return named(name, FrameworkOptions(Installer(Path("/nowhere"))))  # neither of the two needs tools


@pytest.fixture
def shell(tmp_path: Path) -> FolderShell:
    shell = FolderShell(tmp_path / "environment")
    committed(shell.path("/testbed"), {"value.py": "value = 1\n"})
    return shell


def script(command: str = 'bash "${SOLUTION_DIR:-/solution}/solve.sh"') -> ScriptSolution:
    return ScriptSolution(files=Bundle(sha256="0" * 64, size_bytes=1), command=command)


def test_the_oracle_applies_a_gold_patch(shell: FolderShell, tmp_path: Path) -> None:
    report = agent_named("oracle").run(a_job(tmp_path, solution=PatchSolution(patch=ANSWER)), shell, NeverCancelled())
    assert report.end_reason is EndReason.SUBMITTED
    assert shell.get("/testbed/value.py") == b"value = 2\n"
    assert report.log
    assert "Applied patch value.py cleanly" in report.log.read_text()


def test_the_oracle_applies_a_gold_patch_in_a_folder_without_a_repository_of_its_own(tmp_path: Path) -> None:
    committed(tmp_path / "outer", {"x": "x\n"})  # git would take the working folder for a part of it, and do nothing
    shell = FolderShell(tmp_path / "outer" / "environment")
    shell.put("/testbed/value.py", b"value = 1\n")
    report = agent_named("oracle").run(a_job(tmp_path, solution=PatchSolution(patch=ANSWER)), shell, NeverCancelled())
    assert report.end_reason is EndReason.SUBMITTED
    assert shell.get("/testbed/value.py") == b"value = 2\n"


def test_a_gold_patch_that_does_not_apply_is_a_broken_row_with_gits_words(shell: FolderShell, tmp_path: Path) -> None:
    shell.put("/testbed/value.py", b"something else\n")
    with pytest.raises(RowBroken, match="patch does not apply"):
        agent_named("oracle").run(a_job(tmp_path, solution=PatchSolution(patch=ANSWER)), shell, NeverCancelled())
    assert reason_of(RowBroken()) is EndReason.INVALID_SPEC, "not scored"
    assert issubclass(RowBroken, PERMANENT), "nor tried again"


def test_the_oracle_runs_a_gold_script_in_the_working_folder(shell: FolderShell, tmp_path: Path) -> None:
    files = tar_of({"solve.sh": b"echo 'value = 3' > value.py\n"})
    report = agent_named("oracle").run(
        a_job(tmp_path, solution=script(), solution_files=files), shell, NeverCancelled()
    )
    assert report.end_reason is EndReason.SUBMITTED
    assert shell.get("/testbed/value.py") == b"value = 3\n"


def test_a_gold_script_that_never_ends_is_stopped_at_the_agents_time_limit(shell: FolderShell, tmp_path: Path) -> None:
    files = tar_of({"solve.sh": b"echo begun; sleep 60\n"})
    limited = a_job(tmp_path, solution=script(), solution_files=files, limits=Limits(agent_timeout_s=0.5))
    report = agent_named("oracle").run(limited, shell, NeverCancelled())
    assert report.end_reason is EndReason.AGENT_TIMEOUT
    assert "begun" in report.detail


def test_the_oracle_without_an_answer_fails_instead_of_submitting(shell: FolderShell, tmp_path: Path) -> None:
    with pytest.raises(AgentFailed, match="expected a task with a solution"):
        agent_named("oracle").run(a_job(tmp_path), shell, NeverCancelled())


def test_nop_submits_and_leaves_everything_as_it_was(shell: FolderShell, tmp_path: Path) -> None:
    report = agent_named("nop").run(a_job(tmp_path), shell, NeverCancelled())
    assert report.end_reason is EndReason.SUBMITTED
    assert take_patch(shell, "/testbed", None) == b""


def test_an_unknown_agent_is_named_beside_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=f"unknown agent 'opendevin'; known: {', '.join(sorted(AGENTS))}"):
        agent_named("opendevin")
    ours, frameworks = (
        {"oracle", "nop", "cheat", "replay"},
        {"mini-swe-agent", "claude-code", "qwen-code", "openhands", "swe-agent"},
    )
    assert set(AGENTS) == ours | frameworks


def test_a_patch_holds_changed_new_binary_deleted_and_committed_files(shell: FolderShell, tmp_path: Path) -> None:
    work = shell.path("/testbed")
    (work / "gone.txt").write_text("here\n")
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", "more")
    base = head_commit(shell, "/testbed")
    (work / "value.py").write_text("value = 2\n")
    git(work, "commit", "-q", "-a", "-m", "the agent commits")
    (work / "new file é.txt").write_text("new\n")
    (work / "image.bin").write_bytes(bytes(range(256)) * 50)
    (work / "gone.txt").unlink()
    taken = take_patch(shell, "/testbed", base)

    clean = FolderShell(tmp_path / "clean")
    git(tmp_path, "clone", "-q", str(work), str(tmp_path / "clone"))
    git(tmp_path / "clone", "checkout", "-q", str(base))
    clean.workdir = "/../clone"
    assert taken
    assert clean.run("git apply -", timeout_s=30, stdin=taken).ok
    clone = tmp_path / "clone"
    assert (clone / "value.py").read_text() == "value = 2\n"
    assert (clone / "new file é.txt").read_text() == "new\n"
    assert (clone / "image.bin").read_bytes() == bytes(range(256)) * 50
    assert not (clone / "gone.txt").exists()


def test_a_patch_leaves_out_what_running_tests_leaves_behind(shell: FolderShell) -> None:
    for name in ("__pycache__/a.pyc", "package/__pycache__/b.txt", ".pytest_cache/c", "d.pyc", "kept.py"):
        shell.put(f"/testbed/{name}", b"x\n")
    git(shell.path("/testbed"), "add", "-A")  # even when the agent staged it
    taken = take_patch(shell, "/testbed", None)
    assert taken
    assert [line for line in taken.decode().splitlines() if line.startswith("diff")] == [
        "diff --git a/kept.py b/kept.py"
    ]


def test_taking_a_patch_changes_nothing_and_minds_neither_lock_nor_configuration(
    shell: FolderShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = shell.path("/testbed")
    (tmp_path / "gitconfig").write_text("[diff]\n\tnoprefix = true\n\texternal = false\n[color]\n\tui = always\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    git(work, "config", "diff.noprefix", "true")
    shell.put("/testbed/.git/index.lock", b"")  # a killed git left it
    shell.put("/testbed/value.py", b"value = 2\n")

    def everything() -> dict[str, bytes]:
        return {str(file): file.read_bytes() for file in work.rglob("*") if file.is_file()}

    before = everything()
    taken = take_patch(shell, "/testbed", None)
    assert taken is not None
    assert taken.startswith(b"diff --git a/value.py b/value.py\n")
    assert everything() == before


def test_a_change_in_the_moment_of_the_last_commit_is_seen(shell: FolderShell) -> None:
    work = shell.path("/testbed")
    git(work, "config", "core.trustctime", "false")  # the one time that a test cannot set
    moment = 1_700_000_000_500_000_000
    os.utime(work / "value.py", ns=(moment, moment))
    git(work, "update-index", "--really-refresh")
    shell.put("/testbed/value.py", b"value = 2\n")  # as long as it was
    for file in (work / "value.py", work / ".git" / "index"):
        os.utime(file, ns=(moment, moment))
    taken = take_patch(shell, "/testbed", None)
    assert taken is not None
    assert b"+value = 2" in taken


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_a_change_that_git_was_told_to_overlook_is_seen(shell: FolderShell, flag: str) -> None:
    work = shell.path("/testbed")
    committed(work, {"value.py": "value = 1\n", "absent.py": "x\n"})
    git(work, "update-index", "--skip-worktree", "absent.py")
    (work / "absent.py").unlink()  # as in a sparse checkout
    shell.put("/testbed/value.py", b"value = 2\n")
    git(work, "update-index", flag, "value.py")
    taken = take_patch(shell, "/testbed", None)
    assert taken is not None
    assert (b"+value = 2" in taken, b"absent.py" in taken) == (True, False)


def test_a_repository_that_the_agent_removed_is_named(shell: FolderShell) -> None:
    base = head_commit(shell, "/testbed")
    shutil.rmtree(shell.path("/testbed/.git"))
    with pytest.raises(AgentFailed, match=r"was when the agent began, found no \.git"):
        take_patch(shell, "/testbed", base)


def test_a_folder_inside_somebody_elses_repository_has_no_patch(tmp_path: Path) -> None:
    committed(tmp_path, {"x": "x\n"})
    shell = FolderShell(tmp_path / "environment")
    shell.put("/testbed/file", b"x")
    assert take_patch(shell, "/testbed", None) is None
    assert head_commit(shell, "/testbed") is None


def test_a_patch_beyond_the_bound_is_refused(shell: FolderShell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "MAX_BYTES", 1 << 20)
    shell.put("/testbed/large.txt", b"a line of text\n" * 100_000)
    with pytest.raises(AgentFailed, match="at most 1 MiB"):
        take_patch(shell, "/testbed", None)
    assert not list(shell.path("/testbed").glob(".megaflow-patch*"))


@pytest.mark.parametrize("says", ["1", "/no/such/file", ""])
def test_a_replaced_program_that_names_no_patch_is_the_agents_fault(
    shell: FolderShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    said = {"git": "echo 1", "cp": "true", "mktemp": f'[ "$1" = -d ] && exec /usr/bin/mktemp -d; echo "{says}"'}
    for name, does in said.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with pytest.raises(AgentFailed, match="expected git to write a patch"):
        take_patch(shell, "/testbed", None)


def test_a_pipe_by_the_results_name_does_not_hold_it_up(shell: FolderShell) -> None:
    os.mkfifo(shell.path("/testbed/.megaflow-patch"))
    assert take_patch(shell, "/testbed", None) == b""
