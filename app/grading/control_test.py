"""Adds a control to the hidden tests: copies of tests that must pass, changed to expect a wrong answer, so they must
fail.

A program under test runs in the test runner's process. It may change the report, or read the expected answer from the
test. A program that does either passes the control, too. A program that compares all tests can detect the control. If
no expected answer is a literal, the control calls its test and then fails, on the empty line after it, so no line of
the file moves. It counts only if the gold solution passes with it: if the control may be the cause of a failure, the
worker grades the gold solution in another environment.

Source: a fresh reader's forgeries of 2026-11-27, which no list of words finds.
"""

from __future__ import annotations

import ast
import random
import re
import secrets
import shlex
import string
import unittest
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from app.grading.patches import touched_files
from app.grading.reports import plain_lines
from app.models.shell import Shell
from app.models.spec import JudgeName, TestsGoal

_RUNNER = re.compile(
    r"^(?!.*(?:[|>]|install|no:terminal|-qq))"
    r"(?:.*?\bpytest|.*\bruntests\.py|.*\bbin/test|.*\btox\b.* --)(?P<after>\s.*|)$"
)
_CHOOSES = re.compile(
    r"&&|\|\||;|\s-(?!r)[a-z]*[xkm]|\s--(?:exitfirst|maxfail|lf|last-failed|ff|sw|stepwise|nf|deselect|failfast)"
)
"""After the runner's name: it selects some tests, stops at the first failure, or another command follows."""
_LAYS_OUT = re.compile(r"\bgit\b.*\b(?:checkout|apply|reset|restore|stash|clean)\b")
"""Before the runner: the tests are not in place yet."""
_LISTS = re.compile(r"\s-r(?P<what>\w+)")
_WORD = re.compile(r"(?<![A-Za-z0-9])[a-z]{3,12}(?![A-Za-z0-9])")
_MORE_WORDS = ("again", "also", "basic", "edge", "extra", "full", "more", "other", "plain", "simple", "small", "twice")
_MOST_NAMES = 40
_LONGEST_ANSWER = 200
_MOST_COPIES = 3
_SIGNALS = 128  # exit codes of a shell above this: the program was killed by a signal


@dataclass(frozen=True, slots=True)
class ControlTest:
    """A control that was placed."""

    name: str  # names of the copies, separated by spaces
    originals: tuple[str, ...]  # names in FAIL_TO_PASS of the copied tests
    command: str  # the command that runs the tests with it
    path: str
    content: bytes  # of the file with this path, including the control


@dataclass(frozen=True, slots=True)
class _CopiedTest:
    """A hidden test that can be copied; `line`: index of the empty line after it."""

    line: int
    test: ast.FunctionDef
    owner: str  # its class; empty: none


def place_control(shell: Shell, goal: TestsGoal, workdir: str) -> ControlTest | None:
    """Adds a control to the tests in place; returns None if the command or the tests do not allow one.

    Raises: EnvironmentFailed, DiskFull.
    """
    if goal.judge is JudgeName.EXIT_CODE or goal.patch_path or goal.test_patch_path or not _runs_all(goal.test_command):
        return None
    candidates: list[tuple[str, str, _CopiedTest]] = []
    for path in _files(goal):
        try:
            content = shell.get(f"{workdir}/{path}")
        except OSError:  # there is no such file
            continue
        candidates += [(path, content.decode(), place) for place in _places(content, goal)]
    if not candidates:
        return None
    # The same tests and answers for every submission of a task: facts about one control apply to all.
    number = zlib.crc32(goal.test_patch.encode("utf-8", "replace"))
    path, source, place = candidates[number % len(candidates)]
    copies = _wrong_answers([one for at, _, one in candidates if at == path], number) or [(place, None)]
    names = _names([one.test.name for one, _ in copies], "\n".join((source, *goal.fail_to_pass, *goal.pass_to_pass)))
    if not names:
        return None
    content = _with_copies(source, copies, names).encode()
    if _parsed(content) is None:
        return None
    shell.put(f"{workdir}/{path}", content)
    copied = [(one.owner, one.test.name) for one, _ in copies]
    originals = tuple(one for one in goal.fail_to_pass if _test_of(one) in copied)
    identities = [
        "::".join(filter(None, (path, one.owner, name))) for (one, _), name in zip(copies, names, strict=True)
    ]
    return ControlTest(" ".join(names), originals, _with_tests(goal.test_command, identities), path, content)


