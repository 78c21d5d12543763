"""Searches a task's image, as the agent gets it, for its answer: files, caches, packages and git's objects.

Commands run only through the `Shell`, limited in time and output. Separate functions parse what they print.
Source: SWE-bench #465: 21 of 100 trajectories read the answer from git's history.
"""

from __future__ import annotations

import hashlib
import io
import re
import shlex
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from app.grading.patches import GIT
from app.models.shell import Shell
from app.models.spec import AgentTask, PatchSolution, TestsGoal


class LeakKind(StrEnum):
    GOLD = "gold"  # lines of the gold solution, or a file in its solved state
    TESTS = "tests"  # the hidden tests
    COMMITS = "commits"  # commits after the base commit
    REFLOG = "reflog"  # entries about other states
    UNREACHABLE = "unreachable"  # objects of git that nothing refers to
    UNKNOWN = "unknown"  # a part of the scan did not finish


@dataclass(frozen=True, slots=True)
class LeakFinding:
    """A leak found in the image. place: a path, or where in git."""

    kind: LeakKind
    place: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.place}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Needles:
    """Texts and files to search for. Lines by kind; `share` of them in one file is a finding."""

    lines: Mapping[LeakKind, frozenset[str]]
    share: Mapping[LeakKind, float]
    files: Mapping[str, tuple[LeakKind, str]] = field(default_factory=dict)  # sha256: kind and name
    patch: bytes = b""  # the gold patch, applied to a separate index
    reverse: bool = False
    touched: tuple[str, ...] = ()
    base_commit: str = "HEAD"


_LEAST_LINE, _LEAST_LINES, _MOST_LINES = 20, 2, 400
_LEAST_FILE_BYTES, _MOST_FILE_BYTES = 64, 2 << 20
_MOST_COMMITS, _MOST_OBJECTS, _MOST_FINDINGS = 20, 20_000, 50
_SCAN_S = 180.0
_MOST_OUTPUT = 1 << 20
_OF_PATCH, _OF_FILES = 0.8, 1.0
"""Shares of lines that are a finding: of a patch's new lines; of a solution's files, which also repeat old lines."""


def needles_of(task: AgentTask, solution: bytes | None = None, tests: bytes | None = None) -> Needles:
    """Collects the texts and files that reveal the answer. solution, tests: tars of the task's folders, if any."""
    lines: dict[LeakKind, frozenset[str]] = {}
    files: dict[str, tuple[LeakKind, str]] = {}
    share = {LeakKind.GOLD: _OF_PATCH, LeakKind.TESTS: _OF_PATCH}
    patch, reverse = b"", False
    if isinstance(task.solution, PatchSolution):
        patch, reverse = task.solution.patch.encode(), task.solution.reverse
        lines[LeakKind.GOLD] = new_lines(task.solution.patch, reverse=reverse)
    elif solution is not None:
        lines[LeakKind.GOLD], share[LeakKind.GOLD] = _lines_of_files(solution), _OF_FILES
        files |= {digest: (LeakKind.GOLD, name) for name, digest in _digests(solution)}
    if isinstance(task.goal, TestsGoal):
        lines[LeakKind.TESTS] = new_lines(task.goal.test_patch)
    elif tests is not None:
        files |= {digest: (LeakKind.TESTS, name) for name, digest in _digests(tests)}
    return Needles(
        lines={kind: texts for kind, texts in lines.items() if len(texts) >= _LEAST_LINES},
        share=share,
        files=files,
        patch=patch if patch.endswith(b"\n") else patch + b"\n",
        reverse=reverse,
        touched=touched_by(patch.decode("utf-8", "replace")),
        base_commit=task.goal.base_commit if isinstance(task.goal, TestsGoal) else "HEAD",
    )


def new_lines(patch: str, *, reverse: bool = False) -> frozenset[str]:
    """Returns the lines that a patch adds, if long enough to be distinctive. Leaves out moved lines and context."""
    plus, minus = ("-", "+") if reverse else ("+", "-")
    body = [line for line in patch.split("\n") if not line.startswith(("+++ ", "--- "))]
    old = {line[1:].strip() for line in body if line.startswith((minus, " "))}
    return _long([line[1:] for line in body if line.startswith(plus) and line[1:].strip() not in old])


