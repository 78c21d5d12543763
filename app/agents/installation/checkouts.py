"""Installs a framework that is on no package index: a checkout of its source beside a Python with its packages."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from app.agents.framework import FrameworkBundle
from app.agents.installation.once import ToolStore, digest_of, step
from app.agents.installation.pythons import VenvRequest, fill
from app.errors import AgentNotSetUp

_RECIPE = "checkout-1"
_NOT_TAKEN = shutil.ignore_patterns(".git", "__pycache__", ".venv", "node_modules", "*.egg-info")
_AUTHORITY = re.compile(r"^(?:[a-z+]+://[^/]*/|[^/@]+@[^/:]+:|file:///?)")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_QUIET = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "GIT_SSH_COMMAND": "ssh -oBatchMode=yes"}


def bundle(tool_store: ToolStore, name: str, source: str, wanted: VenvRequest) -> FrameworkBundle:
    """See `Installer.checkout`."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        state = _content_of(folder)
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
    place = tool_store.ensure(
        name, digest, lambda place: fill(place, name, wanted, beside=lambda site: add_source(place, site))
    )
    return FrameworkBundle(name, place)


def _content_of(folder: Path) -> str:
    """A digest of the files that a bundle takes: the same for another export of the same content."""
    seen = hashlib.sha256()
    for path, about in _files(folder):
        seen.update(
            f"{path}\0{about.st_mode}\0{about.st_size}\0{about.st_mtime_ns}\0".encode("utf-8", "surrogateescape")
        )
    return _read_all(folder, seen.hexdigest())


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for place, folders, names in os.walk(folder):
        skipped = _NOT_TAKEN(place, [*folders, *names])
        folders[:] = sorted(set(folders) - skipped)
        for name in sorted({*names, *(one for one in folders if Path(place, one).is_symlink())} - skipped):
            yield Path(place, name), os.lstat(Path(place, name))


@lru_cache(maxsize=4)
def _read_all(folder: Path, _seen: str) -> str:
    """Digest of paths, executable bits and contents. _seen: sizes and times; files are read again when they change."""
    found = hashlib.sha256()
    for path, about in _files(folder):
        head = f"{path.relative_to(folder)}\0{about.st_mode & stat.S_IXUSR}\0"
        if stat.S_ISLNK(about.st_mode):
            content = os.fsencode(path.readlink())
        else:
            content = path.read_bytes() if stat.S_ISREG(about.st_mode) else b""
        found.update(head.encode("utf-8", "surrogateescape") + hashlib.sha256(content).digest())
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
    """What evidence calls it: the tag or commit of a URL; the commit of a folder (`-dirty` when files of it were
    changed), and a digest of its content where git knows none."""
    folder = Path(source).expanduser()
    if source and folder.is_dir():
        return _commit_of(folder) or f"content-{_content_of(folder)[:12]}"
    return (split_ref(source)[1] if _AUTHORITY.match(source) else "") or "checkout"


def _commit_of(folder: Path) -> str:
    """Empty for an export, and where git is missing or refuses the folder."""
    if not (folder / ".git").exists():
        return ""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, env={**os.environ, **_QUIET})  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _shown(source: str) -> str:
    """The URL without what may be a password."""
    return re.sub(r"^([a-z+]+://)[^/]*@", r"\1…@", source)
