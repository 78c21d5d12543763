"""Restores, in the graded environment, files with which a submission changed the test runner instead of the program.

Git in the clean environment reports the changes; they are not read from the patch, because a patch can be written so
that two readers disagree about it. Files that the gold solution changes, too, are only checked.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath

import structlog

from app.errors import EnvironmentFailed, GradingFailed
from app.grading import patch_words, runner_files
from app.grading.patch_words import added_hooks
from app.grading.patches import GIT, STEP_TIMEOUT_S, restore_command, tail, touched_files
from app.grading.runner_files import (
    INSTALLERS,
    INSTALLERS_LINE,
    RUNNER_PACKAGES,
    SECTIONED,
    is_named_test,
    shadows,
    steers,
)
from app.models.shell import Shell
from app.models.spec import TestsGoal

log = structlog.get_logger(__name__)

_OTHERS = "git ls-files -z --others --exclude node_modules"
"""Untracked files, except installed packages: their list is longer than the output limit of a command."""
_RUNNER_FILES = "-name '*.pth' -o -path '*/bin/pytest' -o -path '*/bin/python*' -o " + " -o ".join(
    f"-path '*-packages/{name}/*.py' -o -path '*-packages/{name}.py'" for name in sorted(RUNNER_PACKAGES - INSTALLERS)
)
_LIBRARIES = (
    r"find / -xdev -type d -path '*/lib*/python3*' -name 'python3.*' ! -path '*-packages/*' -exec sh -c"
    r""" 'for one; do echo "$(cd "$one" && find . -name "*.py" ! -path "*-packages/*" ! -path "./test/*" -type f"""
    r""" -print0 | xargs -0 sha256sum | LC_ALL=C sort | sha256sum | cut -c1-64)  $one"; done' sh {} +"""
)
"""Python's standard library, one digest per folder."""
_STARTS = (
    r"\( -name 'sitecustomize*' -o -name 'usercustomize*' -o -path '*/sitecustomize/*' -o -path '*/usercustomize/*' \)"
    " ! -path '*/__pycache__/*'"
)
_PLUGINS = r"find / -xdev -type f -name entry_points.txt -exec grep -qF pytest11 {} \; -exec sha256sum {} +"
_LINKS = "-name '*.pth' -o -name entry_points.txt -o -name '*.dist-info' -o -name '*.egg-info'"


def remove_leavings(shell: Shell, goal: TestsGoal, patch: str, gold: str) -> tuple[str, ...]:
    """Removes virtual environments that the applied patch added, which no program needs. Returns their folders.

    Raises: EnvironmentFailed.
    """
    folders = patch_words.leavings(patch, gold)
    commands = "; ".join(
        f"git cat-file -e {shlex.quote(f'{goal.base_commit}:{folder}')} 2>/dev/null || "
        f"{{ rm -rf -- {shlex.quote(folder)} && echo {index}; }}"
        for index, folder in enumerate(folders)
    )
    return tuple(_answered(shell, commands, folders))


def runner_before(shell: Shell, goal: TestsGoal) -> dict[str, str]:
    """Returns digests by path of test and runner files that differ between the image and its commit.

    An installation leaves metadata of its package (`egg-info`) in a repository, and authors of images change
    configuration there. Called before a patch is applied. Raises: GradingFailed; EnvironmentFailed.
    """
    tests = _test_files(goal)
    folders = runner_files.folders_of_tests({*touched_files(goal.test_patch), *tests})
    return _digests(
        shell,
        [
            name
            for name in _changed(shell)
            if name in tests
            or steers(name)
            or shadows(name, ())
            or SECTIONED.get(PurePosixPath(name).name)
            or _is_inside(name, folders)
        ],
    )


def _test_files(goal: TestsGoal) -> set[str]:
    """Returns the files at the start of the tests' names, as pytest has them."""
    return {name.partition("::")[0] for name in (*goal.fail_to_pass, *goal.pass_to_pass) if "::" in name}


