"""Grades a SWE-bench goal: patch on a clean checkout, hidden tests, then the named tests.

Source: SWE-bench's evaluation (apply, check out the test files, apply the test patch, run, parse). The verdict is a
result whenever the patch is to blame, also when it does not apply or its code never ends.
"""

from __future__ import annotations

import re
import shlex

import structlog

from app.errors import GradingFailed, TestRunnerMissing
from app.grading.base import NO_SUCH_PROGRAM, Grade, GradingInput, out_of_memory, whole_of
from app.grading.reports import PARSERS, Report
from app.models.outcome import TestStatus, Verdict
from app.models.shell import CommandResult, Shell
from app.models.spec import TestsGoal

log = structlog.get_logger(__name__)

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
_STEP_TIMEOUT_S = 120.0  # one git command
_MAX_REPORT_BYTES = 32 << 20
_NAMES_SHOWN = 5

# Before every git command: whoever owns the checkout, and whatever somebody's configuration says, the same happens;
# and a folder without a repository of its own is not taken for a part of one further up.
_GIT = (
    "scratch=$(mktemp -d) || exit 99; trap 'rm -rf \"$scratch\"' EXIT; "
    'printf "[safe]\\n\\tdirectory = *\\n[core]\\n\\tautocrlf = false\\n" >"$scratch/config"; '
    'export GIT_CONFIG_GLOBAL="$scratch/config" GIT_CONFIG_NOSYSTEM=1 GIT_TERMINAL_PROMPT=0; '
    'export GIT_CEILING_DIRECTORIES="$(dirname "$(pwd -P)")"; cat >"$scratch/patch"; '
)
_WAYS = (
    'git apply -v "$scratch/patch"',
    'git apply -v --3way "$scratch/patch" || { git reset -q --merge; false; }',  # else conflict marks would stay
    'patch --batch --forward --fuzz=5 -p1 --dry-run -i "$scratch/patch" && '
    'patch --batch --forward --fuzz=5 -p1 -i "$scratch/patch"',
)

_INLINE_BYTES = 512 << 10
_NO_REPOSITORY = b"megaflow: no repository"
# The script comes over stdin; what it prints goes into a file, as what a shell returns of much output lacks the middle.
_RUN = (
    f"[ -d .git ] || {{ echo '{_NO_REPOSITORY.decode()}' >&2; exit 1; }}; "
    "mkdir -p .git/megaflow && cat >.git/megaflow/test.sh || exit 1; "
    "shell=sh; command -v bash >/dev/null 2>&1 && shell=bash; "
    f"{{ echo '{START}'; $shell .git/megaflow/test.sh; status=$?; echo; echo '{END}'; }} "
    ">.git/megaflow/report 2>&1 </dev/null; "
    f'[ "$(wc -c <.git/megaflow/report)" -gt {_INLINE_BYTES} ] || cat .git/megaflow/report; exit $status'
)


