"""Finds what of a patch configures or replaces the test runner instead of the program under test. No I/O.

A submission may change everything but its own judge: hooks of pytest, its options, modules that shadow it. What the
gold solution does not change there is put back to the base; what it changes, too, can only be looked at.

Source: attacks that official harnesses accepted in 2026 (conftest hooks, plugins by ini files, shadowing modules).
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from pathlib import PurePosixPath

__all__ = ["RUNNER_PACKAGES", "SECTIONED", "added_hooks", "base_sections", "reaches_runner", "shadows", "steers"]

_NAMES = frozenset(
    {
        *("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "pytest.toml", ".pytest.toml", "noxfile.py"),
        *("sitecustomize.py", "usercustomize.py", "unittest.cfg", "nose.cfg", ".noserc", ".coveragerc"),
        *("jest.config.js", "jest.config.ts", "jest.config.mjs", "jest.config.cjs", "jest.config.json"),
        *("vitest.config.js", "vitest.config.ts", "vitest.config.mjs", "karma.conf.js", ".mocharc.js", ".mocharc.cjs"),
        *(".mocharc.json", ".mocharc.yml", ".mocharc.yaml", ".taprc", "phpunit.xml", "phpunit.xml.dist", ".rspec"),
    }
)
"""Files that only a test runner or the start of an interpreter reads, wherever they lie."""
_SUFFIXES = (".pth", ".egg-link", ".so.preload")
_RUNNERS = frozenset({"tests/runtests.py", "bin/test", "runtests.py", "setupcfg.py"})
"""Test runners that are files of a repository of their own (Django, SymPy)."""
SECTIONED = {
    "setup.cfg": ("tool:pytest", "pytest", "nosetests", "aliases", "flake8:local-plugins"),
    "pyproject.toml": ("tool.pytest", "tool.tox", "tool.nox", "project.entry-points.pytest11"),
    "setup.py": (),
}
"""Files with sections of which some are the runner's; `setup.py` has none that could be told apart."""
RUNNER_PACKAGES = frozenset(
    {
        *("pytest", "_pytest", "pluggy", "py", "iniconfig", "packaging", "exceptiongroup", "tomli", "colorama"),
        *("xdist", "pytest_cov", "pytest_asyncio", "pytest_mock", "pytest_timeout", "anyio", "hypothesis", "coverage"),
        *("nose", "mock", "tox", "attr", "attrs", "pkg_resources", "setuptools", "_distutils_hack", "pip", "pygments"),
    }
)
"""Packages that a test run imports before the program under test."""
_REACHES = re.compile(
    r"\b_pytest\b|\bdef pytest_\w+|\.runtest\b|\bsys\._getframe\b|\binspect\.(?:stack|currentframe)\b|\bb64decode\b"
    r"|\bexec\(|\bos\.write\(|\bpytest_(?:runtest|collection|sessionfinish|report|configure|terminal)\w*"
    r"|\bhookimpl\b|\bos\._exit\b"
    r"|\batexit\b|\bsys\.settrace\b|\bsys\.modules\[|\bgc\.get_(?:objects|referrers)\b|/proc/(?:self|\d+|1)/"
    r"|\bLD_PRELOAD\b|\bptrace\b|short test summary|^\W*(?:PASSED|FAILED) |\bPASSED [\w./{]|\bTest Output\b"
)
"""Ways from the program under test into the run that judges it, and reports that it would print itself."""
_HOOK = re.compile(r"\bpytest_[a-z_]+\s*\(|\bhookimpl\b|\bpytest_plugins\b|\batexit\b|\bos\._exit\b|\bsys\.settrace\b")


def steers(path: str) -> bool:
    """Whether a file of a repository is the test runner's, by its name: restored whole where the gold leaves it."""
    name = PurePosixPath(path).name
    if name == "entry_points.txt" or any(part.endswith((".dist-info", ".egg-info")) for part in path.split("/")):
        return True  # metadata of a package by which pytest finds plugins
    return name in _NAMES or name.endswith(_SUFFIXES) or path in _RUNNERS


