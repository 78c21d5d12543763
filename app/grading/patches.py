"""Runs git in the graded environment: checks the row's commit, applies the agent's patch, restores the hidden tests."""

from __future__ import annotations

import re
import shlex

from app.errors import GradingFailed
from app.models.shell import CommandResult, Shell

STEP_TIMEOUT_S = 120.0  # one git command

# Before every git command: makes it work the same for any owner of the checkout and any user's configuration, and
# prevents that a folder without a repository uses one further up.
GIT = (
    "scratch=$(mktemp -d) || exit 99; trap 'rm -rf \"$scratch\"' EXIT; "
    'printf "[safe]\\n\\tdirectory = *\\n[core]\\n\\tautocrlf = false\\n" >"$scratch/config"; '
    'export GIT_CONFIG_GLOBAL="$scratch/config" GIT_CONFIG_NOSYSTEM=1 GIT_TERMINAL_PROMPT=0; '
    'export GIT_CEILING_DIRECTORIES="$(dirname "$(pwd -P)")"; cat >"$scratch/patch"; '
)
_WAYS = (
    'git apply -v "$scratch/patch"',
    'git apply -v --3way "$scratch/patch" || { git reset -q --merge; false; }',  # otherwise conflict marks would stay
    'patch --batch --forward --unified --fuzz=5 -p1 --dry-run -i "$scratch/patch" && '
    'patch --batch --forward --unified --fuzz=5 -p1 -i "$scratch/patch"',
)
_NO_REPOSITORY = "megaflow: no repository"


def require_base(shell: Shell, base_commit: str, workdir: str) -> None:
    """Checks that HEAD is the row's commit or its replacement in git (`app.recipes`), or has it as its only parent.

    Authors of images add one commit of their own to the dataset's, with their set-up's changes in tracked files
    (swebench names it "SWE-bench"); more than one, or another parent, is another state of the repository.

    Raises: GradingFailed: there is no repository, it does not know the commit, or it is at another one.
    Source: swebench 4.1.0, harness/test_spec/python.py, `make_repo_script_list_py` (the last commands).
    """
    commit, stand_in = shlex.quote(f"{base_commit}^{{commit}}"), shlex.quote(f"refs/replace/{base_commit}")
    result = shell.run(
        f"{GIT}git rev-parse -q --verify 'HEAD^{{commit}}' || {{ echo '{_NO_REPOSITORY}'; exit 1; }}; "
        f"git rev-parse -q --verify {stand_in} || git rev-parse -q --verify {commit} || echo unknown; "
        "git rev-list --parents -n 1 HEAD",
        timeout_s=STEP_TIMEOUT_S,
        stdin=b"",
    )
    lines = result.stdout.decode("utf-8", "replace").split("\n")
    if not result.ok or len(lines) < 3:
        if _NO_REPOSITORY in lines:
            raise GradingFailed(f"expected a git repository in {workdir}; found none; see the row's image and workdir")
        raise GradingFailed(f"expected git to tell the commit in {workdir}; found {tail(result)}")
    head, base, parents = lines[0], lines[1], lines[2].split()[1:]
    if base == head or parents == [base]:
        return
    at = "which is not in that repository" if base == "unknown" else "which is neither that nor its only parent"
    raise GradingFailed(
        f"expected the repository in {workdir} to be at the row's base_commit, or one commit of the image's maker above"
        f" it; found HEAD at {head} and base_commit {base_commit}, {at}; the image does not belong to this row"
    )


def apply_patch(shell: Shell, patch: bytes) -> CommandResult:
    """Applies `patch` in the working folder, in the ways that public harnesses use, strictest first.

    Returns the result of the first way that worked, else of the strictest; a refused patch changes nothing.
    """
    tries: list[CommandResult] = []
    for way in _WAYS:
        tries.append(shell.run(GIT + way, timeout_s=STEP_TIMEOUT_S, stdin=with_last_newline(patch)))
        if tries[-1].ok:
            return tries[-1]
    return tries[0]


def lay_out_tests(shell: Shell, base_commit: str, test_patch: str) -> None:
    """Writes the hidden tests, whatever the agent did to those files: in a single command if possible.

    Raises: GradingFailed.
    """
    if not test_patch.strip():
        return
    restore = "set -e; " + "; ".join(restore_command(base_commit, path) for path in touched_files(test_patch))
    patch = with_last_newline(test_patch.encode())
    if shell.run(f"{GIT}{restore}; {_WAYS[0]}", timeout_s=STEP_TIMEOUT_S, stdin=patch).ok:
        return
    result = shell.run(GIT + restore, timeout_s=STEP_TIMEOUT_S, stdin=b"")
    if not result.ok:
        raise GradingFailed(
            f"expected to check out the test files at {base_commit}; found {tail(result)}; "
            "is that commit in the image's repository?"
        )
    if not (applied := apply_patch(shell, patch)).ok:
        raise GradingFailed(
            f"expected the row's test_patch to apply at {base_commit}; found {tail(applied)}; "
            "does the image belong to this row?"
        )