class TestsGrader:
    """Grades `TestsGoal`."""

    __test__ = False
    fresh_environment: bool = True

    def __init__(self, goal: TestsGoal) -> None:
        """Raises: GradingFailed: no parser of that name, no test named."""
        if goal.log_parser not in PARSERS:
            raise GradingFailed(
                f"unknown log parser {goal.log_parser!r}; known: {', '.join(sorted(PARSERS))}; "
                "give the row a test command with a report that one of them reads"
            )
        if not goal.fail_to_pass and not goal.pass_to_pass:
            raise GradingFailed("expected at least one test in FAIL_TO_PASS or PASS_TO_PASS; found none; fix the row")
        self._goal = goal
        self._parse = PARSERS[goal.log_parser]

    def grade(self, submission: GradingInput, shell: Shell) -> Grade:
        patch = submission.patch or b""
        if patch.strip() and not (applied := apply_patch(shell, patch)).ok:
            return _refused(applied)
        self._lay_out_tests(shell)
        run = self._run_tests(submission, shell)
        short = run.stdout if run.stdout and not run.truncated else None
        report = short or _fetch_report(shell, submission.task.environment.workdir)
        statuses = self._judge(report, run)
        limit_s = submission.task.limits.grading_timeout_s
        verdict = self._verdict(statuses, timed_out_s=limit_s if run.timed_out else None)
        if run.out_of_memory:
            verdict = verdict.model_copy(update={"detail": f"{verdict.detail}; {out_of_memory(submission)}"})
        return Grade(verdict, report)

    def _lay_out_tests(self, shell: Shell) -> None:
        """The hidden tests, whatever the agent did to those files: in one command where nothing is in the way.

        Raises: GradingFailed.
        """
        goal = self._goal
        restore = "set -e; " + "; ".join(_restore(goal.base_commit, path) for path in touched_files(goal.test_patch))
        test_patch = _whole(goal.test_patch.encode())
        if not test_patch.strip():
            return
        if shell.run(f"{_GIT}{restore}; {_WAYS[0]}", timeout_s=_STEP_TIMEOUT_S, stdin=test_patch).ok:
            return
        found = shell.run(_GIT + restore, timeout_s=_STEP_TIMEOUT_S, stdin=b"")
        if not found.ok:
            raise GradingFailed(
                f"expected to check out the test files at {goal.base_commit}; found {_tail(found)}; "
                "is that commit in the image's repository?"
            )
        if not (applied := apply_patch(shell, test_patch)).ok:
            raise GradingFailed(
                f"expected the row's test_patch to apply at {goal.base_commit}; found {_tail(applied)}; "
                "does the image belong to this row?"
            )

    def _run_tests(self, submission: GradingInput, shell: Shell) -> CommandResult:
        """Run the row's command, its output into a file and, when it is short, to us as well.

        Raises: GradingFailed: there is no repository.
        """
        workdir, timeout_s = submission.task.environment.workdir, submission.task.limits.grading_timeout_s
        log.info("grading.tests_started", task=submission.task.name, timeout_s=timeout_s)
        run = shell.run(_RUN, timeout_s=timeout_s, stdin=self._goal.test_command.encode() + b"\n")
        if _NO_REPOSITORY in run.stderr:
            raise GradingFailed(f"expected a git repository in {workdir}; found none; see the row's image and workdir")
        return run

    def _judge(self, report: bytes, run: CommandResult) -> dict[str, TestStatus]:
        statuses = self._parse(between_markers(report.decode("utf-8", "replace")))
        if not statuses and run.exit_code in NO_SUCH_PROGRAM:
            raise TestRunnerMissing(
                f"expected the test command to start; found exit code {run.exit_code}: "
                f"{report[-800:].decode('utf-8', 'replace').strip()}; is its program in the image?"
            )
        found = Report(statuses)
        return {name: found.status(name) for name in (*self._goal.fail_to_pass, *self._goal.pass_to_pass)}

    def _verdict(self, statuses: dict[str, TestStatus], *, timed_out_s: float | None) -> Verdict:
        may_skip = set(self._goal.pass_to_pass) - set(self._goal.fail_to_pass)
        wrong = [
            name
            for name, status in statuses.items()
            if not (status is TestStatus.PASSED or (status is TestStatus.SKIPPED and name in may_skip))
        ]
        passed = sum(status is TestStatus.PASSED for status in statuses.values())
        return Verdict(
            reward=0.0 if wrong or timed_out_s is not None else 1.0,
            counts=True,
            detail=_detail(statuses, wrong) if timed_out_s is None else f"tests did not end within {timed_out_s:g} s",
            tests=statuses,
            metrics={"tests_passed": float(passed), "tests_total": float(len(statuses))},
        )


def _detail(statuses: dict[str, TestStatus], wrong: list[str]) -> str:
    if not wrong:
        return f"all {len(statuses)} tests are as they should be"
    shown = ", ".join(f"{name} {statuses[name]}" for name in wrong[:_NAMES_SHOWN])
    more = f" and {len(wrong) - _NAMES_SHOWN} more" if len(wrong) > _NAMES_SHOWN else ""
    return f"{len(wrong)} of {len(statuses)} tests did not pass: {shown}{more}"