def _is_inside(path: str, folders: Collection[str]) -> bool:
    return any(parent.as_posix() in folders for parent in PurePosixPath(path).parents)


def _digests(shell: Shell, paths: Sequence[str]) -> dict[str, str]:
    if not paths:
        return {}
    listed = "\0".join(paths).encode("utf-8", "surrogateescape")
    result = shell.run(f'{GIT}xargs -0 sha256sum -- <"$scratch/patch"', timeout_s=STEP_TIMEOUT_S, stdin=listed)
    lines = result.stdout.decode("utf-8", "surrogateescape").splitlines()
    known = {path: digest for digest, _, path in (line.partition("  ") for line in lines)}
    return {path: known.get(path, "") for path in paths}  # empty: it was removed


def restore_runner(shell: Shell, goal: TestsGoal, gold: str, before: Mapping[str, str]) -> tuple[str, ...]:
    """Restores test and runner files that the applied patch changed and `gold` does not change. Returns their paths.

    before: an earlier `runner_before`: unchanged files are the image's. Raises: GradingFailed: git does not report the
    changes, or cannot restore them; EnvironmentFailed.
    """
    allowed = {*touched_files(gold), *touched_files(goal.test_patch)}
    changed = [path for path in _changed(shell) if path not in allowed]
    same = _digests(shell, [path for path in changed if path in before])
    candidates_for_restore = [path for path in changed if path not in before or same.get(path) != before[path]]
    whole = [path for path in candidates_for_restore if steers(path) or shadows(path, ())]
    linked = [path for path in candidates_for_restore if path not in whole and shadows(f"{path}/__init__.py", ())]
    questions = "; ".join(f"[ -h {shlex.quote(path)} ] && echo {index}" for index, path in enumerate(linked))
    linked = _answered(shell, questions, linked)
    whole += linked
    if candidates := [path for path in whole if not steers(path)]:
        inside = _packages(shell, candidates)
        whole = [
            path for path in whole if steers(path) or shadows(f"{path}/__init__.py" if path in linked else path, inside)
        ]
    whole += _of_tests(shell, goal, [path for path in candidates_for_restore if path not in whole])
    if whole:
        command = "; ".join(restore_command("HEAD", path) for path in whole)
        result = shell.run(f"{GIT}set -e; {command}", timeout_s=STEP_TIMEOUT_S, stdin=b"")
        if not result.ok:
            raise GradingFailed(f"expected to restore {', '.join(whole[:3])} from the base; found {tail(result)}")
    sections = [path for path in candidates_for_restore if _restore_sections(shell, path)]
    if whole or sections:
        log.warning("grading.runner_restored", paths=[*whole, *sections][:10])
    return (*whole, *sections)


def _of_tests(shell: Shell, goal: TestsGoal, changed: Sequence[str]) -> list[str]:
    """Returns those of these files that belong to the tests: the base's in their folders, and replacements."""
    hidden, named = touched_files(goal.test_patch), _test_files(goal)
    files = {*hidden, *named}
    folders = runner_files.folders_of_tests(files)
    files_to_restore, checks = list[str](), dict[str, str]()
    for path in changed:
        instead_of = runner_files.displaced_by(path, folders)
        inside = _is_inside(path, folders)
        if path not in named and is_named_test(path) and inside:
            files_to_restore.append(path)  # a runner that is given a folder runs it, too
        elif any(file == one or file.startswith(f"{one}/") for file in files for one in instead_of):
            files_to_restore.append(path)
        elif names := [*([path] if path in named or inside else []), *instead_of]:
            checks[path] = " || ".join(f"git cat-file -e {shlex.quote(f'HEAD:{one}')} 2>/dev/null" for one in names)
    questions = "; ".join(f"{{ {one}; }} && echo {index}" for index, one in enumerate(checks.values()))
    return files_to_restore + _answered(shell, questions, list(checks))