def _names(tests: Sequence[str], taken: str) -> list[str]:
    """Returns names of copies: as many words as their test has, from the tests, none of which gives them away.

    Empty: none is free.
    """
    chance = secrets.SystemRandom()
    words = sorted({*_WORD.findall(taken)} - {"test", "def"})
    words = [*chance.sample(words, min(len(words), _MOST_NAMES)), *_MORE_WORDS]
    names: list[str] = []
    for test in tests:
        count = min(max(2, test.count("_")), len(words))
        tries = ("_".join(("test", *chance.sample(words, count))) for _ in range(_MOST_NAMES))
        free = (name for name in tries if name not in taken and name not in names)
        if not (name := next(free, "")):
            return []
        names.append(name)
    return names


def control_failed(name: str, text: str) -> bool:
    """Whether a report lists all copies of the control as failed."""
    return all(_failed(one, text) for one in name.split())


def _failed(name: str, text: str) -> bool:
    failed = (
        rf"^(?:FAILED|ERROR) |^(?:FAIL|ERROR): {name}\b|\b{name}\b.*(?:\b(?:FAILED|ERROR|FAIL)\b|\b[FE]$)"
        r"|^\[gw\d+\].* FAILED "
    )
    return any(re.search(failed, line) for line in _lines_about(name, text))


def control_rule(name: str, text: str) -> str:
    """Returns why a report in which all tests passed is suspect; empty: it is not, or there was no control."""
    for one in name.split():
        passed = (
            rf"^(?:PASSED|XPASS|XFAIL)\b|\b{one}\b.*\b(?:PASSED|XPASS|XFAIL|ok)\b|^\[gw\d+\].* (?:PASSED|XPASS|XFAIL) "
        )
        if any(re.search(passed, line) for line in _lines_about(one, text)):
            return f"its report has {one} as passed, a copy of a hidden test that must fail"
        if not _failed(one, text):
            return f"its report leaves out {one}, a copy of a hidden test that must fail"
    return ""


def end_rule(name: str, command: str, exit_code: int | None) -> str:
    """Returns why the end of a command is suspect, if its last line runs tests that include a control."""
    lines = [line for line in command.splitlines() if line.strip()]
    if not name or not lines or not _RUNNER.match(lines[-1]) or exit_code is None or 0 < exit_code <= _SIGNALS:
        return ""
    how = "ended as if none had failed" if exit_code == 0 else f"was killed by signal {exit_code - _SIGNALS}"
    return f"the test runner {how}, where a copy of a hidden test must fail"


def _lines_about(name: str, text: str) -> list[str]:
    return [line for line in plain_lines(text) if re.search(rf"\b{name}\b", line)]


def runs_several(command: str) -> bool:
    """Whether a command may run tests more than once: files of one run remain for the next."""
    return (
        len(re.findall(r"\b(?:pytest|py\.test|unittest|nosetests|tox|make)\b|\bruntests\.py|\bbin/test\b", command)) > 1
    )


def _runs_all(command: str) -> bool:
    """Whether the command runs whole files of tests, or named tests, unchanged, and lists failures."""
    lines = [line for line in command.splitlines() if line.strip()]
    runs = {number: runner["after"] for number, line in enumerate(lines) if (runner := _RUNNER.match(line))}
    if not runs or "\\\n" in command or any(_LAYS_OUT.search(line) for line in lines[: max(runs)]):
        return False
    if re.search(r"\bset -\w*e", command) and list(runs) != [len(lines) - 1]:
        return False
    listed = [one["what"] for after in runs.values() if (one := _LISTS.search(after))]
    return not any(map(_CHOOSES.search, runs.values())) and all(not {*"fAa"}.isdisjoint(one) for one in listed)