def apply_patch(shell: Shell, patch: bytes) -> CommandResult:
    """Apply `patch` in the working folder, in the ways that public harnesses try, strictest first.

    Returns the first way that worked, else the strictest one's refusal; a refused patch leaves nothing changed.
    """
    tries: list[CommandResult] = []
    for way in _WAYS:
        tries.append(shell.run(_GIT + way, timeout_s=_STEP_TIMEOUT_S, stdin=_whole(patch)))
        if tries[-1].ok:
            return tries[-1]
    return tries[0]


def _whole(patch: bytes) -> bytes:
    """git calls a patch without its last newline corrupt."""
    return patch if patch.endswith(b"\n") else patch + b"\n"


def touched_files(patch: str) -> list[str]:
    """Every path, old and new, that a git patch names in its headers; in its order."""
    paths: dict[str, None] = {}
    for part in re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE):
        header = re.split(r"^@@ ", part, maxsplit=1, flags=re.MULTILINE)[0] if part.startswith("diff --git ") else part
        for line in header.split("\n"):
            if found := next((found for pattern in _NAMES_A_PATH if (found := pattern.match(line))), None):
                paths[_unescaped(found["path"]) if found["quote"] else found["path"]] = None
    return [path for path in paths if not path.startswith("/") and ".." not in path.split("/")]


_NAMES_A_PATH = (
    re.compile(r"""^(?:---|\+\+\+) (?P<quote>"?)[ab]/(?P<path>.+?)(?P=quote)\t?$"""),
    re.compile(r"""^rename (?:from|to) (?P<quote>"?)(?P<path>.+)(?P=quote)$"""),
    re.compile(r"^(?P<quote>)diff --git a/(?P<path>.+) b/(?P=path)$"),  # a binary or an empty file has no other line
)


def _unescaped(path: str) -> str:
    """git writes a path that is not plain ASCII in quotes, its bytes as octal escapes."""
    return (
        path.encode("latin-1", "replace").decode("unicode_escape").encode("latin-1", "replace").decode(errors="replace")
    )


def between_markers(text: str) -> str:
    """What stands between the innermost markers; all of it when there are none.

    A row's own evaluation script prints the same markers inside ours.
    """
    return text.rpartition(START)[2].partition(END)[0]


def _restore(commit: str, path: str) -> str:
    """As it is in `commit`; away when it is not there."""
    revision, quoted = shlex.quote(f"{commit}:{path}"), shlex.quote(path)
    return (
        f"rm -rf -- {quoted}; "
        f"if git cat-file -e {revision} 2>/dev/null; then git checkout -q {shlex.quote(commit)} -- {quoted}; "
        f"else git rev-parse -q --verify {shlex.quote(commit + '^{commit}')} >/dev/null; fi"
    )


def _fetch_report(shell: Shell, workdir: str) -> bytes:
    """The report, without its middle when it is huge.

    Raises: GradingFailed: there is none.
    """
    half = _MAX_REPORT_BYTES // 2
    whole = whole_of(shell, "report", over_bytes=_MAX_REPORT_BYTES, folder=".git/megaflow")
    if whole is not None:
        shell.run(
            f"cd .git/megaflow && {{ head -c {half} report; echo; echo {shlex.quote(whole)}; tail -c {half} report; }} "
            ">report.short && mv report.short report",
            timeout_s=_STEP_TIMEOUT_S,
        )
    try:
        return shell.get(f"{workdir}/.git/megaflow/report")
    except FileNotFoundError as error:
        raise GradingFailed("expected the test command's output in the environment; found none; try again") from error


def _refused(applied: CommandResult) -> Grade:
    words = _tail(applied)
    verdict = Verdict(reward=0.0, counts=True, detail=f"the patch does not apply: {words}")
    return Grade(verdict, applied.stdout + applied.stderr)


def _tail(result: CommandResult) -> str:
    if result.timed_out:
        return f"no end within {result.duration_s:.0f} s"
    return result.text().strip()[-800:] or f"exit code {result.exit_code}"