def with_last_newline(patch: bytes) -> bytes:
    """Adds a missing last newline: git rejects a patch without it as corrupt."""
    return patch if patch.endswith(b"\n") else patch + b"\n"


def touched_files(patch: str) -> list[str]:
    """Returns every path, old and new, that a git patch names in its headers, in order."""
    paths: dict[str, None] = {}
    for part in re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE):
        header = re.split(r"^@@ ", part, maxsplit=1, flags=re.MULTILINE)[0] if part.startswith("diff --git ") else part
        for line in header.split("\n"):
            if match := next((match for pattern in _NAMES_A_PATH if (match := pattern.match(line))), None):
                paths[unescaped(match["path"]) if match["quote"] else match["path"]] = None
    return [path for path in paths if not path.startswith("/") and ".." not in path.split("/")]


def reversed_patch(patch: str) -> str:
    """Returns the reverse patch. Changes that git cannot undo stay: binary ones without their old content."""
    lines: list[str] = []
    old = new = 0  # remaining lines of the hunk
    for line in _BINARY.sub(r"\1\3\n\n\2", patch).split("\n"):
        if old > 0 or new > 0:
            old -= not line.startswith(("+", "\\"))
            new -= not line.startswith(("-", "\\"))
            lines.append({"+": "-", "-": "+"}.get(line[:1], line[:1]) + line[1:])
        elif hunk := _HUNK.match(line):
            old, new = (int(hunk[name] or 1) for name in ("old_count", "new_count"))
            lines.append(f"@@ -{hunk['new']} +{hunk['old']} @@{line[hunk.end() :]}")
        else:
            is_second = lines and line.startswith(("+++ ", "new mode ", "rename to "))  # the old one comes first
            lines.insert(len(lines) - bool(is_second), _other_way(line))
    return "\n".join(lines)


def _other_way(line: str) -> str:
    line = re.sub(r"^diff --git a/(.+) b/(.+)$", r"diff --git a/\2 b/\1", line)
    line = re.sub(r"^index (\w+)\.\.(\w+)", r"index \2..\1", line)
    for one, other in (*_OPPOSITES, *(pair[::-1] for pair in _OPPOSITES)):
        if line.startswith(one):
            return other + line.removeprefix(one)
    return line


_HUNK = re.compile(r"@@ -(?P<old>\d+(?:,(?P<old_count>\d+))?) \+(?P<new>\d+(?:,(?P<new_count>\d+))?) @@")
_CONTENT = r"((?:literal|delta) \d+(?:\n\S+)+)"
_BINARY = re.compile(rf"^(GIT binary patch\n){_CONTENT}\n\n{_CONTENT}", re.MULTILINE)
"""Content of a file after the change, then before it."""
_OPPOSITES = (
    *(("--- a/", "+++ b/"), ('--- "a/', '+++ "b/'), ("--- /dev/null", "+++ /dev/null")),
    *(("new file mode ", "deleted file mode "), ("old mode ", "new mode "), ("rename from ", "rename to ")),
)
_NAMES_A_PATH = (
    re.compile(r"""^(?:---|\+\+\+) (?P<quote>"?)[ab]/(?P<path>.+?)(?P=quote)\t?$"""),
    re.compile(r"""^rename (?:from|to) (?P<quote>"?)(?P<path>.+)(?P=quote)$"""),
    re.compile(r"^(?P<quote>)diff --git a/(?P<path>.+) b/(?P=path)$"),  # a binary or an empty file has no other line
)


def unescaped(path: str) -> str:
    """Decodes a path that git wrote in quotes because it is not plain ASCII: its bytes are octal escapes."""
    return (
        path.encode("latin-1", "replace")
        .decode("unicode_escape", "replace")
        .encode("latin-1", "replace")
        .decode(errors="replace")
    )


def restore_command(commit: str, path: str) -> str:
    """Returns a command that restores a path to its state in `commit`; removes it if it is not there."""
    revision, quoted = shlex.quote(f"{commit}:{path}"), shlex.quote(path)
    return (
        f"rm -rf -- {quoted}; "
        f"if git cat-file -e {revision} 2>/dev/null; then git checkout -q {shlex.quote(commit)} -- {quoted}; "
        f"else git rev-parse -q --verify {shlex.quote(commit + '^{commit}')} >/dev/null; fi"
    )


def tail(result: CommandResult) -> str:
    """Returns the end of its output, for the end of a message."""
    if result.timed_out:
        return f"no end within {result.duration_s:.0f} s"
    return result.text().strip()[-800:] or f"exit code {result.exit_code}"