def suspect_rule(
    patch: str, gold: str, left_out: Collection[str] = (), *, restored: bool = True, hidden: Collection[str] = ()
) -> str:
    """Returns the rule by which a submission could change its own grading with changes that stay; empty: none.

    Files that the gold solution changes, too, keep the submission's changes. So does the program under test, which runs
    in the test runner's own process. left_out: folders that were removed. restored: files of the test runner are
    restored from the base; otherwise they are suspect by name. hidden: paths of the hidden tests.
    """
    for path in touched_files(patch):
        if steers(path) and path in touched_files(gold) and added_hooks(patch, path) and not added_hooks(gold, path):
            return f"hooks of the test runner in {path}"
    if how := patch_words.hidden_words(patch, gold, left_out):
        return how
    if word := patch_words.reaches_runner(patch, gold, left_out):
        return f"the submission reaches into the test run: {word}"
    if word := patch_words.reads_tests(patch, gold, hidden):
        return f"the submission names hidden tests, whose answers it could read: {word}"
    if word := patch_words.changed_assertion(patch, gold, hidden):
        return f"the submission changes an assertion, which hidden tests may call: {word}"
    if word := patch_words.steers_tests(patch, gold, left_out, restored=restored):
        return f"the submission changes how tests are run: {word}"
    return ""


def runner_state(shell: Shell) -> dict[str, str]:
    """Returns digests by path of the installed test runner and of files read at each start of an interpreter.

    Empty if an environment is no container: its file system is the host's. Raises: EnvironmentFailed.
    """
    result = shell.run(
        f'[ -z "${{LOGS_DIR:-}}" ] || exit 0; find / -xdev -type f \\( {_RUNNER_FILES} -o {_STARTS} \\)'
        f" -exec sha256sum {{}} +; {_PLUGINS}; {_LIBRARIES}"
        f"; find / -xdev -type l \\( {_LINKS} -o {_STARTS} \\) -exec sh -c"
        """ 'for one; do echo "link to $(readlink "$one" | tr "\\n " /_)  $one"; done' sh {} +""",
        timeout_s=STEP_TIMEOUT_S,
    )
    lines = result.stdout.decode("utf-8", "surrogateescape").splitlines()
    return {path: digest for digest, _, path in (line.partition("  ") for line in lines) if path}


def changed_by_install(shell: Shell, before: Mapping[str, str]) -> str:
    """Returns the rule, if an installation changed the test runner; otherwise empty. before: an earlier `runner_state`.

    Raises: EnvironmentFailed.
    """
    for path, digest in runner_state(shell).items():
        if before.get(path) == digest:
            continue
        is_file = not digest.startswith("link to ")
        if is_file and path.endswith("/entry_points.txt") and digest in before.values():
            continue  # the same plugins, in metadata of another version
        if not (is_file and path.endswith(".pth") and _is_installers(shell, path)):
            return f"the installation changed {path}"
    return ""


def files_before_tests(shell: Shell) -> tuple[frozenset[str], dict[str, str]]:
    """Returns paths that differ from the base before the tests run, and `runner_state`.

    Raises: GradingFailed, EnvironmentFailed.
    """
    return frozenset(_changed(shell)), runner_state(shell)


def made_for_next_run(shell: Shell, before: tuple[frozenset[str], dict[str, str]]) -> str:
    """Returns the rule, if one run of tests created files that the next one reads; otherwise empty.

    Raises: EnvironmentFailed.
    """
    try:
        created = [path for path in _changed(shell) if path not in before[0]]
        packages = _packages(shell, created)
    except GradingFailed:
        return "the tests left no repository, or no programs"
    path_read = next((path for path in created if runner_files.is_read_by_runs(path) or shadows(path, packages)), "")
    if path_read:
        return f"one run of tests made a file that the next one reads: {path_read}"
    return changed_by_install(shell, before[1]).replace("the installation", "one run of tests")


def tests_before_run(shell: Shell, goal: TestsGoal, workdir: str) -> dict[str, bytes]:
    """Returns the hidden Python test files by path; none if the command writes them, or may change them by git.

    Raises: EnvironmentFailed.
    """
    if goal.test_patch_path is not None or "git " in goal.test_command:
        return {}
    paths = [f"{workdir}/{path}" for path in touched_files(goal.test_patch) if path.endswith(".py")]
    named = filter(is_named_test, paths)
    return {path: content for path in named if (content := _content(shell, path)) is not None}


