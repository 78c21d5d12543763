"""Decides which files that an agent changed must be the image's again before a script judges its container. No I/O.

A task may ask for almost any change, so only what runs the judge is protected: shells, interpreters, the tools that
test scripts are written with, the dynamic loader, Python's own modules and its test runner.
Source: attacks on Terminal-Bench tasks that got a reward (replaced shells and interpreters, preloaded libraries).
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from app.models.shell import ChangedFile, FileAction

__all__ = ["decide"]

_PROGRAMS = frozenset(
    {
        *("sh", "bash", "dash", "ash", "zsh", "busybox", "env", "sudo", "su", "script", "stdbuf", "xargs", "timeout"),
        *(
            "python",
            "python2",
            "python3",
            "pip",
            "pip3",
            "pytest",
            "py.test",
            "uv",
            "uvx",
            "node",
            "npm",
            "npx",
            "perl",
        ),
        *("ruby", "java", "go", "cargo", "rustc", "php", "git", "make", "curl", "wget", "jq", "tar", "gzip", "unzip"),
        *(
            "cat",
            "ls",
            "grep",
            "egrep",
            "fgrep",
            "sed",
            "awk",
            "gawk",
            "mawk",
            "diff",
            "cmp",
            "test",
            "[",
            "echo",
            "tr",
        ),
        *("printf", "head", "tail", "wc", "sort", "uniq", "cut", "mkdir", "rm", "cp", "mv", "ln", "chmod", "chown"),
        *(
            "touch",
            "find",
            "tee",
            "date",
            "sleep",
            "stat",
            "sha256sum",
            "sha1sum",
            "md5sum",
            "ps",
            "kill",
            "pkill",
            "id",
        ),
        *("whoami", "basename", "dirname", "readlink", "realpath", "expr", "seq", "true", "false", "apt-get", "dpkg"),
    }
)
_VERSIONED = re.compile(r"^(python|pip|perl|ruby|node|php|pytest)-?[0-9.]+$")
_BIN = frozenset({"bin", "sbin"})
_SYSTEM_BIN = frozenset({"/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"})
_LOADER = re.compile(r"^(ld-linux.*|ld-musl.*|libc\.so\.6|libc-2.*|libc\.musl.*|libdl\.so\.2|libpthread\.so\.0)$")
_LOADER_FILES = re.compile(r"^/etc/ld\.so\.(preload|conf|cache|conf\.d/.*)$|^/etc/ld-musl.*\.path$")
_PYTHON = re.compile(r"/lib(?:64)?/python[0-9.]*/(?P<rest>.+)$")
_PACKAGES = re.compile(r"^(?:site|dist)-packages/(?P<name>[^/]+)")
_RUNNER = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "pytest.py", "py.py"})
_START = frozenset({"sitecustomize.py", "usercustomize.py", "sitecustomize", "usercustomize"})
_SHADOWS = frozenset({"pytest", "_pytest", "pluggy", "iniconfig"})
"""Modules that `python -m pytest` would take from the working folder, which comes first on its path."""
_ABOVE = frozenset({"/conftest.py", "/pytest.ini", "/.pytest.ini", "/pytest.toml", "/.pytest.toml"})
"""What pytest reads above a folder of tests."""
_EXECUTABLE = re.compile(rb"^import[ \t]+(?P<what>.*)$", re.MULTILINE)
_KNOWN_IMPORTS = (b"__editable__", b"_virtualenv", b"os; var = 'SETUPTOOLS_USE_DISTUTILS'", b"coverage", b"pytest_cov")
"""How lines begin that installers write into `.pth` files: of editable packages, of tools."""


def decide(file: ChangedFile) -> FileAction:
    """What is done with one file that is not as the image has it."""
    pure = PurePosixPath(file.path)
    if _is_judging_program(pure, file) or _LOADER_FILES.match(file.path):
        return FileAction.PUT_BACK
    if _LOADER.match(pure.name) and pure.parent.as_posix().startswith(("/lib", "/usr/lib")):
        return FileAction.PUT_BACK
    if found := _PYTHON.search(file.path):
        return _of_python(found["rest"], pure.name, file)
    return FileAction.SUSPECT if not file.in_image and _is_runner(pure) else FileAction.KEEP


def _is_runner(pure: PurePosixPath) -> bool:
    """A module in place of the test runner, or the runner's files above all folders."""
    if pure.as_posix() in _ABOVE:
        return True
    module = pure.parent.name if pure.name.startswith("__init__.") else pure.name.partition(".")[0]
    return module in _SHADOWS and pure.suffix in (".py", ".pyc", ".so")


def _is_judging_program(pure: PurePosixPath, file: ChangedFile) -> bool:
    """A shell, interpreter or tool that the image has, changed or covered by another of its name."""
    if pure.as_posix() in _SYSTEM_BIN:  # a whole folder of programs was replaced
        return True
    if pure.parent.name not in _BIN or not (pure.name in _PROGRAMS or _VERSIONED.match(pure.name)):
        return False
    return file.in_image or any(file.image_has(f"{folder}/{pure.name}") for folder in _SYSTEM_BIN)


def _of_python(rest: str, name: str, file: ChangedFile) -> FileAction:
    if name in _START:
        return FileAction.PUT_BACK
    if name.endswith(".pth"):
        found = [one["what"] for one in _EXECUTABLE.finditer(file.read())]
        known = all(what.startswith(_KNOWN_IMPORTS) for what in found)
        return FileAction.KEEP if known else FileAction.SUSPECT
    package = _PACKAGES.match(rest)
    of_runner = package is not None and package["name"] in _RUNNER
    is_standard = package is None and "__pycache__" not in rest
    return FileAction.PUT_BACK if file.in_image and (of_runner or is_standard) else FileAction.KEEP
