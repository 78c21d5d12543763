"""Installs a framework that is on no package index: a checkout of its source, and a Python with its packages."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from app.agents.framework import FrameworkBundle
from app.agents.installation.once import ToolStore, digest_of, step
from app.agents.installation.pythons import VenvRequest, fill
from app.errors import AgentNotSetUp

_RECIPE = "checkout-1"
_AUTHORITY = re.compile(r"^(?:[a-z+]+://[^/]*/|[^/@]+@[^/:]+:|file:///?)")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_QUIET = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "GIT_SSH_COMMAND": "ssh -oBatchMode=yes"}


def bundle(tool_store: ToolStore, name: str, source: str, wanted: VenvRequest) -> FrameworkBundle:
    """See `Installer.checkout`."""
    ref = split_ref(source)[1]
    if not ref:
        raise AgentNotSetUp(
            f"agent {name}: expected its source as a URL for git with a version, URL@REF; found {_shown(source)!r}; "
            "name a tag or a whole commit (of a clone on this host: file:///FOLDER@REF)"
        )

    def add_source(place: Path, site: Path) -> None:
        target = place / "source"
        _clone(name, source, target)
        (site / f"{name}-source.pth").write_text(os.path.relpath(target, site) + "\n")

    # A commit is the same from every source.
    state = ref if _COMMIT.fullmatch(ref) else source
    digest = digest_of(name, [wanted.lock, wanted.version, _RECIPE, state])
    place = tool_store.ensure(
        name, digest, lambda place: fill(place, name, wanted, beside=lambda site: add_source(place, site))
    )
    return FrameworkBundle(name, place)


def _clone(name: str, source: str, target: Path) -> None:
    """Fetches the one requested commit, without history. Branches are not supported, since they move.

    Raises: AgentUnavailable: with git's message.
    """
    url, ref = split_ref(source)
    git_ref = ref if _COMMIT.fullmatch(ref) else f"refs/tags/{ref.removeprefix('refs/tags/')}"
    env = {**os.environ, **_QUIET}
    git = ["git", "-C", str(target)]
    target.mkdir()
    step(name, [*git, "init", "--quiet"], env=env)
    step(name, [*git, "fetch", "--quiet", "--depth", "1", url, git_ref], env=env)
    step(name, [*git, "checkout", "--quiet", "--detach", "FETCH_HEAD"], env=env)
    shutil.rmtree(target / ".git")


def split_ref(source: str) -> tuple[str, str]:
    """Returns the URL and its ref: the text after an `@` in the path; empty when there is none, or it is no URL."""
    authority = _AUTHORITY.match(source)
    if authority is None:
        return source, ""
    path, at, ref = source[authority.end() :].rpartition("@")
    return (source[: authority.end()] + path, ref) if at and path and ref else (source, "")


def version_of(source: str) -> str:
    """Returns the version for evidence: the tag or commit."""
    return split_ref(source)[1] or "checkout"


def _shown(source: str) -> str:
    return re.sub(r"^([a-z+]+://)[^/]*@", r"\1…@", source)
