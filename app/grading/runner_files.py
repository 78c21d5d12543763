"""Finds what of a patch configures or replaces the test runner instead of the program under test. No I/O.

A submission may change everything but its own judge: hooks of pytest, its options, modules that shadow it. What the
gold solution does not change there is put back to the base; what it changes, too, can only be looked at.

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
"""Files that only a test runner of Python or the start of an interpreter reads, wherever they lie."""
_SUFFIXES = (".pth", ".egg-link", ".so.preload")
_RUNNERS = frozenset({"tests/runtests.py", "bin/test", "runtests.py", "setupcfg.py"})
"""Test runners that are files of a repository of their own (Django, SymPy)."""
SECTIONED = {
    "setup.cfg": ("tool:pytest", "pytest", "nosetests", "aliases", "flake8:local-plugins"),
    "pyproject.toml": ("tool.pytest", "tool.tox", "tool.nox", "project.entry-points.pytest11"),
    "setup.py": (),
    "package.json": ("jest", "mocha", "ava", "vitest", "nyc", "c8", "tap", "babel", "jasmine", "karma"),
}
"""Files with sections of which some are the runner's; `setup.py` has none that could be told apart."""
_TEST_SCRIPT = re.compile(
    r"test|spec|jest|mocha|karma|unit|e2e|check|cover|^ci$|^(?:pre|post)?(?:install|prepare|ava|tap)$"
)
"""Names of scripts of `package.json` that run tests, or that are run when it is installed."""
RUNNER_PACKAGES = frozenset(
    {
        *("pytest", "_pytest", "pluggy", "py", "iniconfig", "packaging", "exceptiongroup", "tomli", "colorama"),
        *("xdist", "pytest_cov", "pytest_asyncio", "pytest_mock", "pytest_timeout", "anyio", "hypothesis", "coverage"),
        *("nose", "mock", "tox", "attr", "attrs", "pkg_resources", "setuptools", "_distutils_hack", "pip", "pygments"),
    }
)
"""Packages that a test run imports before the program under test."""
INSTALLERS = frozenset({"pip", "setuptools", "pkg_resources", "_distutils_hack", "attrs", "tox"})
"""Those of them that an installation may bring in another version."""
INSTALLERS_LINE = re.compile(
    rb"(?:(?P<name>__editable___\w+_finder); (?P=name)\.install\(\)|_virtualenv"
    rb"|os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os\.environ\.get\(var, '(?:local|stdlib)'\) == 'local';"
    rb" enabled and __import__\('_distutils_hack'\)(?:\.add_shim\(\))?;?)\s*"
)
"""What follows `import ` in whole lines that installers write into `.pth` files (editable, virtualenv, setuptools)."""
_STARTS = frozenset({"sitecustomize", "usercustomize"})
"""Modules that every interpreter imports when it starts."""
_ON_PATH = frozenset({".", "src", "lib", "python"})
TEST_FOLDERS = frozenset({"tests", "test", "testing"})
MODULE_SUFFIXES = (".py", ".so", ".pyc")


def steers(path: str) -> bool:
    """Whether a file of a repository is the test runner's, by its name: restored whole where the gold leaves it."""
    name = PurePosixPath(path).name
    if any(part.partition(".")[0] in _STARTS for part in path.split("/")):
        return True  # as a module or package, in any form
    if name == "entry_points.txt" or any(part.endswith((".dist-info", ".egg-info")) for part in path.split("/")):
        return True  # metadata of a package by which pytest finds plugins
    return name in _NAMES or name.endswith(_SUFFIXES) or path in _RUNNERS or is_restored(path)


def is_read_by_runs(path: str) -> bool:
    """Whether every run of tests below its folder reads a file of this name."""
    return PurePosixPath(path).name in _NAMES


def shadows(path: str, packages: Collection[str]) -> bool:
    """Whether a new file would be imported in place of the standard library or of the test runner.

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
    """Whether a run of tests may import from this folder of a repository by itself."""
    return folder.as_posix() in _ON_PATH or not TEST_FOLDERS.isdisjoint(folder.parts)


def module_of(pure: PurePosixPath) -> PurePosixPath:
    """A module's path without what makes it one of its forms: `a` of `a.py`, `a.cpython-311.so`, `a/__init__.py`."""
    if pure.name.startswith("__init__."):
        return pure.parent
    return pure.with_name(pure.name.partition(".")[0] or pure.name)  # `.a.py` is the form of no module


