"""Finds changes in a patch that configure or replace the test runner instead of the program under test. No I/O.

A submission may change everything except its own judge: hooks of pytest, its options, modules that shadow it. Files
that the gold solution does not change are restored from the base; files that it changes, too, can only be checked.

Source: attacks that official harnesses accepted in 2026 (conftest hooks, plugins by ini files, shadowing modules).
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Collection, Iterable
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from app.grading.ecosystems import is_restored

_NAMES = frozenset(
    {
        *("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "pytest.toml", ".pytest.toml", "noxfile.py"),
        *("sitecustomize.py", "usercustomize.py", "unittest.cfg", "nose.cfg", ".noserc", ".coveragerc"),
    }
)
"""Files that only a Python test runner or the start of an interpreter reads, in any folder."""
_SUFFIXES = (".pth", ".egg-link", ".so.preload")
_RUNNERS = frozenset({"tests/runtests.py", "bin/test", "runtests.py", "setupcfg.py"})
"""Test runners that are files of a repository itself (Django, SymPy)."""
SECTIONED = {
    "setup.cfg": ("tool:pytest", "pytest", "nosetests", "aliases", "flake8:local-plugins"),
    "pyproject.toml": ("tool.pytest", "tool.tox", "tool.nox", "project.entry-points.pytest11"),
    "setup.py": (),
    "package.json": ("jest", "mocha", "ava", "vitest", "nyc", "c8", "tap", "babel", "jasmine", "karma"),
}
"""Files of which some sections belong to the runner; in `setup.py` these cannot be separated."""
_TEST_SCRIPT = re.compile(
    r"test|spec|jest|mocha|karma|unit|e2e|check|cover|^ci$|^(?:pre|post)?(?:install|prepare|ava|tap)$"
)
"""Names of scripts of `package.json` that run tests, or that run when it is installed."""
RUNNER_PACKAGES = frozenset(
    {
        *("pytest", "_pytest", "pluggy", "py", "iniconfig", "packaging", "exceptiongroup", "tomli", "colorama"),
        *("xdist", "pytest_cov", "pytest_asyncio", "pytest_mock", "pytest_timeout", "anyio", "hypothesis", "coverage"),
        *("nose", "mock", "tox", "attr", "attrs", "pkg_resources", "setuptools", "_distutils_hack", "pip", "pygments"),
    }
)
"""Packages that a test run imports before the program under test."""
INSTALLERS = frozenset({"pip", "setuptools", "pkg_resources", "_distutils_hack", "attrs", "tox"})
"""Packages of these that an installation may bring in another version."""
INSTALLERS_LINE = re.compile(
    rb"(?:(?P<name>__editable___\w+_finder); (?P=name)\.install\(\)|_virtualenv"
    rb"|os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os\.environ\.get\(var, '(?:local|stdlib)'\) == 'local';"
    rb" enabled and __import__\('_distutils_hack'\)(?:\.add_shim\(\))?;?)\s*"
)
"""Text after `import ` in whole lines that installers write into `.pth` files (editable, virtualenv, setuptools)."""
_STARTS = frozenset({"sitecustomize", "usercustomize"})
"""Modules that every interpreter imports when it starts."""
_ON_PATH = frozenset({".", "src", "lib", "python"})
TEST_FOLDERS = frozenset({"tests", "test", "testing"})
MODULE_SUFFIXES = (".py", ".so", ".pyc")


def steers(path: str) -> bool:
    """Whether a repository's file belongs to the test runner, by name: restored if the gold does not change it."""
    name = PurePosixPath(path).name
    if any(part.partition(".")[0] in _STARTS for part in path.split("/")):
        return True  # as a module or package, in any form
    if name == "entry_points.txt" or any(part.endswith((".dist-info", ".egg-info")) for part in path.split("/")):
        return True  # package metadata in which pytest finds plugins
    return name in _NAMES or name.endswith(_SUFFIXES) or path in _RUNNERS or is_restored(path)


def is_read_by_runs(path: str) -> bool:
    """Whether every test run below its folder reads a file of this name."""
    return PurePosixPath(path).name in _NAMES


def shadows(path: str, packages: Collection[str]) -> bool:
    """Whether a new file would be imported instead of the standard library or the test runner.

    packages: folders of the repository that are Python packages: modules in them have a longer name.
    """
    pure = PurePosixPath(path)
    if pure.suffix not in MODULE_SUFFIXES:
        return False
    module = module_of(pure)
    if module.parent.as_posix() in packages:
        return False
    known = sys.stdlib_module_names | RUNNER_PACKAGES | _STARTS
    inside = any(part.name in RUNNER_PACKAGES and part.parent.as_posix() in _ON_PATH for part in module.parents)
    return inside or (module.name in known and _is_on_path(module.parent))


def _is_on_path(folder: PurePosixPath) -> bool:
    """Whether a test run may import from this folder of a repository without further settings."""
    return folder.as_posix() in _ON_PATH or not TEST_FOLDERS.isdisjoint(folder.parts)


