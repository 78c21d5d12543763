"""Decides about files in the folders of modules: which of Python's and Perl's are the image's again. No I/O.

An interpreter takes the first module of a name that it finds, so a new file may cover an old one: from a folder or an
archive that is looked at earlier, or as a library or package beside a source file.
"""

from __future__ import annotations

import re
import sys
from pathlib import PurePosixPath

from app.grading.runner_files import INSTALLERS_LINE, MODULE_SUFFIXES, RUNNER_PACKAGES, module_of
from app.models.shell import ChangedFile, FileAction

__all__ = ["content_of", "decide"]

_PYTHON = re.compile(r"^(?P<lib>.*/(?:lib(?:64)?|etc)/python[0-9.]*)/(?P<rest>.+)$")
_ARCHIVE = re.compile(r"/(?:lib|lib64|bin)/python[0-9]+\.zip(?:/|$)")
_FOLDER = re.compile(r"/(?:lib|lib64)/python[0-9.]*(?:/(?:site|dist)-packages)?$")
"""A folder of modules itself: it counts as changed as a file, as a link, or when it hides all of the image's."""
_ROOTS = re.compile(r"^/(?:usr|usr/local|root/\.local|home/[^/]+/\.local)/lib/")
"""Where the system's Python looks."""
_PACKAGES = re.compile(r"^(?:site|dist)-packages/(?P<name>[^/]+)")
_STANDARD = sys.stdlib_module_names | {
    "test",
    "distutils",
    "lib2to3",
    "asynchat",
    "asyncore",
    "imp",
    "smtpd",
    "lib-dynload",
}
"""What Python's own folder may hold: modules of this version and of some before."""
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
_EXECUTABLE = re.compile(rb"^import[ \t]+(?P<what>.*?)\s*$|(?P<archive>.*)\.(?:zip|egg|whl)\s*$", re.MULTILINE)
_READ_WHOLE = 64 << 10
"""A file of this size or more has not been read to its end."""


def decide(file: ChangedFile, pure: PurePosixPath) -> FileAction | None:
    """What is done with a file of a module folder; None: it is none of them."""
    if _ARCHIVE.search(file.path) or _FOLDER.search(file.path):
        return FileAction.PUT_BACK
    if found := _PYTHON.match(file.path):
        if not (_ROOTS.match(file.path) or file.image_has(found["lib"])):
            return FileAction.KEEP  # an environment that the agent made
        return _of_python(found["lib"], found["rest"], pure, file)
    if found := _PERL.match(file.path):
        return _of_perl(found["rest"], file)
    return None


def _of_python(lib: str, rest: str, pure: PurePosixPath, file: ChangedFile) -> FileAction:
    """The interpreter's modules and its test runner are the image's; a runner that is new is suspect."""
    package = _PACKAGES.match(rest)
    if pure.name.endswith(".pth"):
        return _of_path_file(file)
    if pure.name == "entry_points.txt" and b"pytest11" in content_of(file, b"pytest11"):
        return FileAction.SUSPECT
    if pure.suffix in (".dist-info", ".egg-info") and file.read() is None:
        return FileAction.SUSPECT  # a link: what it leads to may name a plugin
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


def content_of(file: ChangedFile, unread: bytes) -> bytes:
    """Its content; `unread` where that could not be read, or not to its end."""
    content = file.read()
    return unread if content is None or len(content) >= _READ_WHOLE else content


def _covers(pure: PurePosixPath, file: ChangedFile) -> bool:
    """Whether a new module lies beside one of the image that has its name in another form."""
    if pure.suffix not in MODULE_SUFFIXES:
        return False
    module = module_of(pure)
    return any(file.image_has(f"{module}{form}") for form in (".py", "/__init__.py") if f"{module}{form}" != file.path)


def _is_no_standard(rest: str, pure: PurePosixPath) -> bool:
    """Whether a new file of Python's own folder is a module that is not the library's, or may stand for a built-in."""
    first = rest.removeprefix("lib-dynload/").partition("/")[0].partition(".")[0]
    if pure.suffix not in MODULE_SUFFIXES or _NO_MODULE.match(first):
        return False
    return first not in _STANDARD or (first.startswith("_") and "/" not in rest)


def _is_elsewhere(name: str, lib: str, rest: str, file: ChangedFile) -> bool:
    """Whether the image has a package of the runner in another folder, that a new one covers."""
    own = f"{lib}/{rest.partition('/')[0]}"
    folders = ("/usr/lib/python3/dist-packages", *(f"{lib}/{kind}-packages" for kind in ("dist", "site")))
    system = f"/usr/local/lib/{PurePosixPath(lib).name}/site-packages"  # of a home: it is looked at before
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
    """A `.pth` file runs lines that begin with `import` at each start of an interpreter."""
    content = content_of(file, b"import unread")
    found = [one["what"] for one in _EXECUTABLE.finditer(content.replace(b"\r", b"\n"))]
    known = all(what is not None and INSTALLERS_LINE.fullmatch(what) for what in found)
    return FileAction.KEEP if known else FileAction.SUSPECT
