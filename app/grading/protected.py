"""Decides which files changed by an agent are restored from the image before a script judges its container. No I/O.

A task may need almost any change, so only what the judge runs is protected: programs of the system, the dynamic loader
and libraries, the modules of Python and Perl, the test runner, and files that would be found before these. Changes that
may be an installation or an attack are suspect. Source: attacks on Terminal-Bench tasks that got a reward: replaced
shells and interpreters, preloaded libraries, modules earlier on a search path, packages in a cache, programs named in
git's configuration.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterable
from pathlib import PurePosixPath

from app.grading.runner_files import INSTALLERS_LINE, MODULE_SUFFIXES, RUNNER_PACKAGES, module_of, shadows
from app.models.shell import ChangedFile, FileAction

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
_SYSTEM_BIN = ("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin")
_HOME_BIN = re.compile(r"^/(?:root|home/[^/]+)/(?:\.local/|\.cargo/)?bin$")
"""Folders of a home that installers put first on PATH."""
_SYSTEM = frozenset({*_SYSTEM_BIN, "/usr", "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local", "/etc"})
"""Folders that are reported only when they are removed or replaced as a whole."""
_OF_PACKAGES = re.compile(r"^/(?:usr/)?s?bin/|^/etc/alternatives/|^/(?:usr/)?lib(?:32|64|exec)?/(?!cgi-bin/|systemd/)")
"""Places where a system's packages have programs and libraries. A task's product is rarely there, and is named then."""
_LOADED = re.compile(
    r"^(ld-linux.*|ld-musl.*|libc\.musl.*|libc-2.*|lib(?:c|m|dl|pthread|util|rt|z|expat|tinfo|ncursesw?|readline|ffi|bz2"
    r"|lzma|uuid|nss_\w+|sqlite3|ssl|crypto|selinux|pcre2-8|acl|attr|stdc\+\+|gcc_s|python3)(?:[.-][0-9.]*)?\.so.*|libpython3.*)$"
)
_LOADER_FILES = re.compile(r"^/etc/ld\.so\.(preload|conf|cache|conf\.d/.*)$|^/etc/ld-musl.*\.path$")
_LIBRARIES = ("/lib", "/usr/lib", "/usr/local/lib")
_START = frozenset({"sitecustomize", "usercustomize"})
_SHADOWS = frozenset({"pytest", "_pytest", "pluggy", "iniconfig"})
"""Modules that `python -m pytest` would import from the working folder, which is first on its path."""
_ABOVE = re.compile(r"^/(conftest\.py|\.?pytest\.(ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml)$")
"""Files that pytest reads above a folder of tests."""
_PYVENV = re.compile(r"^(/usr|/usr/local)?(/s?bin)?/(pyvenv\.cfg|python[0-9]*\._pth)$")
_SYSTEM_FILES = re.compile(r"^/(?:etc|usr/lib|usr/local)/ssl/openssl\.cnf$|^/etc/nsswitch\.conf$")
"""Configuration that loads a library into almost every program."""
_APT = re.compile(r"^/etc/apt/apt\.conf(?:\.d/|$)")
_OF_ENGINES = frozenset({"/etc/passwd", "/etc/group"})
"""Files that a container engine reads to start a container: a pipe there blocks the engine for all containers."""
_ROOT_SHELL = re.compile(rb"^root:[^\n]*:/(?:usr/)?bin/(?:ba|da|a|z)?sh$", re.MULTILINE)
_CACHES = re.compile(r"^/(?:root|home/[^/]+)/(?:\.cache/(?:uv|pip)|\.npm/_cacache)/")
"""Caches from which a judge's installer would install the test runner without downloading it."""


def _git(words: str) -> re.Pattern[bytes]:
    """Returns a pattern for lines of git's configuration with one of these words, or with an included file."""
    return re.compile(rf"(?:^|\])\s*(?:{words})|^\s*\[include".encode(), re.IGNORECASE | re.MULTILINE)


_GIT = (
    r"fsmonitor|sshcommand|external|textconv|driver|(?:command|program|gitproxy)\s*=|update\s*=\s*!"
    r"|(?:clean|smudge|process)\s*=(?!\s*git-lfs )"
)
_GIT_OF_ALL = rf"{_GIT}|hookspath|templatedir|packobjectshook"
"""Also hooks of all repositories, which run in the judge's, too; a repository's own often belong to the task."""
_CONFIGURATION = (
    (re.compile(r"/\.?gitconfig$|/\.config/git/config$"), _git(_GIT_OF_ALL)),
    (re.compile(r"/config(?:\.worktree)?$"), _git(_GIT)),
    (re.compile(r"/(?:pip\.conf|uv\.toml|\.npmrc)$"), re.compile(rb"index|find-links|registry")),
)
"""Files of tools that test scripts use, and the settings that name a program to run or another package source."""