def _with_tests(command: str, identities: Sequence[str]) -> str:
    """Returns the command, extended by these tests if it names its tests (`file::test`)."""
    lines = command.splitlines()
    named = [number for number, line in enumerate(lines) if "::" in line and _RUNNER.match(line)]
    if not named:
        return command
    lines[named[-1]] += f" {shlex.join(identities)}"
    return "\n".join(lines)


def _files(goal: TestsGoal) -> Iterator[str]:
    named = [name.partition("::")[0] for name in goal.fail_to_pass if "::" in name]
    for path in touched_files(goal.test_patch) or dict.fromkeys(named):
        if path.endswith(".py") and not path.startswith("/") and ".." not in path.split("/"):
            yield path


def _places(content: bytes, goal: TestsGoal) -> list[_CopiedTest]:
    """Returns plain tests that must pass, in modules and classes that give no test its own arguments."""
    tree = _parsed(content)
    if tree is None or b"pytest_generate_tests" in content or _marked(tree.body):
        return []
    source = content.decode()
    lines = source.split("\n")
    named = {_test_of(name) for name in goal.fail_to_pass}
    classes = [one for one in tree.body if isinstance(one, ast.ClassDef) and not one.decorator_list]
    bodies = [("", tree.body), *((one.name, one.body) for one in classes if not _marked(one.body))]
    return [
        _CopiedTest(test.end_lineno, test, name)
        for name, body in bodies
        for test in body
        if isinstance(test, ast.FunctionDef)
        and test.end_lineno is not None
        and ((name, test.name) in named and _is_plain(test, method=bool(name)))
        and test.end_lineno < len(lines)
        and not lines[test.end_lineno].strip()
    ]


def _parsed(content: bytes) -> ast.Module | None:
    """Returns the syntax tree; None: it is no Python, or not in UTF-8."""
    try:
        return ast.parse(content.decode())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _test_of(name: str) -> tuple[str, str]:
    """Returns class (or nothing) and function that `file::Class::test[a]`, `test (module.Class)` or `test` names."""
    if "::" in name:
        *classes, test = name.partition("::")[2].partition("[")[0].split("::")
        return "::".join(classes), test
    test, _, place = name.partition(" (")
    parts = [part for part in place.rstrip(")").split(".") if part != test]
    return (parts[-1] if parts else ""), test


def _marked(body: list[ast.stmt]) -> bool:
    """Whether all tests of a body are marked, perhaps with arguments that a copy would need, too."""
    targets = [target for one in body if isinstance(one, ast.Assign) for target in one.targets]
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets)


def _is_plain(test: ast.FunctionDef, *, method: bool) -> bool:
    given = test.args
    odd = given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs or given.defaults
    return not (test.decorator_list or odd) and (not method or bool(given.args))


def _one_line(source: str, place: _CopiedTest, name: str) -> str:
    """Returns a test that calls the other and then fails, with its indentation and kind."""
    lines = source.split("\n")
    end = "\r" if lines[place.line - 1].endswith("\r") else ""
    arguments = [one.arg for one in place.test.args.args]
    call = f"{arguments[0]}.{place.test.name}" if place.owner else place.test.name
    left = secrets.randbelow(9000) + 10
    right = left + 1 + secrets.randbelow(90)
    uses_unittest = place.owner and ".assert" in (ast.get_source_segment(source, place.test) or "")
    fails = f"{arguments[0]}.assertEqual({left}, {right})" if uses_unittest else f"assert {left} == {right}"
    first = lines[place.test.lineno - 1]
    indent = first[: len(first) - len(first.lstrip())]
    passed_on = ", ".join(arguments[1:] if place.owner else arguments)
    return f"{indent}def {name}({', '.join(arguments)}): {call}({passed_on}); {fails}{end}"