def changed_by_run(shell: Shell, before: Mapping[str, bytes]) -> str:
    """Returns the rule, if the run changed a hidden test; otherwise empty. Raises: EnvironmentFailed."""
    changed_path = next((path for path, content in before.items() if _content(shell, path) != content), "")
    return f"the run changed a hidden test: {changed_path}" if changed_path else ""


def _content(shell: Shell, path: str) -> bytes | None:
    """Returns a file's content; None: there is none, or it cannot be read."""
    try:
        return shell.get(path)
    except (OSError, EnvironmentFailed) as error:
        if isinstance(error, EnvironmentFailed) and type(error) is not EnvironmentFailed:
            raise  # the environment itself has ended
        return None


def _is_installers(shell: Shell, path: str) -> bool:
    """Whether a `.pth` file only names folders, or is one that installers write."""
    try:
        lines = shell.get(path)[: 64 << 10].splitlines()
    except FileNotFoundError:
        return True
    return all(not line.startswith((b"import ", b"import\t")) or INSTALLERS_LINE.fullmatch(line[7:]) for line in lines)


def _changed(shell: Shell) -> list[str]:
    """Returns paths that differ from the base, or the image author's commit on it: changed, new, and ignored files."""
    result = shell.run(
        f"{GIT}git diff --name-only --no-renames -z HEAD && echo && {_OTHERS} && echo",
        timeout_s=STEP_TIMEOUT_S,
        stdin=b"",
    )
    if not result.ok or result.truncated:
        raise GradingFailed(f"expected git to tell what the submission changed; found {tail(result)}")
    names = result.stdout.decode("utf-8", "surrogateescape").replace("\n", "").split("\0")
    return [name for name in dict.fromkeys(names) if name]


def _packages(shell: Shell, paths: Sequence[str]) -> list[str]:
    """Returns those folders of these paths that are packages: in the base, or now and inside such a package."""
    folders = sorted({parent.as_posix() for path in paths for parent in PurePosixPath(path).parents} - {"."})
    in_base = [f"git cat-file -e {shlex.quote(f'HEAD:{one}/__init__.py')} 2>/dev/null" for one in folders]
    now = [f"[ -f {shlex.quote(f'{one}/__init__.py')} ]" for one in folders]
    by_question = [
        _answered(shell, "; ".join(f"{one} && echo {index}" for index, one in enumerate(questions)), folders)
        for questions in (in_base, now)
    ]
    packages = by_question[0]
    for folder in by_question[1]:  # sorted: a package comes before its subpackages
        if folder not in packages and PurePosixPath(folder).parent.as_posix() in packages:
            packages.append(folder)
    return packages


def _answered(shell: Shell, questions: str, names: Sequence[str]) -> list[str]:
    """Returns those names whose index the shell prints."""
    result = shell.run(f"{GIT}{questions}; true", timeout_s=STEP_TIMEOUT_S, stdin=b"") if names else None
    return [names[int(line)] for line in result.stdout.split() if line.isdigit()] if result else []


def _restore_sections(shell: Shell, path: str) -> bool:
    name = PurePosixPath(path).name
    if not SECTIONED.get(name):
        return False
    revision = shlex.quote(f"HEAD:{path}")
    result = shell.run(f"{GIT}git cat-file -p {revision} 2>/dev/null; true", timeout_s=STEP_TIMEOUT_S, stdin=b"")
    workdir = shell.run("pwd -P", timeout_s=STEP_TIMEOUT_S).stdout.decode().strip()
    try:
        now = shell.get(f"{workdir}/{path}").decode("utf-8", "replace")
    except FileNotFoundError:
        return False
    restored = runner_files.base_sections(name, result.stdout.decode("utf-8", "replace"), now)
    if restored == now:
        return False
    shell.put(f"{workdir}/{path}", restored.encode())
    return True