_PYTHON = re.compile(r"^(?P<lib>.*/(?:lib(?:64)?|etc)/python[0-9.]*)/(?P<rest>.+)$")
_ARCHIVE = re.compile(r"/(?:lib|lib64|bin)/python[0-9]+\.zip(?:/|$)")
_FOLDER = re.compile(r"/(?:lib|lib64)/python[0-9.]*(?:/(?:site|dist)-packages)?$")
"""Path of a module folder itself. It is a changed file only if it is a file, a link or deleted, or was replaced."""
_ROOTS = re.compile(r"^/(?:usr|usr/local|root/\.local|home/[^/]+/\.local)/lib/")
"""Folders where the system's Python looks."""
_PACKAGES = re.compile(r"^(?:site|dist)-packages/(?P<name>[^/]+)")
_STANDARD = sys.stdlib_module_names.union(
    ("test", "distutils", "lib2to3", "asynchat", "asyncore", "imp", "smtpd", "lib-dynload")
)
"""Allowed names in Python's own folder: modules of this version and of some before."""
_NO_MODULE = re.compile(
    r"^(?:config-|_sysconfigdata_|site-packages|dist-packages|turtledemo|idlelib|pydoc_data|ensurepip)"
)
_PERL = re.compile(
    r"^/(?:etc/perl|usr/(?:local/)?(?:lib|share)/(?:[^/]+-linux-\w+/)?(?:perl5?|perl-base))/(?:5[.0-9]+/)?(?P<rest>.+)$"
)
_PERL_CORE = (
    *(f"/usr/lib/{machine}-linux-gnu/perl-base" for machine in ("x86_64", "aarch64")),
    *(f"/usr/share/perl/5.{minor}" for minor in range(26, 46, 2)),
)
_HOOKS = frozenset(
    {
        *("applypatch-msg", "pre-applypatch", "post-applypatch", "pre-commit", "pre-merge-commit", "post-merge"),
        *("prepare-commit-msg", "commit-msg", "post-commit", "pre-rebase", "post-checkout", "pre-push", "update"),
        *("pre-receive", "proc-receive", "post-receive", "post-update", "push-to-checkout", "pre-auto-gc"),
        *("reference-transaction", "post-rewrite", "fsmonitor-watchman", "post-index-change"),
    }
)
_IS_TEMPLATE = re.compile(r"^/usr/(?:local/)?share/git-core/")
_SILENT_HOOKS = ("post-index-change", "reference-transaction")
"""Hooks that git runs where a script only looks: hardly a task's product."""
_OF_PROCESSES = re.compile(r"/proc/[^/]+/(?:task/[^/]+/)?(?:root|cwd)(?:/|$)")
_EXECUTABLE = re.compile(rb"^import[ \t]+(?P<what>.*?)\s*$|(?P<archive>.*)\.(?:zip|egg|whl)\s*$", re.MULTILINE)
_READ_WHOLE = 64 << 10
"""Size from which a file was not read to its end."""


def decide(file: ChangedFile, *, workdir: str = "", stated: str = "", hidden: str = "") -> FileAction:
    """Returns the action for one file that differs from the image.

    workdir: where the judge's script starts. stated: the task's text: files that it names are its product. hidden: the
    folder into which the tests will be put.
    """
    pure = PurePosixPath(file.path)
    if file.path in _OF_ENGINES and not file.deleted and not file.read():
        return FileAction.PUT_BACK
    if _is_judging_program(pure, file, stated) or _LOADER_FILES.match(file.path) or _is_start(pure, file):
        return FileAction.PUT_BACK
    if _LOADED.match(pure.name) and file.path.startswith(_LIBRARIES):
        return FileAction.PUT_BACK
    if (action := _in_module_folder(file, pure)) is not None:
        return action
    if file.removable and (_CACHES.match(file.path) or _is_of_packages(file, stated)):
        return FileAction.PUT_BACK
    is_suspect = _is_suspect(pure, file, workdir, stated) or (hidden and _leads_into(file, hidden))
    return FileAction.SUSPECT if is_suspect else FileAction.KEEP


def _is_judging_program(pure: PurePosixPath, file: ChangedFile, stated: str) -> bool:
    """Whether it is a shell, interpreter or tool of the image, changed or shadowed by another of its name."""
    name = pure.name
    if pure.as_posix() in _SYSTEM:
        return True
    is_usual = _is_usual(name)
    if file.in_image:
        return is_usual and pure.parent.name in ("bin", "sbin")
    if _is_stated(pure, stated) or not (is_usual or file.removable):
        return False
    return _comes_earlier(pure, file)


