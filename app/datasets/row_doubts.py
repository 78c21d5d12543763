"""Finds contradictions within readable rows, for `megaflow dataset lint`: their grader would still give a verdict."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from app.datasets.row_files import RawRow
from app.errors import DatasetInvalid
from app.models.spec import AgentTask, PatchSolution, TestsGoal

_ID_OF_REPOSITORY = re.compile(r"(?P<owner>[^/]+?)__(?P<name>.+)-(?P<number>[0-9]+)")
_HUNK = re.compile(r"@@ -[0-9]+(?:,([0-9]+))? \+[0-9]+(?:,([0-9]+))? @@")
_HEADERS = ("diff --git ", "--- ", "+++ ", "@@ -")
_OF_LINES = {" ": (1, 1), "": (1, 1), "-": (1, 0), "+": (0, 1), "\\": (0, 0)}
"""Lines of a hunk by their first character: how many old and new lines of the hunk each counts for."""


def doubt(raw: RawRow, task: AgentTask, others: Mapping[str, str]) -> DatasetInvalid | None:
    """Returns the first contradiction of a row; None: none was found.

    others: for each id in lower case, the spelling of the first row that has it.
    """
    return next((fault for check in (_of_id, _of_tests, _of_patches) for fault in check(raw, task, others)), None)


def _of_id(raw: RawRow, task: AgentTask, others: Mapping[str, str]) -> Iterator[DatasetInvalid]:
    if (other := others.get(task.name.lower(), task.name)) != task.name:
        expected = f"an id that differs from {other!r} by more than upper and lower case"
        yield raw.place.fault("instance_id", expected, task.name)
    id_parts, repository, number = (
        _ID_OF_REPOSITORY.fullmatch(task.name),
        raw.values.get("repo"),
        raw.values.get("number"),
    )
    if id_parts and isinstance(repository, str) and "/" in repository:
        owner, name = repository.lower().split("/", 1)
        mirror = name.partition(".")[0].replace("__", "/")  # SWE-smith: swesmith/OWNER__NAME.COMMIT
        if f"{id_parts['owner']}/{id_parts['name']}".lower() not in (f"{owner}/{name}", mirror):
            yield raw.place.fault("repo", f"the repository that the id {task.name!r} names", repository)
    if id_parts and raw.values.get("org") and isinstance(number, int) and number != int(id_parts["number"]):
        yield raw.place.fault("number", f"the number that the id {task.name!r} ends with", number)


def _of_tests(raw: RawRow, task: AgentTask, others: Mapping[str, str]) -> Iterator[DatasetInvalid]:
    if not isinstance(goal := task.goal, TestsGoal):
        return
    columns = {column.lower(): column for column in raw.values}
    fail, passing = (columns.get(name, name.upper()) for name in ("fail_to_pass", "pass_to_pass"))
    if both := sorted({*goal.fail_to_pass} & {*goal.pass_to_pass}):
        yield raw.place.fault(fail, "each test in one of the lists", both[0], f"it is in {passing}, too")
    for column, names in ((fail, goal.fail_to_pass), (passing, goal.pass_to_pass)):
        if twice := _first_twice(names):
            yield raw.place.fault(column, "each test once", twice, "it is there twice")
    if not goal.fail_to_pass:
        yield raw.place.fault(fail, "at least one test", raw.values.get(fail), "who changes nothing would pass")


def _of_patches(raw: RawRow, task: AgentTask, others: Mapping[str, str]) -> Iterator[DatasetInvalid]:
    if not isinstance(task.solution, PatchSolution):
        return
    patch, tests = task.solution.patch, raw.values.get("test_patch")
    column = "fix_patch" if raw.values.get("fix_patch") else "patch"
    if isinstance(tests, str) and tests.strip() == patch.strip():
        yield raw.place.fault("test_patch", f"another patch than that in {column}", tests)
    if wrong := _malformed(patch.split("\n")):
        yield raw.place.fault(column, "a diff that `git apply` takes whole", wrong[1], f"line {wrong[0]}: {wrong[2]}")


def _first_twice(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


def _malformed(lines: Sequence[str]) -> tuple[int, str, str] | None:
    """Returns the line's number, from 1, its text and its fault; None: no fault.

    A line of a file may end with CR; a line of the diff's own syntax may not.
    """
    old = new = at = 0
    after = False  # the previous line was the last of a hunk
    for at, line in enumerate(lines, 1):
        if old > 0 or new > 0:
            of = _OF_LINES.get(line[:1])
            if of is None or (not line and at == len(lines)):
                return at, line, "the hunk has fewer lines than it says"
            old, new = old - of[0], new - of[1]
            if old < 0 or new < 0:
                return at, line, "the hunk has other lines than it says"
            after = True
            continue
        if after and _goes_on(line, lines[at : at + 1]):
            return at, line, "the hunk has more lines than it says"
        after = after and line.startswith("\\")
        if line.endswith("\r") and line.startswith(_HEADERS):
            return at, line, "its lines end with CR LF"
        if hunk := _HUNK.match(line):
            old, new = (int(count) if count is not None else 1 for count in hunk.groups())
    return (at, lines[-1], "the hunk has fewer lines than it says") if old > 0 or new > 0 else None


def _goes_on(line: str, following: Sequence[str]) -> bool:
    """Whether a line after a hunk's last belongs to it, and is not a mail signature or the next file's header."""
    if line.startswith("--- ") and following and following[0].startswith("+++ "):
        return False
    return line[:1] in ("+", "-", " ") and bool(line.strip()) and line.rstrip() != "--"