def module_of(pure: PurePosixPath) -> PurePosixPath:
    """Returns a module's path without its form: `a` of `a.py`, `a.cpython-311.so`, `a/__init__.py`."""
    if pure.name.startswith("__init__."):
        return pure.parent
    return pure.with_name(pure.name.partition(".")[0] or pure.name)  # `.a.py` is no module


def folders_of_tests(files: Iterable[str]) -> set[str]:
    """Returns `TEST_FOLDERS` (of the root), and all parent folders of these files with such a name in their path."""
    above = (folder for file in files for folder in PurePosixPath(file).parents)
    return {*TEST_FOLDERS, *(folder.as_posix() for folder in above if not TEST_FOLDERS.isdisjoint(folder.parts))}


def is_named_test(path: str) -> bool:
    """Whether a Python test runner treats a file as tests, by its name."""
    name = PurePosixPath(path).name
    return name == "conftest.py" or fnmatchcase(name, "test_*.py") or fnmatchcase(name, "*_test.py")


def displaced_by(path: str, folders: Collection[str]) -> list[str]:
    """Returns paths that a test run might ignore for this file, or read after it, if they exist.

    A package overrides the module of its name, a module overrides a folder, and a package's start runs before all tests
    in it. folders: of tests (`folders_of_tests`). Empty for a path outside them: there it is the program.
    """
    pure = PurePosixPath(path)
    module = module_of(pure) if pure.suffix in MODULE_SUFFIXES else pure  # a link to a package has no suffix
    name = module.as_posix()
    if name not in folders and all(parent.as_posix() not in folders for parent in module.parents):
        return []
    beside = [f"{name}.py", f"{name}/__init__.py"]
    return [one for one in (*beside, *([] if module == pure else [name])) if one != path]


def base_sections(name: str, base: str, now: str) -> str:
    """Returns the file's current text, with the runner's sections from the base.

    name: the file's name, a key of `SECTIONED`. If a file does not parse, or has lines that only a runner reads (they
    end with a single carriage return), the base's text is returned.
    """
    if name == "package.json":
        return _base_package(base, now)
    if re.search(r"\r(?!\n)", now):
        return base
    runner_sections = SECTIONED[name]
    other_parts = [part for head, part in _parts(now) if not _is_one_of(head, runner_sections)]
    put_back = [part for head, part in _parts(base) if _is_one_of(head, runner_sections)]
    if put_back == [part for head, part in _parts(now) if _is_one_of(head, runner_sections)]:
        text = now
    else:
        text = "".join([*other_parts, *(part if part.startswith("\n") else f"\n{part}" for part in put_back)])
        text = text if text.endswith("\n") or not text else f"{text}\n"
    return text if _runner_part(name, text) == _runner_part(name, base) else base


def _base_package(base: str, now: str) -> str:
    """Returns `package.json` with the test runners' objects and the scripts that lead to tests as in the base."""
    try:
        before, after = json.loads(base or "{}"), json.loads(now)
        scripts = [before.get("scripts", {}), after.get("scripts", {})]
        script_names = {name for one in scripts for name in one if _TEST_SCRIPT.search(name)}
        while more := {name for name in scripts[0] if _leads_to(name, script_names, scripts[0])} - script_names:
            script_names |= more
        script_names |= {f"{when}{name}" for when in ("pre", "post") for name in script_names}
        restored = _with(after, SECTIONED["package.json"], before)
        if scripts[1] or script_names & scripts[0].keys():
            restored["scripts"] = _with(scripts[1], script_names, scripts[0])
    except (ValueError, RecursionError, AttributeError, TypeError):
        return base  # it is not a valid package.json
    return now if restored == after else f"{json.dumps(restored, indent=2)}\n"


def _leads_to(name: str, others: Collection[str], scripts: dict[str, str]) -> bool:
    return any(name in re.findall(r"[\w:.-]+", scripts.get(one, "")) for one in others)


def _with(now: dict[str, object], keys: Iterable[str], base: dict[str, object]) -> dict[str, object]:
    keys = set(keys)
    return {key: value for key, value in now.items() if key not in keys} | {
        key: value for key, value in base.items() if key in keys
    }


def _runner_part(name: str, text: str) -> object:
    """Returns a file's settings for the runner, in any notation; None: it cannot be read, or has none."""
    try:
        if name == "pyproject.toml":
            document = tomllib.loads(text)
            tool, project = document.get("tool", {}), document.get("project", {})
            points = project.get("entry-points", {}).get("pytest11") if isinstance(project, dict) else None
            tables = [tool.get(one) for one in ("pytest", "tox", "nox")] if isinstance(tool, dict) else []
            return [*tables, points] if points or any(tables) else None
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
    """Cuts the text before each section's head; returns the pieces with section names; the first has none."""
    heads = list(_HEAD.finditer(text))
    cuts = [0, *(head.start() for head in heads), len(text)]
    names = ["", *(head[1] for head in heads)]
    return [(name, text[cuts[index] : cuts[index + 1]]) for index, name in enumerate(names)]