def _is_usual(name: str) -> bool:
    return name in _PROGRAMS or _VERSIONED.match(name) is not None


def _comes_earlier(pure: PurePosixPath, file: ChangedFile) -> bool:
    """Whether a new program is in a folder of PATH, and the image has one of its name."""
    folder = pure.parent.as_posix()
    is_searched = (
        folder in _SYSTEM_BIN or _HOME_BIN.match(folder) or (pure.parent.name == "bin" and file.image_has(folder))
    )
    return bool(is_searched) and any(file.image_has(f"{one}/{pure.name}") for one in _SYSTEM_BIN)


def _is_stated(pure: PurePosixPath, stated: str) -> bool:
    """Whether the task's text names a program: as `_is_placed`, in quotes, or as a command, program or tool."""
    if _is_placed(pure, stated) or f"`{pure.name}`" in stated:
        return True
    name = re.escape(pure.name)
    words = rf"\b(?:command|program|tool) {name}\b|\b{name} (?:command|program|tool)\b"
    return re.search(words, stated) is not None


def _is_placed(pure: PurePosixPath, stated: str) -> bool:
    """Whether the task's text names a program by path, or by name together with its folder or the one above."""
    if pure.as_posix() in stated:
        return True
    places = "|".join(re.escape(str(one)) for one in pure.parents[:2] if one.name)
    is_named = places and re.search(rf"(?<![\w./-])(?:{places})/?(?![\w/-])", stated)
    return bool(is_named) and re.search(rf"\b{re.escape(pure.name)}\b", stated) is not None


def _leads_into(file: ChangedFile, hidden: str) -> bool:
    """Whether it is a link to the hidden tests, which come later, or to a folder above them, also by others."""
    if not (target := file.target):
        return False
    leads = PurePosixPath("/", posixpath.normpath(posixpath.join(posixpath.dirname(file.path), target)).lstrip("/"))
    tests = PurePosixPath(hidden)
    if leads.is_relative_to(tests) or tests.is_relative_to(leads) or _OF_PROCESSES.match(str(leads)):
        return True
    parts = target.strip("./").split("/")
    return ".." in parts and tests.name in parts


def _is_of_packages(file: ChangedFile, stated: str) -> bool:
    """Whether it is a program or library of the image's system. A deleted one is harmless: its package was removed."""
    if not file.in_image or file.deleted or not _OF_PACKAGES.match(file.path):
        return False
    return not _is_stated(PurePosixPath(file.path), stated)


def _is_start(pure: PurePosixPath, file: ChangedFile) -> bool:
    """Whether an interpreter reads it before everything else."""
    if any(part.partition(".")[0] in _START for part in pure.parts[-2:]):
        return True
    if _PYVENV.match(file.path) or _SYSTEM_FILES.match(file.path):
        return True
    if _APT.match(file.path) and b"Invoke" in _content_of(file, b"Invoke"):
        return True
    return pure.name == "pyvenv.cfg" and file.in_image


def _is_suspect(pure: PurePosixPath, file: ChangedFile, workdir: str, stated: str) -> bool:
    """Whether the task may need this change, but it could also change the judge."""
    if pure.name == "entry_points.txt":
        return b"pytest11" in _content_of(file, b"pytest11")
    for path, what in _CONFIGURATION:
        if path.search(file.path) and not file.deleted:
            return what.search(_content_of(file, b"fsmonitor\nindex")) is not None
    if file.path == "/etc/passwd":
        return _ROOT_SHELL.search(_content_of(file, b"")) is None
    if file.in_image:
        return False
    if _is_usual(pure.name) and not _is_placed(pure, stated) and _comes_earlier(pure, file):
        return True  # named in the text, but not its place: perhaps to be used, not made
    if pure.parent.name == "hooks" and pure.name in _HOOKS:
        return "hook" not in stated.lower() or _IS_TEMPLATE.match(file.path) is not None or pure.name in _SILENT_HOOKS
    if _ABOVE.match(pure.as_posix()):
        return True
    module = module_of(pure).name
    if module in _SHADOWS and (pure.suffix in (".py", ".pyc", ".so") or file.read() is None):
        return True
    return _comes_first(pure, module, workdir, stated)


def _comes_first(pure: PurePosixPath, module: str, workdir: str, stated: str) -> bool:
    """Whether a module in the judge's start folder, not named by the task, has a standard or runner module's name."""
    if f"{module}.py" in stated or f"{module}/" in stated:
        return False
    if not workdir or not pure.is_relative_to(workdir):
        return False
    inside = pure.relative_to(workdir)
    deep = len(inside.parts) - inside.name.startswith("__init__.")
    return deep == 1 and shadows(inside.as_posix(), ())