def folders_of_tests(files: Iterable[str]) -> set[str]:
    """Folders of tests at the root, and those of these files of tests, as far up as one is named so."""
    above = (folder for file in files for folder in PurePosixPath(file).parents)
    return {*TEST_FOLDERS, *(folder.as_posix() for folder in above if not TEST_FOLDERS.isdisjoint(folder.parts))}


def is_named_test(path: str) -> bool:
    """Whether a test runner of Python takes a file for tests, by its name."""
    name = PurePosixPath(path).name
    return name == "conftest.py" or fnmatchcase(name, "test_*.py") or fnmatchcase(name, "*_test.py")


def displaced_by(path: str, folders: Collection[str]) -> list[str]:
    """Names of which a test run would take this file instead, or first, where there is one of them.

    A package goes before the module of its name, a module before a folder, and the start of a package before all tests
    in it. folders: of tests (`folders_of_tests`), and what lies in them; elsewhere it is the program.
    """
    pure = PurePosixPath(path)
    module = module_of(pure) if pure.suffix in MODULE_SUFFIXES else pure  # a link to a package has no suffix
    name = module.as_posix()
    if name not in folders and all(parent.as_posix() not in folders for parent in module.parents):
        return []
    beside = [f"{name}.py", f"{name}/__init__.py"]
    return [one for one in (*beside, *([] if module == pure else [name])) if one != path]


def base_sections(name: str, base: str, now: str) -> str:
    """The file's text as it is now, with the runner's sections as they were in the base.

    name: the file's name, a key of `SECTIONED`. A file that is not readable as its format, or has
    lines that only a runner sees (they end with a carriage return alone), is given back as in the base.
    """
    if name == "package.json":
        return _base_package(base, now)
    if re.search(r"\r(?!\n)", now):
        return base
    wanted = SECTIONED[name]
    kept = [part for head, part in _parts(now) if not _is_one_of(head, wanted)]
    put_back = [part for head, part in _parts(base) if _is_one_of(head, wanted)]
    if put_back == [part for head, part in _parts(now) if _is_one_of(head, wanted)]:
        text = now
    else:
        text = "".join([*kept, *(part if part.startswith("\n") else f"\n{part}" for part in put_back)])
        text = text if text.endswith("\n") or not text else f"{text}\n"
    return text if _runner_part(name, text) == _runner_part(name, base) else base


def _base_package(base: str, now: str) -> str:
    """`package.json` with the test runners' objects and the scripts that lead to tests as in the base."""
    try:
        before, after = json.loads(base or "{}"), json.loads(now)
        scripts = [before.get("scripts", {}), after.get("scripts", {})]
        wanted = {name for one in scripts for name in one if _TEST_SCRIPT.search(name)}
        while more := {name for name in scripts[0] if _leads_to(name, wanted, scripts[0])} - wanted:
            wanted |= more
        wanted |= {f"{when}{name}" for when in ("pre", "post") for name in wanted}
        restored = _with(after, SECTIONED["package.json"], before)
        if scripts[1] or wanted & scripts[0].keys():
            restored["scripts"] = _with(scripts[1], wanted, scripts[0])
    except (ValueError, RecursionError, AttributeError, TypeError):
        return base  # it cannot be read as what it should be
    return now if restored == after else f"{json.dumps(restored, indent=2)}\n"


def _leads_to(name: str, others: Collection[str], scripts: dict[str, str]) -> bool:
    return any(name in re.findall(r"[\w:.-]+", scripts.get(one, "")) for one in others)


def _with(now: dict[str, object], keys: Iterable[str], base: dict[str, object]) -> dict[str, object]:
    keys = set(keys)
    return {key: value for key, value in now.items() if key not in keys} | {
        key: value for key, value in base.items() if key in keys
    }


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
