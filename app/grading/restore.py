"""Puts back, in the environment that is graded, what a submission changed of the test runner instead of the program.

What changed is asked of git in the clean environment, not read out of the patch: a patch can be written so that two
readers disagree about it. What the gold solution changes, too, is left and looked at.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

import structlog

from app.errors import GradingFailed
from app.grading.patches import GIT, STEP_TIMEOUT_S, restore_command, tail, touched_files
from app.grading.runner_files import SECTIONED, added_hooks, base_sections, reaches_runner, shadows, steers
from app.models.shell import Shell
from app.models.spec import TestsGoal

__all__ = ["changed_by_install", "mark_before_install", "restore_runner", "suspect_rule"]

log = structlog.get_logger(__name__)

_MARK = "/tmp/.megaflow-before-install"
_RUNNER_FILES = (
    "-name sitecustomize.py -o -name usercustomize.py -o -name '*.pth' -o -path '*-packages/pytest/*.py'"
    " -o -path '*-packages/_pytest/*.py' -o -path '*-packages/pluggy/*.py' -o -path '*/bin/pytest'"
    " -o -path '*/bin/python*'"
)
_INSTALLED = re.compile(rb"^import (__editable__|_virtualenv|os; var = 'SETUPTOOLS_USE_DISTUTILS')")


def restore_runner(shell: Shell, goal: TestsGoal, gold: str) -> tuple[str, ...]:
    """Restore what the applied patch changed of the test runner and `gold` does not change; the paths.

    Raises: GradingFailed: git does not tell what changed, or will not restore it; EnvironmentFailed.
    """
    changed = _changed(shell, goal.base_commit)
    allowed = {*touched_files(gold), *touched_files(goal.test_patch)}
    wanted = [path for path in changed if path not in allowed]
    whole = [path for path in wanted if steers(path) or shadows(path, ())]
    if candidates := [path for path in whole if not steers(path)]:
        inside = _packages(shell, goal.base_commit, candidates)
        whole = [path for path in whole if steers(path) or shadows(path, inside)]
    if whole:
        command = "; ".join(restore_command(goal.base_commit, path) for path in whole)
        done = shell.run(f"{GIT}set -e; {command}", timeout_s=STEP_TIMEOUT_S, stdin=b"")
        if not done.ok:
            raise GradingFailed(f"expected to restore {', '.join(whole[:3])} from the base; found {tail(done)}")
    sections = [path for path in wanted if _restore_sections(shell, goal.base_commit, path)]
    if whole or sections:
        log.warning("grading.runner_restored", paths=[*whole, *sections][:10])
    return (*whole, *sections)


def suspect_rule(patch: str, gold: str) -> str:
    """The rule by which a submission could change its own judgement in what cannot be restored; empty: none.

    Files that the gold solution changes, too, keep what the submission made of them; so does the program under test,
    which runs in the test runner's own process.
    """
    for path in touched_files(patch):
        if steers(path) and path in touched_files(gold) and added_hooks(patch, path) and not added_hooks(gold, path):
            return f"hooks of the test runner in {path}"
    if word := reaches_runner(patch, gold):
        return f"the submission reaches into the test run: {word}"
    return ""


def mark_before_install(shell: Shell) -> None:
    """Note the moment before commands of the repository run. Raises: EnvironmentFailed."""
    shell.run(f"touch {_MARK}", timeout_s=STEP_TIMEOUT_S)


def changed_by_install(shell: Shell) -> str:
    """The rule, when an installation changed the test runner; empty: it did not.

    By the time of the inode's change, which no program can set. Raises: EnvironmentFailed.
    """
    found = shell.run(
        f"find / -xdev -type f -cnewer {_MARK} \\( {_RUNNER_FILES} \\) -print; rm -f {_MARK}",
        timeout_s=STEP_TIMEOUT_S,
    )
    for path in found.stdout.decode("utf-8", "replace").splitlines():
        if not path.endswith(".pth") or not _is_installers(shell, path):
            return f"the installation changed {path}"
    return ""


def _is_installers(shell: Shell, path: str) -> bool:
    """Whether a `.pth` file only names folders, or is one that installers write."""
    try:
        lines = shell.get(path)[: 64 << 10].splitlines()
    except FileNotFoundError:
        return True
    return all(not line.startswith((b"import ", b"import\t")) or _INSTALLED.match(line) for line in lines)


def _changed(shell: Shell, base_commit: str) -> list[str]:
    """Paths that are not as in the base: changed, new, ignored too."""
    told = shell.run(
        f"{GIT}git diff --name-only --no-renames -z {shlex.quote(base_commit)} && echo && "
        "git ls-files -z --others && echo",
        timeout_s=STEP_TIMEOUT_S,
        stdin=b"",
    )
    if not told.ok or told.truncated:
        raise GradingFailed(f"expected git to tell what the submission changed; found {tail(told)}")
    names = told.stdout.decode("utf-8", "surrogateescape").replace("\n", "").split("\0")
    return [name for name in dict.fromkeys(names) if name]


def _packages(shell: Shell, base_commit: str, paths: Sequence[str]) -> list[str]:
    """Of the folders of these paths, those that are packages in the base."""
    folders = sorted({parent.as_posix() for path in paths for parent in list(PurePosixPath(path).parents)[:2]} - {"."})
    asked = "; ".join(
        f"git cat-file -e {shlex.quote(f'{base_commit}:{folder}/__init__.py')} 2>/dev/null && echo {index}"
        for index, folder in enumerate(folders)
    )
    told = shell.run(f"{GIT}{asked or ':'}; true", timeout_s=STEP_TIMEOUT_S, stdin=b"")
    return [folders[int(line)] for line in told.stdout.split() if line.isdigit()]


def _restore_sections(shell: Shell, base_commit: str, path: str) -> bool:
    """Give a file its runner's sections back; whether it was changed."""
    name = PurePosixPath(path).name
    if not SECTIONED.get(name):
        return False
    revision = shlex.quote(f"{base_commit}:{path}")
    told = shell.run(f"{GIT}git cat-file -p {revision} 2>/dev/null; true", timeout_s=STEP_TIMEOUT_S, stdin=b"")
    workdir = shell.run("pwd -P", timeout_s=STEP_TIMEOUT_S).stdout.decode().strip()
    try:
        now = shell.get(f"{workdir}/{path}").decode("utf-8", "replace")
    except FileNotFoundError:
        return False
    restored = base_sections(name, told.stdout.decode("utf-8", "replace"), now)
    if restored == now:
        return False
    shell.put(f"{workdir}/{path}", restored.encode())
    return True