def _wrong_answers(tests: Sequence[_CopiedTest], number: int) -> list[tuple[_CopiedTest, ast.Constant | None]]:
    """Returns some of the tests, each with an expected answer to change; empty: no answer is a literal."""
    chance = random.Random(number)
    every: list[tuple[_CopiedTest, ast.Constant | None]] = []
    every += [(test, chance.choice(one)) for test in tests for one in _answers(test.test)]
    return chance.sample(every, min(len(every), _MOST_COPIES))


def _with_copies(source: str, copies: Sequence[tuple[_CopiedTest, ast.Constant | None]], names: Sequence[str]) -> str:
    lines = source.split("\n")
    for (place, answer), name in sorted(zip(copies, names, strict=True), key=lambda one: -one[0][0].line):
        if answer is None:
            lines[place.line] = _one_line(source, place, name)
            continue
        begin = place.test.lineno - 1
        copy = [line.encode() for line in lines[begin : place.line]]
        at, wrong = answer.lineno - 1 - begin, repr(_wrong(answer.value)).encode()
        copy[at] = copy[at][: answer.col_offset] + wrong + copy[at][answer.end_col_offset :]
        copy[0] = copy[0].replace(f"def {place.test.name}".encode(), f"def {name}".encode(), 1)
        lines[place.line : place.line] = [lines[place.line], *(line.decode() for line in copy)]
    return "\n".join(lines)


def _answers(test: ast.FunctionDef) -> Iterator[list[ast.Constant]]:
    """Yields, for each statement of the test that compares something with constants, those: another makes it fail."""
    for statement in test.body:
        match statement:
            case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
                literals = [side for side in (left, right) if _is_written_out(side)]
            case ast.Expr(ast.Call() as call) | ast.Assert(ast.Call() as call) if _compares(call):
                # Of two literals, the second is the expected value of a helper.
                literals = [side for side in call.args[1::-1] if _is_written_out(side)][:1]
            case _:
                continue
        if len(literals) == 1 and (constants := [*filter(_can_be_another, ast.walk(literals[0]))]):
            yield constants


def _can_be_another(node: ast.AST) -> TypeGuard[ast.Constant]:
    match node:
        case ast.Constant(value=int() | float() | str() | bytes() as value, lineno=line, end_lineno=last):
            return line == last and not isinstance(value, bool) and len(str(value)) < _LONGEST_ANSWER
    return False


def _compares(call: ast.Call) -> bool:
    """Whether a call fails, judging by its name, when one of its first two arguments changes."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return len(call.args) > 1 and (name in _EQUAL or (name not in _OF_UNITTEST and _COMPARES.search(name) is not None))


_EQUAL = {f"assert{one}Equal" for one in ("", "List", "Dict", "Tuple", "Sequence", "MultiLine", "Count")}
_OF_UNITTEST = frozenset(dir(unittest.TestCase))
_COMPARES = re.compile(r"(?i)^(?!.*(?:not|differ|raise|warn))(?=.*(?:assert|same|equal|expect|check|verify))")


def _is_written_out(side: ast.expr) -> bool:
    allowed = ast.Constant | ast.List | ast.Tuple | ast.Dict | ast.expr_context
    return all(isinstance(node, allowed) for node in ast.walk(side))


def _wrong(value: object) -> object:
    """Returns another value of the same kind that looks similar."""
    match value:
        case int() | float():
            return value + secrets.choice((1, 2, 3, 5, 10))
        case bytes():
            return _wrong(value.decode("latin-1")).encode("latin-1")  # type: ignore[attr-defined]
        case str() if letters := [at for at, letter in enumerate(value) if letter.isascii() and letter.isalnum()]:
            at = secrets.choice(letters)
            kind = string.digits if value[at].isdigit() else string.ascii_lowercase
            return value[:at] + secrets.choice(kind.replace(value[at].lower(), "")) + value[at + 1 :]
    return f"{value}."
