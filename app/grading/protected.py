"""Decides which files that an agent changed must be the image's again before a script judges its container. No I/O.

A task may ask for almost any change, so only what runs the judge is protected: shells, interpreters, the tools that
test scripts are written with, the dynamic loader and the libraries that interpreters load, Python's own modules and its
test runner. What an installation may have put there, and what could as well be an attack, is suspect.
Source: attacks on Terminal-Bench tasks that got a reward (replaced shells and interpreters, preloaded libraries).
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from app.models.shell import ChangedFile, FileAction

__all__ = ["decide"]

_PROGRAMS = frozenset(
    {
        *("sh", "bash", "dash", "ash", "zsh", "busybox", "env", "sudo", "su", "script", "stdbuf"),
        *("xargs", "timeout", "python", "python2", "python3", "pip", "pip3", "pytest", "py.test", "uv", "uvx"),
        *("node", "npm", "npx", "perl", "ruby", "java", "go", "cargo", "rustc", "php", "git"),
        *("make", "curl", "wget", "jq", "tar", "gzip", "unzip", "cat", "ls", "grep", "egrep"),
        *("fgrep", "sed", "awk", "gawk", "mawk", "diff", "cmp", "test", "[", "echo", "tr"),
        *("printf", "head", "tail", "wc", "sort", "uniq", "cut", "mkdir", "rm", "cp", "mv"),
        *("ln", "chmod", "chown", "touch", "find", "tee", "date", "sleep", "stat", "sha256sum", "sha1sum"),
        *("md5sum", "ps", "kill", "pkill", "id", "whoami", "basename", "dirname", "readlink", "realpath", "expr"),
        *("seq", "true", "false", "apt-get", "dpkg", "sqlite3", "gcc", "cc", "ld"),
    }
)
_VERSIONED = re.compile(r"^(python|pip|perl|ruby|node|php|pytest|gcc)-?[0-9.]+$")
_BIN = frozenset({"bin", "sbin"})
_SYSTEM_BIN = ("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin")
_SYSTEM = frozenset({*_SYSTEM_BIN, "/usr", "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local", "/etc"})
"""Folders that are told only when they are gone or replaced as a whole."""
_LOADED = re.compile(
    r"^(ld-linux.*|ld-musl.*|libc\.musl.*|libc-2.*|lib(?:c|m|dl|pthread|util|rt|z|expat|tinfo|ncursesw?|readline|ffi|bz2"
    r"|lzma|uuid|sqlite3|ssl|crypto|selinux|pcre2-8|acl|attr|stdc\+\+|gcc_s|python3)(?:[.-][0-9.]*)?\.so.*|libpython3.*)$"
)
_LOADER_FILES = re.compile(r"^/etc/ld\.so\.(preload|conf|cache|conf\.d/.*)$|^/etc/ld-musl.*\.path$")
_LIBRARIES = ("/lib", "/usr/lib", "/usr/local/lib")
_PYTHON = re.compile(r"/(?:lib(?:64)?|etc)/python[0-9.]*/(?P<rest>.+)$")
_PACKAGES = re.compile(r"^(?:site|dist)-packages/(?P<name>[^/]+)")
_RUNNER = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pytest.py", "py.py", "pluggy.py"})
_START = frozenset({"sitecustomize.py", "usercustomize.py", "sitecustomize", "usercustomize"})
_SHADOWS = frozenset({"pytest", "_pytest", "pluggy", "iniconfig"})
"""Modules that `python -m pytest` would take from the working folder, which comes first on its path."""
_ABOVE = re.compile(r"^/(conftest\.py|\.?pytest\.(ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml)$")
"""What pytest reads above a folder of tests."""
_PYVENV = re.compile(r"^(/usr|/usr/local)?(/s?bin)?/(pyvenv\.cfg|python[0-9]*\._pth)$")
_EXECUTABLE = re.compile(rb"^import[ \t]+(?P<what>.*?)\s*$", re.MULTILINE)
_INSTALLERS = (
    re.compile(rb"(?P<name>__editable___\w+_finder); (?P=name)\.install\(\)"),
    re.compile(rb"_virtualenv"),
    re.compile(
        rb"os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os\.environ\.get\(var, '(?:local|stdlib)'\) == 'local';"
        rb" enabled and __import__\('_distutils_hack'\)(?:\.add_shim\(\))?;?"
    ),
)
"""Whole lines that installers write into `.pth` files: of editable packages, of virtualenv, of setuptools."""
_READ_WHOLE = 64 << 10
"""A file of this size or more has not been read to its end."""


def decide(file: ChangedFile) -> FileAction:
    """What is done with one file that is not as the image has it."""
    pure = PurePosixPath(file.path)
    if _is_judging_program(pure, file) or _LOADER_FILES.match(file.path) or _PYVENV.match(file.path):
        return FileAction.PUT_BACK
    if pure.name in _START or (_LOADED.match(pure.name) and file.path.startswith(_LIBRARIES)):
        return FileAction.PUT_BACK
    if pure.name == "entry_points.txt" and b"pytest11" in _content(file, b"pytest11"):
        return FileAction.SUSPECT
    if found := _PYTHON.search(file.path):
        return _of_python(found["rest"], pure, file)
    return FileAction.SUSPECT if not file.in_image and _is_runner(pure) else FileAction.KEEP


def _is_judging_program(pure: PurePosixPath, file: ChangedFile) -> bool:
    """A shell, interpreter or tool that the image has, changed or covered by another of its name."""
    if pure.as_posix() in _SYSTEM:
        return True
    if pure.parent.name not in _BIN or not (pure.name in _PROGRAMS or _VERSIONED.match(pure.name)):
        return False
    return file.in_image or any(file.image_has(f"{folder}/{pure.name}") for folder in _SYSTEM_BIN)


def _is_runner(pure: PurePosixPath) -> bool:
    """A module in place of the test runner, or the runner's files above all folders."""
    if _ABOVE.match(pure.as_posix()):
        return True
    module = pure.parent.name if pure.name.startswith("__init__.") else pure.name.partition(".")[0]
    return module in _SHADOWS and pure.suffix in (".py", ".pyc", ".so")


def _of_python(rest: str, pure: PurePosixPath, file: ChangedFile) -> FileAction:
    """Of an interpreter's own folder: its modules and its runner are the image's, a runner that is new is suspect."""
    package = _PACKAGES.match(rest)
    if pure.name.endswith(".pth"):
        return _of_path_file(file)
    if package is None or (package["name"] in _RUNNER and file.in_image) or "__pycache__" in rest:
        return FileAction.PUT_BACK if file.in_image or "__pycache__" in rest else FileAction.KEEP
    is_one_module = package["name"] in ("pytest.py", "pluggy.py", "_pytest.py", "iniconfig.py")
    return FileAction.SUSPECT if is_one_module and not file.in_image else FileAction.KEEP


def _of_path_file(file: ChangedFile) -> FileAction:
    """A `.pth` file runs lines that begin with `import` at each start of an interpreter."""
    found = [one["what"] for one in _EXECUTABLE.finditer(_content(file, b"import unread"))]
    known = all(any(line.fullmatch(what) for line in _INSTALLERS) for what in found)
    return FileAction.KEEP if known else FileAction.SUSPECT


def _content(file: ChangedFile, unread: bytes) -> bytes:
    """Its content; `unread` where that could not be read, or not to its end."""
    content = file.read()
    return unread if content is None or len(content) >= _READ_WHOLE else content