def comes_first(paths: Iterable[str], workdir: str, stated: str) -> str:
    """Returns the first file handed to a verifier that its Python would import as its own module; empty: none."""
    for path in paths:
        pure = PurePosixPath(path)
        if _comes_first(pure, module_of(pure).name, workdir, stated):
            return path
    return ""


def _in_module_folder(file: ChangedFile, pure: PurePosixPath) -> FileAction | None:
    """Returns the action for a file in a folder of modules; None: it is in none of them.

    An interpreter imports the first module of a name that it finds, so a new file may shadow an old one: from a folder
    or an archive earlier on the path, or as a library or package next to a source file.
    """
    if _ARCHIVE.search(file.path) or _FOLDER.search(file.path):
        return FileAction.PUT_BACK
    if match := _PYTHON.match(file.path):
        if not (_ROOTS.match(file.path) or file.image_has(match["lib"])):
            return FileAction.KEEP  # an environment that the agent made
        return _of_python(match["lib"], match["rest"], pure, file)
    if match := _PERL.match(file.path):
        return _of_perl(match["rest"], file)
    return None


def _of_python(lib: str, rest: str, pure: PurePosixPath, file: ChangedFile) -> FileAction:
    """Restores the interpreter's modules and its test runner from the image; a new runner is suspect."""
    package = _PACKAGES.match(rest)
    if pure.name.endswith(".pth"):
        return _of_path_file(file)
    if pure.name == "entry_points.txt" and b"pytest11" in _content_of(file, b"pytest11"):
        return FileAction.SUSPECT
    if pure.suffix in (".dist-info", ".egg-info") and file.read() is None:
        return FileAction.SUSPECT  # a link: its target may name a plugin
    if "__pycache__" in rest or (not file.in_image and _covers(pure, file)):
        return FileAction.PUT_BACK
    if package is None:
        is_trojan = file.image_has(f"{lib}/os.py") and _is_no_standard(rest, pure)
        return FileAction.PUT_BACK if file.in_image or is_trojan else FileAction.KEEP
    name = package["name"].partition(".")[0]
    if name in RUNNER_PACKAGES and (file.in_image or _is_elsewhere(name, lib, rest, file)):
        return FileAction.PUT_BACK
    is_one_module = package["name"] in ("pytest.py", "pluggy.py", "_pytest.py", "iniconfig.py")
    return FileAction.SUSPECT if is_one_module and not file.in_image else FileAction.KEEP


def _content_of(file: ChangedFile, unread: bytes) -> bytes:
    """Returns its content; `unread` if it could not be read, or not to its end."""
    content = file.read()
    return unread if content is None or len(content) >= _READ_WHOLE else content


def _covers(pure: PurePosixPath, file: ChangedFile) -> bool:
    """Whether a new module is next to one of the image with the same name in another form."""
    if pure.suffix not in MODULE_SUFFIXES:
        return False
    module = module_of(pure)
    return any(file.image_has(f"{module}{form}") for form in (".py", "/__init__.py") if f"{module}{form}" != file.path)


def _is_no_standard(rest: str, pure: PurePosixPath) -> bool:
    """Whether a new file of Python's own folder is not a standard module, or may replace a built-in."""
    first = rest.removeprefix("lib-dynload/").partition("/")[0].partition(".")[0]
    if pure.suffix not in MODULE_SUFFIXES or _NO_MODULE.match(first):
        return False
    return first not in _STANDARD or (first.startswith("_") and "/" not in rest)


def _is_elsewhere(name: str, lib: str, rest: str, file: ChangedFile) -> bool:
    """Whether the image has a package of the runner in another folder, which the new one shadows."""
    own = f"{lib}/{rest.partition('/')[0]}"
    folders = ("/usr/lib/python3/dist-packages", *(f"{lib}/{kind}-packages" for kind in ("dist", "site")))
    system = f"/usr/local/lib/{PurePosixPath(lib).name}/site-packages"  # for a home: searched before it
    return any(
        file.image_has(f"{folder}/{name}{form}")
        for folder in (*folders, system)
        if folder != own
        for form in ("/__init__.py", ".py")
    )


def _of_perl(rest: str, file: ChangedFile) -> FileAction:
    if file.in_image or any(file.image_has(f"{folder}/{rest}") for folder in _PERL_CORE):
        return FileAction.PUT_BACK
    return FileAction.KEEP


def _of_path_file(file: ChangedFile) -> FileAction:
    """Checks a `.pth` file, whose lines that begin with `import` run at each start of an interpreter."""
    content = _content_of(file, b"import unread")
    statements = [one["what"] for one in _EXECUTABLE.finditer(content.replace(b"\r", b"\n"))]
    known = all(what is not None and INSTALLERS_LINE.fullmatch(what) for what in statements)
    return FileAction.KEEP if known else FileAction.SUSPECT
