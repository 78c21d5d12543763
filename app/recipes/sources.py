"""Fetches a recipe's source as a git repository with one commit: a real commit, or a source release.

A release can replace the row's base commit if the gold and the test patch apply to it. Git then also resolves that
commit's name to it (`refs/replace`), because evaluation scripts check out files by it. The release's code is not run.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from app.errors import DatasetUnavailable, ImageUnavailable, SpecInvalid
from app.host import archives
from app.images.build_sources import FETCH_TIMEOUT_S, fetch_sources
from app.recipes.recipe import Recipe

RETRY = Retrying(
    retry=retry_if_exception_type((ImageUnavailable, DatasetUnavailable)),
    wait=wait_random_exponential(multiplier=0.5, max=10),
    stop=stop_after_attempt(3),
    reraise=True,
)
"""Retry policy: a failed fetch is tried twice more."""
_MOST_RELEASES = 8
_MOST_BYTES = 1 << 30
_GIT_S = 1800.0
_MOVED = re.compile(r"^Hunk #\d+ succeeded at .*offset", re.MULTILINE)
_GIT = (
    *("git", "-c", "protocol.allow=never", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"),
    *(word for kind in ("https", "ssh", "file") for word in ("-c", f"protocol.{kind}.allow=always")),
    *("-c", "user.name=MegaFlow", "-c", "user.email=megaflow@localhost", "-c", "core.autocrlf=false"),
)
_TREE = ("--git-dir=repository.git", "--work-tree=tree")
# As in app/images/build_sources.py: only pip's finder and session, in a process of their own.
_LISTING = """
import json, sys
from pip._internal.commands import create_command

command = create_command("download")
options, _ = command.parse_args(["--no-binary", ":all:", "--ignore-requires-python", "--no-input"])
with command.main_context():
    finder = command._build_package_finder(options, command.get_default_session(options))
    for one in finder.find_all_candidates(sys.argv[1]):
        at = getattr(one.link, "upload_time", None)
        digest = one.link.hash if one.link.hash_name == "sha256" else ""
        print(json.dumps([str(one.version), at.isoformat() if at else "", digest]))
