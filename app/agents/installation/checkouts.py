"""A framework that is on no package index: a checkout of its source, beside a Python with its packages."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

from app.agents.framework import Bundle
from app.agents.installation.once import Shelf, digest_of, step
from app.agents.installation.pythons import Wanted, fill
from app.errors import AgentNotSetUp

_RECIPE = "checkout-1"
_NOT_TAKEN = shutil.ignore_patterns(".git", "__pycache__", ".venv", "node_modules", "*.egg-info")
_AUTHORITY = re.compile(r"^(?:[a-z+]+://[^/]*/|[^/@]+@[^/:]+:|file:///?)")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_QUIET = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "GIT_SSH_COMMAND": "ssh -oBatchMode=yes"}


def bundle(shelf: Shelf, name: str, source: str, wanted: Wanted) -> Bundle:
    """See `Installer.checkout`."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        state = _state_of(folder)
    elif _AUTHORITY.match(source):
        if not split_ref(source)[1]:
            raise AgentNotSetUp(
                f"agent {name}: expected a version of its source, as {_shown(source)}@REF; found none, and which one "
                "it is would depend on the day of its installation; name a tag or a whole commit"
            )
        state = source
    else:
        raise AgentNotSetUp(
            f"agent {name}: expected its source as a folder or a URL for git; found {source!r}, which is neither; "
            "correct the setting"
        )

    def add_source(place: Path, site: Path) -> None:
        target = place / "source"
        if folder.is_dir():
            shutil.copytree(folder, target, ignore=_NOT_TAKEN, symlinks=True, ignore_dangling_symlinks=True)
        else:
            _clone(name, source, target)
        (site / f"{name}-source.pth").write_text(os.path.relpath(target, site) + "\n")

    digest = digest_of(name, [wanted.lock, wanted.version, _RECIPE, state])
    place = shelf.ensure(
        name, digest, lambda place: fill(place, name, wanted, beside=lambda site: add_source(place, site))
    )
    return Bundle(name, place)


def _state_of(folder: Path) -> str:
    """Changes when any of its files does."""
    found = hashlib.sha256(str(folder.resolve()).encode())
    for place, folders, names in os.walk(folder):
        skipped = _NOT_TAKEN(place, [*folders, *names])
        folders[:] = sorted(set(folders) - skipped)
        for name in sorted(set(names) - skipped):
            about = os.lstat(Path(place, name))
            found.update(f"{place}/{name}\0{about.st_size}\0{about.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def _clone(name: str, source: str, target: Path) -> None:
    """The one commit that is asked for, without a history. A branch is not asked for: it would move.

    Raises: AgentUnavailable: in git's words.
    """
    url, ref = split_ref(source)
    wanted = ref if _COMMIT.fullmatch(ref) else f"refs/tags/{ref.removeprefix('refs/tags/')}"
    env = {**os.environ, **_QUIET}
    git = ["git", "-C", str(target)]
    target.mkdir()
    step(name, [*git, "init", "--quiet"], env=env)
    step(name, [*git, "fetch", "--quiet", "--depth", "1", url, wanted], env=env)
    step(name, [*git, "checkout", "--quiet", "--detach", "FETCH_HEAD"], env=env)
    shutil.rmtree(target / ".git")


def split_ref(source: str) -> tuple[str, str]:
    """URL and what is asked of it: what follows an `@` in the path; empty when there is none."""
    found = _AUTHORITY.match(source)
    begin = found.end() if found else 0
    path, at, ref = source[begin:].rpartition("@")
    return (source[:begin] + path, ref) if at and path and ref else (source, "")


def version_of(source: str) -> str:
    """What evidence calls it: the tag or commit of a URL; a folder is what it is at the time."""
    ref = split_ref(source)[1] if _AUTHORITY.match(source) and not Path(source).expanduser().is_dir() else ""
    return ref or "checkout"


def _shown(source: str) -> str:
    """The URL without what may be a password."""
    return re.sub(r"^([a-z+]+://)[^/]*@", r"\1…@", source)
