"""Fetches the wheels of a recipe for the image's Python, with this host's uv and pip. Runs no package code."""

from __future__ import annotations

import configparser
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from app.agents.installation import indexes, once
from app.errors import AgentUnavailable, ImageUnavailable, SpecInvalid
from app.recipes.recipe import Recipe
from app.recipes.sources import RETRY
from app.task_files import inside

_TOOLS = ("pip", "setuptools<81", "wheel")  # setuptools<81 still has pkg_resources, which older projects import
_TIMEOUT_S = 900.0
_NOT_THERE = re.compile(r"no solution found|No matching distribution", re.IGNORECASE)
_MANYLINUX = ("manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 29)))


class _NoWheel(Exception):
    """A requirement has no wheel. The message names it."""


def fetched(recipe: Recipe, tree: Path, folder: Path) -> tuple[str, ...]:
    """Fetches wheels of all requirements of recipe and source, and writes `wheels.txt`; returns lines without a wheel.

    Raises: SpecInvalid: a package of the recipe has no wheel; ImageUnavailable: no answer from the index.
    """
    lines = [line for name in recipe.requirements for line in _lines(inside(tree, tree / name))]
    declared = [line for line in lines if not line.startswith("-")]
    needed = [*_TOOLS, *recipe.packages, *_dependencies(tree)]
    left_out = [line for line in lines if line.startswith("-")]  # `-r`, `-e`, `-c`
    try:
        pins = _compiled([*needed, *declared], recipe.image_python)
    except _NoWheel:
        for line in declared:
            try:
                _compiled([line], recipe.image_python)
            except _NoWheel:
                left_out.append(line)
        try:
            pins = _compiled([*needed, *(line for line in declared if line not in left_out)], recipe.image_python)
        except _NoWheel as error:
            raise SpecInvalid(
                f"expected wheels of {', '.join(needed)} for Python {recipe.image_python}; {error}; name other versions"
            ) from error
    (folder / "wheels").mkdir()
    (folder / "wheels.txt").write_text(pins)
    RETRY(_download, folder, recipe.image_python)
    return tuple(left_out)


def _compiled(lines: Sequence[str], python: str) -> str:
    """Returns exact versions of these and their dependencies, each with a wheel. Raises: _NoWheel, ImageUnavailable."""
    return RETRY(_compile, lines, python)


def _compile(lines: Sequence[str], python: str) -> str:
    try:
        command = [
            once.uv("a recipe"),
            "pip",
            "compile",
            "--quiet",
            "--no-header",
            "--no-annotate",
            "--only-binary=:all:",
        ]
    except AgentUnavailable as error:
        raise ImageUnavailable(str(error)) from error
    target = [f"--python-version={python}", f"--python-platform={platform.machine()}-manylinux_2_28", "-"]
    result = _ran([*command, "--no-python-downloads", *target], "\n".join(lines))
    if result.returncode == 0:
        return result.stdout
    if _NOT_THERE.search(result.stderr):
        raise _NoWheel(f"found {' '.join(result.stderr.split())[:600]}")
    raise ImageUnavailable(f"could not find versions of {', '.join(lines)[:200]}: {result.stderr.strip()[-500:]}")


def _download(folder: Path, python: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--implementation=cp", f"--python-version={python}", f"--dest={folder / 'wheels'}"]
    command += [f"--platform={name}_{platform.machine()}" for name in _MANYLINUX]
    result = _ran([*command, "-r", str(folder / "wheels.txt")], "")
    if result.returncode:
        raise ImageUnavailable(f"could not fetch wheels: {result.stderr.strip()[-500:]}; see `pip config list`")


def _ran(command: Sequence[str], given: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603  our own arguments; pip requirements by stdin or a file
            command,
            input=given,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=indexes.environment(),
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ImageUnavailable(f"expected {Path(command[0]).name} to answer; found {error}") from error


def _lines(file: Path) -> list[str]:
    try:
        lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in file.read_text(encoding="utf-8").split("\n"))
        return [line for line in lines if line]
    except (OSError, UnicodeError) as error:
        raise SpecInvalid(f"{file.name}: expected a file of requirements in the source; found {error}") from error


def _dependencies(tree: Path) -> list[str]:
    """Reads dependencies from pyproject.toml or setup.cfg, else PKG-INFO; empty where only code could compute them."""
    try:
        if (file := inside(tree, tree / "pyproject.toml")).is_file():
            project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
            if "dependencies" not in project.get("dynamic", []) and "dependencies" in project:
                return [str(one) for one in project["dependencies"]]
        if (file := inside(tree, tree / "setup.cfg")).is_file():
            config = configparser.ConfigParser(interpolation=None)
            config.read(file, encoding="utf-8")
            if text := config.get("options", "install_requires", fallback="").strip():
                return [line.strip() for line in text.split("\n") if line.strip()]
        if (file := inside(tree, tree / "PKG-INFO")).is_file():
            text = file.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
            return [one for one in re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE) if "extra ==" not in one]
    except (OSError, ValueError, configparser.Error) as error:
        raise SpecInvalid(f"expected to read what the source needs; found {error}") from error
    return []