"""


@dataclass(frozen=True, slots=True)
class Source:
    """Fetched source: `folder` has `tree` and `repository.git` with one commit. `label` is a text for users."""

    folder: Path
    label: str
    fetched_bytes: int


def fetched(recipe: Recipe, patches: Mapping[str, str], before: datetime | None, folder: Path, cache: Path) -> Source:
    """Fetches a recipe's source. patches: by name; all must apply. before: when the task was made.

    Raises: SpecInvalid: no source fits, and why; ImageUnavailable, DatasetUnavailable: no answer; ImageBuildFailed.
    """
    if recipe.repository:
        RETRY(_clone, recipe, folder)
        label = f"{recipe.repository} at {recipe.commit[:12]}"
        if refusal := _refusal(folder, patches)[0]:
            raise SpecInvalid(f"{label}: {refusal}")
        return Source(folder, label, size_of(folder / "repository.git"))
    name, _, version = recipe.release.partition("==")
    candidates = [
        (one, digest) for one, at, digest in _listed(name) if one == version or (not version and _is_before(at, before))
    ]
    if not candidates:
        raise SpecInvalid(
            f"expected a source release of {recipe.release} of before {before or 'now'} in the package index;"
            " found none; name a `release` or a `repository` in a recipe's file"
        )
    refusals, moved = [], []
    for number, (one, digest) in enumerate(candidates[:_MOST_RELEASES]):
        place = folder / str(number)
        label = f"{name}=={one}" + ("; with the recipe's patch" if recipe.patch else "")
        try:
            size = _unpack(name, one, digest, place, cache)
        except SpecInvalid as error:
            refusals.append(f"{label}: {error}")
            continue
        refusal, lines_moved = _refusal(place, {"the recipe's patch": recipe.patch} if recipe.patch else {})
        if recipe.patch and not refusal:
            _git(place, "-C", "tree", "apply", "-", given=recipe.patch)
        if not refusal:
            refusal, lines_moved = _refusal(place, patches)
        if not refusal and not lines_moved:
            return _commit(place, label, recipe.commit, before, size)
        if not refusal:
            moved.append((place, f"{label}; patches apply at other lines", recipe.commit, before, size))
        refusals.append(f"{label}: {refusal}")
    if moved:
        return _commit(*moved[0])
    raise SpecInvalid(f"expected a release that the task's patches apply to; found {'; '.join(refusals)}")


def _listed(name: str) -> list[tuple[str, str, str]]:
    """Lists source releases with time and sha256, newest first, without unhashed ones. Raises: ImageUnavailable."""
    lines = RETRY(_index_says, name).split("\n")
    releases = {(version, at, digest) for version, at, digest in (json.loads(line) for line in lines if line)}
    return sorted((one for one in releases if one[2]), key=lambda one: one[1], reverse=True)


def _index_says(name: str) -> str:
    try:
        return subprocess.run(  # noqa: S603  our own arguments; the name does not begin with a dash
            [sys.executable, "-P", "-W", "ignore", "-c", _LISTING, name],
            capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=True,
        ).stdout  # fmt: skip
    except (subprocess.SubprocessError, OSError) as error:
        message = str(getattr(error, "stderr", "") or error).strip()[-300:]
        raise ImageUnavailable(
            f"could not list {name} in the package index: {message}; see `pip config list`"
        ) from error


def _is_before(at: str, before: datetime | None) -> bool:
    return bool(at) and (before is None or datetime.fromisoformat(at) < before)


def _unpack(name: str, version: str, digest: str, place: Path, cache: Path) -> int:
    """Unpacks a release into the place's `tree`; returns the number of fetched bytes. Raises: as `fetched`."""
    place.mkdir(parents=True)
    (place / "sources.txt").write_text(f"{name}=={version} --hash=sha256:{digest}\n")
    [archive] = RETRY(fetch_sources, place, cache=cache)
    try:
        with gzip.open(archive) as opened:
            content = opened.read(_MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise SpecInvalid(f"{archive.name}: expected a .tar.gz; found {error}") from error
    if len(content) > _MOST_BYTES:
        raise SpecInvalid(f"{archive.name}: expected at most {_MOST_BYTES >> 20} MiB; found more")
    archives.unpack(content, place / "unpacked")
    tops = list((place / "unpacked").iterdir())
    if len(tops) != 1 or not tops[0].is_dir():
        raise SpecInvalid(f"{archive.name}: expected one folder at its top; found {len(tops)} entries")
    tops[0].rename(place / "tree")
    return archive.stat().st_size


def _commit(place: Path, label: str, stands_for: str, at: datetime | None, fetched_bytes: int) -> Source:
    """Commits all files, also under the base commit's name; leaves out files that an installation makes again."""
    date = (at or datetime(2000, 1, 1)).isoformat()
    _git(place, "init", "--quiet", "--bare", "--template=", "repository.git")
    _git(place, *_TREE, "add", "--all", "--force", "--", ".", ":!*.egg-info/*")
    dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    _git(place, *_TREE, "commit", "--quiet", "-m", f"{label}, for {stands_for or 'itself'}", env=dates)
    if stands_for:
        head = _git(place, *_TREE, "rev-parse", "HEAD").strip()
        _git(place, *_TREE, "update-ref", f"refs/replace/{stands_for}", head)
    return Source(place, label, fetched_bytes)


def _clone(recipe: Recipe, folder: Path) -> None:
    """Fetches the commit alone, without its history. Raises: DatasetUnavailable, SpecInvalid."""
    folder.mkdir(parents=True, exist_ok=True)
    repository = recipe.repository
    if Path(repository).expanduser().exists():
        repository = f"file://{Path(repository).expanduser().resolve()}"
    _git(folder, "init", "--quiet", "--bare", "--template=", "repository.git")
    try:
        _git(folder, *_TREE, "fetch", "--quiet", "--depth=1", "--no-tags", "--", repository, recipe.commit)
    except SpecInvalid as error:
        raise DatasetUnavailable(f"could not fetch {recipe.commit} of {recipe.repository}: {error}") from error
    commit = _git(folder, *_TREE, "rev-parse", "FETCH_HEAD^{commit}").strip()
    if commit != recipe.commit:
        raise SpecInvalid(f"{recipe.repository}: expected commit {recipe.commit}; found {commit}")
    _git(folder, *_TREE, "update-ref", "--no-deref", "HEAD", commit)
    (folder / "tree").mkdir(exist_ok=True)
    _git(folder, *_TREE, "checkout", "--quiet", "--force", "--detach", commit)


def _refusal(place: Path, patches: Mapping[str, str]) -> tuple[str, bool]:
    """Returns why a patch does not apply (empty: all do), and whether patches apply at other lines than they name."""
    moved = False
    for name, patch in patches.items():
        code, output = _ran(place, "-C", "tree", "apply", "--check", "--verbose", "-", given=patch)
        if code:
            errors = re.findall(r"^error: (?!while searching)(.*)", output, re.MULTILINE)
            return f"{name} does not apply: {(errors or [output.strip()[-500:]])[0]}", False
        moved = moved or bool(_MOVED.search(output))
    return "", moved


def _git(folder: Path, *arguments: str, given: str = "", env: Mapping[str, str] | None = None) -> str:
    """Runs git and returns its output. Raises: SpecInvalid: it did not run, or failed."""
    code, output = _ran(folder, *arguments, given=given, env=env)
    if code:
        raise SpecInvalid(f"git {arguments[0]}: {output.strip()[-500:]}")
    return output


def _ran(folder: Path, *arguments: str, given: str = "", env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Runs git; returns its exit code and output. Raises: SpecInvalid: it did not run."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    ours |= {
        "LC_ALL": "C",  # its messages are parsed
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_LFS_SKIP_SMUDGE": "1",
        "GIT_CEILING_DIRECTORIES": str(folder),
        **(env or {}),
    }
    try:
        result = subprocess.run(  # noqa: S603
            [*_GIT, *arguments],
            cwd=folder, env=ours, input=given.encode(), capture_output=True, timeout=_GIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise SpecInvalid(f"expected git to run; found {error}") from error
    return result.returncode, (result.stdout + result.stderr).decode("utf-8", "replace")


def size_of(folder: Path) -> int:
    """Returns the total bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