def _long(lines: Iterable[str]) -> frozenset[str]:
    """Returns the longest of the distinctive lines, stripped."""
    stripped = {line.strip() for line in lines}
    enough = [line for line in stripped if len(line) >= _LEAST_LINE and line.isprintable()]
    return frozenset(sorted(enough, key=lambda line: (-len(line), line))[:_MOST_LINES])


def touched_by(patch: str) -> tuple[str, ...]:
    """Returns the files that a patch leaves changed or new, by git's headers."""
    paths = re.findall(r"^diff --git a/.+ b/(.+)$", patch, re.MULTILINE)
    paths = paths or re.findall(r"^\+\+\+ b/([^\t\n]+)", patch, re.MULTILINE)
    return tuple(dict.fromkeys(paths))[:100]


def _members(archive: bytes) -> Iterable[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        for one in opened.getmembers()[:1000]:
            file = opened.extractfile(one) if one.isreg() and one.size <= _MOST_FILE_BYTES else None
            if file is not None:
                yield one.name.removeprefix("./"), file.read()


def _lines_of_files(archive: bytes) -> frozenset[str]:
    return _long(line for _, content in _members(archive) for line in content.decode("utf-8", "replace").split("\n"))


def _digests(archive: bytes) -> list[tuple[str, str]]:
    return [
        (name, hashlib.sha256(content).hexdigest())
        for name, content in _members(archive)
        if len(content) >= _LEAST_FILE_BYTES
    ]


_FILES = (
    r"find {root} \( -path /proc -o -path /sys -o -path /dev -o -path /opt/megaflow -o -path {patterns} \) -prune"
    r" -o -type f \( -size -4096k -o -size -65536k ! -name '*.so' ! -name '*.so.*' ! -name '*.a' \)"
    r" {named} -print0 2>/dev/null"
)
_GREP = "LC_ALL=C xargs -0 -r grep -aoHFf {patterns} -- 2>/dev/null | sort -u | head -c {most}; true"
# Wheels, source releases, and caches of installers under other names. Any available program unpacks a zip.
_ARCHIVES = (
    r"\( -name '*.whl' -o -name '*.egg' -o -name '*.zip' -o -name '*.jar' -o -name '*.crate' -o -name '*.tgz' -o -name"
    r" '*.tar' -o -name '*.tar.*' -o -name '*.body' -o -path '*/pip/http/*' -o -path '*/_cacache/content-v2/*' \)"
)
_UNZIP = (
    "import sys, zipfile; z = zipfile.ZipFile(sys.argv[1]);"
    " [sys.stdout.buffer.write(z.read(n)) for n in z.infolist() if n.file_size < 2**24]"
)
_GREP_INSIDE = (
    'LC_ALL=C xargs -0 -r -n 1 sh -c \'{{ unzip -p "$1" || python3 -c "{unzip}" "$1" || tar -xOf "$1"; }} </dev/null'
    ' 2>/dev/null | head -c 268435456 | grep -aoHFf {patterns} --label="$1" -\' _ | sort -u | head -c {most}; true'
)
_HASH = "LC_ALL=C xargs -0 -r sha256sum -- 2>/dev/null | head -c {most}; true"
_COMMITS = (
    'base={base}; git rev-parse --verify --quiet "$base^{{commit}}" >/dev/null || base=HEAD; '
    "git log --all --reflog --not \"$base\" -n {most} --format='commit %H %s' 2>/dev/null; "
    "git reflog --all --format='reflog %H %gs' 2>/dev/null | head -n {most}; "
    "git fsck --unreachable --no-reflogs --no-progress 2>/dev/null | head -n {objects}; true"
)
_OBJECTS = (
    'base={base}; git rev-parse --verify --quiet "$base^{{commit}}" >/dev/null || base=HEAD; '
    '{{ git rev-list --objects --all --reflog --not "$base" | cut -d" " -f1; '
    "git fsck --unreachable --no-reflogs --no-progress 2>/dev/null | cut -d' ' -f3; }} | head -n {objects}"
    " | git cat-file --batch-check='%(objecttype) %(objectname) %(objectsize)'"
    " | awk '$1 == \"blob\" && $3 < 2097152 {{print $2}}' | git cat-file --batch | head -c 67108864"
    " | LC_ALL=C grep -aoFf {patterns} | sort -u | head -c {most}; true"
)
_APPLIED = (
    'base={base}; git rev-parse --verify --quiet "$base^{{commit}}" >/dev/null || base=HEAD; '
    'mkdir "$scratch/objects" && home=$(cd "$(git rev-parse --git-path objects)" && pwd -P) && '
    'export GIT_OBJECT_DIRECTORY="$scratch/objects" GIT_ALTERNATE_OBJECT_DIRECTORIES="$home"'
    ' GIT_INDEX_FILE="$scratch/index" && git read-tree "$base" && git apply --cached {how}"$scratch/patch" || exit 3; '
    'for one in {paths}; do size=$(git cat-file -s ":$one" 2>/dev/null) || continue; '
    'echo "$(git cat-file blob ":$one" | sha256sum | cut -d" " -f1) $size $one"; done'
)


def scan(shell: Shell, needles: Needles) -> list[LeakFinding]:
    """Searches the environment for the task's answer. Returns at most 50 findings, the gold solution's first.

    The environment is a fresh one, as the agent gets it. A file remains in its `/tmp`. Raises: EnvironmentFailed.
    """
    findings: list[LeakFinding] = []
    has_git = shell.run("[ -e .git ] && command -v git >/dev/null", timeout_s=_SCAN_S).ok
    patterns = _put_patterns(shell, needles)
    files = dict(needles.files)
    if has_git:
        commit = shlex.quote(needles.base_commit)
        base = f"$(git rev-parse -q --verify refs/replace/{commit} || echo {commit})"
        files |= _as_solved(shell, needles, base)
        output = _output(shell, GIT + _COMMITS.format(base=base, most=_MOST_COMMITS, objects=_MOST_OBJECTS), findings)
        findings += history_findings(output)
        if patterns:
            command = _OBJECTS.format(base=base, objects=_MOST_OBJECTS, patterns=patterns, most=_MOST_OUTPUT)
            lines = {".git": set(_output(shell, GIT + command, findings).split("\n"))}
            findings += text_findings(lines, needles, where="git's objects that are not of the base")
    if patterns:
        for command in text_commands(patterns):
            findings += text_findings(matches(_output(shell, command, findings), needles), needles)
    if files:
        named = " -o ".join(
            f"-name {shlex.quote(name)}" for name in sorted({name.rpartition("/")[2] for _, name in files.values()})
        )
        command = (
            _FILES.format(root="/", patterns="/nowhere", named=f"\\( {named} \\)")
            + " | "
            + _HASH.format(most=_MOST_OUTPUT)
        )
        findings += file_findings(_output(shell, command, findings), files)
    return sorted(dict.fromkeys(findings), key=lambda one: list(LeakKind).index(one.kind))[:_MOST_FINDINGS]


def text_commands(patterns: str, root: str = "/") -> tuple[str, str]:
    """Returns commands that print the lines of `patterns` in files, and in the files inside archives."""
    plain = _GREP.format(patterns=patterns, most=_MOST_OUTPUT)
    inside = _GREP_INSIDE.format(patterns=patterns, most=_MOST_OUTPUT, unzip=_UNZIP)
    files = partial(_FILES.format, root=root, patterns=patterns)
    return f"{files(named='')} | {plain}", f"{files(named=_ARCHIVES)} | {inside}"


def _put_patterns(shell: Shell, needles: Needles) -> str:
    """Writes a file with all lines to search for. Returns its path; empty: there are none."""
    lines = sorted({line for texts in needles.lines.values() for line in texts})
    if not lines:
        return ""
    path = "/tmp/.megaflow-leak-patterns"
    shell.put(path, ("\n".join(lines) + "\n").encode())
    return path


def _as_solved(shell: Shell, needles: Needles, base: str) -> dict[str, tuple[LeakKind, str]]:
    """Returns the files after the gold patch, by their sha256. A separate index keeps the checkout unchanged."""
    if not needles.patch.strip() or not needles.touched:
        return {}
    paths = " ".join(map(shlex.quote, needles.touched))
    command = _APPLIED.format(base=base, how="-R " if needles.reverse else "", paths=paths)
    result = shell.run(GIT + command, timeout_s=_SCAN_S, stdin=needles.patch)
    return solved_files(result.stdout.decode("utf-8", "replace")) if result.ok else {}


def _output(shell: Shell, command: str, found: list[LeakFinding]) -> str:
    result = shell.run(command, timeout_s=_SCAN_S, stdin=b"")
    if result.exit_code is None or result.truncated:
        why = f"no end within {_SCAN_S:g} s" if result.exit_code is None else "more output than is kept"
        found.append(LeakFinding(LeakKind.UNKNOWN, "a part of the scan", why))
    return result.stdout.decode("utf-8", "replace")


def matches(output: str, needles: Needles) -> dict[str, set[str]]:
    """Returns by path the searched lines in the output of `grep -oH`; a path may contain colons."""
    needle_lines = {line for texts in needles.lines.values() for line in texts}
    by_path: dict[str, set[str]] = defaultdict(set)
    for line in output.split("\n"):
        for at in (one.start() for one in re.finditer(":", line)):
            if line[at + 1 :] in needle_lines:
                by_path[line[:at]].add(line[at + 1 :])
                break
    return dict(by_path)


def text_findings(found: Mapping[str, set[str]], needles: Needles, *, where: str = "") -> list[LeakFinding]:
    """Returns the places that hold at least a kind's share of its lines."""
    findings = []
    for kind, lines in needles.lines.items():
        for path, there in sorted(found.items()):
            count = len(there & lines)
            if count >= _LEAST_LINES and count >= needles.share[kind] * len(lines):
                findings.append(LeakFinding(kind, where or path, f"{count} of {len(lines)} of its lines"))
    return findings


def solved_files(output: str) -> dict[str, tuple[LeakKind, str]]:
    """Parses `sha256 size path` lines: files after the gold patch, by their sha256. Leaves out tiny files."""
    files = {}
    for line in output.split("\n"):
        digest, _, rest = line.partition(" ")
        size, _, path = rest.partition(" ")
        if re.fullmatch(r"[0-9a-f]{64}", digest) and size.isdigit() and int(size) >= _LEAST_FILE_BYTES and path:
            files[digest] = (LeakKind.GOLD, path)
    return files


def file_findings(output: str, files: Mapping[str, tuple[LeakKind, str]]) -> list[LeakFinding]:
    """Parses `sha256sum` lines. Returns the files equal to one that would reveal the answer."""
    findings = []
    for line in output.split("\n"):
        digest, _, path = line.partition("  ")
        if digest in files:
            kind, name = files[digest]
            findings.append(LeakFinding(kind, path, f"the same file as {name}"))
    return findings


def history_findings(output: str) -> list[LeakFinding]:
    """Returns git's traces of other states: later commits, reflog entries of other commits, unreachable objects."""
    commits: list[str] = []
    moved: set[str] = set()
    objects: dict[str, int] = defaultdict(int)
    for line in output.split("\n"):
        word, _, rest = line.partition(" ")
        if word == "commit":
            commits.append(f"{rest[:12]} {rest[41:101]}".strip())
        elif word == "reflog":
            moved.add(rest[:40])
        elif word == "unreachable":
            objects[rest.partition(" ")[0]] += 1
    findings = []
    if commits:
        more = " or more" if len(commits) == _MOST_COMMITS else ""
        findings.append(
            LeakFinding(LeakKind.COMMITS, ".git", f"{len(commits)}{more} after the base: {'; '.join(commits[:3])}")
        )
    if len(moved) > 1:
        findings.append(LeakFinding(LeakKind.REFLOG, ".git", f"tells of {len(moved)} commits"))
    if objects:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(objects.items()))
        findings.append(LeakFinding(LeakKind.UNREACHABLE, ".git", counts))
    return findings