def shadows(path: str, packages: Iterable[str]) -> bool:
    """Whether a new file would be imported in place of the standard library or of the test runner.

    packages: folders of the repository that are Python packages: modules in them have a longer name.
    """
    pure = PurePosixPath(path)
    if pure.suffix not in (".py", ".so", ".pyc"):
        return False
    module = pure.parent if pure.name == "__init__.py" else pure.with_name(pure.name.partition(".")[0])
    known = sys.stdlib_module_names | RUNNER_PACKAGES
    if module.parent.as_posix() in set(packages):
        return False
    inside = next(
        (part for part in module.parents if part.name in RUNNER_PACKAGES and part.parent.as_posix() == "."), None
    )
    return module.name in known or inside is not None


def added_hooks(patch: str, path: str) -> bool:
    """Whether the lines that a patch adds to one file reach into the test run: hooks, plugins, ways to end early."""
    for part in re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE):
        if re.match(rf"diff --git a/.* b/{re.escape(path)}$", part, flags=re.MULTILINE):
            return any(_HOOK.search(line) for line in _added(part))
    return False


def reaches_runner(patch: str, gold: str) -> str:
    """A word in a patch's added lines by which a program reaches into the test run around it; empty: there is none.

    Words that the gold solution adds as well, or that the patch takes away elsewhere, are the program's own.
    """
    own = {match[0] for line in (*_added(gold), *_removed(patch)) for match in _REACHES.finditer(line)}
    for line in _added(patch):
        for match in _REACHES.finditer(line):
            if match[0] not in own:
                return match[0].strip()
    return ""


def _added(patch: str) -> list[str]:
    return [line[1:] for line in patch.split("\n") if line.startswith("+") and not line.startswith("+++ ")]


def _removed(patch: str) -> list[str]:
    return [line[1:] for line in patch.split("\n") if line.startswith("-") and not line.startswith("--- ")]


def base_sections(name: str, base: str, now: str) -> str:
    """The file's text as it is now, with the runner's sections as they were in the base.

    name: the file's name, a key of `SECTIONED`. A file that is not readable as its format is given back as in the base.
    """
    wanted = SECTIONED[name]
    kept = [part for head, part in _parts(now) if not _is_one_of(head, wanted)]
    put_back = [part for head, part in _parts(base) if _is_one_of(head, wanted)]
    if put_back == [part for head, part in _parts(now) if _is_one_of(head, wanted)]:
        text = now
    else:
        text = "".join([*kept, *(part if part.startswith("\n") else f"\n{part}" for part in put_back)])
        text = text if text.endswith("\n") or not text else f"{text}\n"
    return text if _runner_part(name, text) == _runner_part(name, base) else base


def _runner_part(name: str, text: str) -> object:
    """What a file says to the runner, however it is written; None: it cannot be read, or says nothing."""
    try:
        if name == "pyproject.toml":
            found = tomllib.loads(text)
            tool, project = found.get("tool", {}), found.get("project", {})
            points = project.get("entry-points", {}).get("pytest11") if isinstance(project, dict) else None
            said = [tool.get(one) for one in ("pytest", "tox", "nox")] if isinstance(tool, dict) else []
            return [*said, points] if points or any(said) else None
        parser = ConfigParser(interpolation=None, strict=False)
        parser.read_string(text)
        return {one: dict(parser[one]) for one in SECTIONED[name] if parser.has_section(one)} or None
    except (ValueError, RecursionError, ConfigParserError):
        return None


def _is_one_of(head: str, names: Iterable[str]) -> bool:
    plain = re.sub(r"[\s\"']", "", head)
    return any(plain == name or plain.startswith(f"{name}.") for name in names)


_HEAD = re.compile(r"^\[+([^\]\n]+)\]+[^\n]*$", re.MULTILINE)


def _parts(text: str) -> list[tuple[str, str]]:
    """The text cut before each section's head, with the section's name; what comes first has none."""
    heads = list(_HEAD.finditer(text))
    cuts = [0, *(head.start() for head in heads), len(text)]
    names = ["", *(head[1] for head in heads)]
    return [(name, text[cuts[index] : cuts[index + 1]]) for index, name in enumerate(names)]
