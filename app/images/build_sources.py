"""Fetches the source archives named in a build context's `sources.txt` from the user's package index.

`docker build` runs without a network, so archives are put into the context before. pip is used because the user
has configured pip: index addresses, certificates, proxies, credentials. Not through `pip download`, which *runs*
an archive's build code to learn its metadata: nothing of a dataset may run on the host. Only pip's finder and session
are used, in a process of their own; the archives stay closed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from app.errors import ImageBuildFailed, ImageUnavailable

SOURCES_FILE = "sources.txt"
FETCH_TIMEOUT_S = 300.0
"""Time for all archives of one context together."""

_PINNED = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.!+_-]+)(?P<options>(\s+--hash=\S+)+)"
)
_SHA256 = re.compile(r"--hash=sha256:([0-9a-f]{64})")

# Runs in a child: pip keeps global state (logging, warnings, signal handlers). Reads [[name, version, folder], ...] on
# stdin, puts archives into the folders. Several indexes may disagree on a version's archive, so every
# different one is fetched and the caller's hashes decide.
_PIP_PROGRAM = """
import json, logging, os, sys
from pip._internal.commands import create_command
from pip._vendor.packaging.version import Version


def fetch(session, finder, name, version, digests, folder):
    candidates = [found for found in finder.find_all_candidates(name) if found.version == Version(version)]
    links = {found.link.url_without_fragment: found.link for found in candidates}
    for number, link in enumerate(links.values()):
        if link.hash_name == "sha256" and link.hash not in digests:
            continue
        reply = session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
        reply.raise_for_status()
        os.makedirs(os.path.join(folder, str(number)))
        with open(os.path.join(folder, str(number), os.path.basename(link.filename)), "wb") as file:
            file.writelines(reply.iter_content(1 << 16))


logging.basicConfig(level=logging.WARNING, format="%(message)s")
logging.getLogger("pip._internal.index.collector").setLevel(logging.DEBUG)  # to pip an unreachable index is no error
command = create_command("download")
options, _ = command.parse_args(["--no-binary", ":all:", "--ignore-requires-python", "--no-input"])
with command.main_context():
    session = command.get_default_session(options)
    finder = command._build_package_finder(options, session)
    for requirement in json.load(sys.stdin):
        fetch(session, finder, *requirement)
"""


@dataclass(frozen=True, slots=True)
class _Requirement:
    name: str
    version: str
    digests: frozenset[str]


def fetch_sources(context: Path, *, cache: Path | None = None) -> list[Path]:
    """Puts the archives that `context/sources.txt` names into `context/sources/`. Returns their paths.

    Each line is a requirement as pip writes it: `name==version --hash=sha256:...`. An archive that is already in place
    or in `cache` (a folder shared by builds; created) with the right hash is not fetched again. Without a `sources.txt`
    there is nothing to do: the empty list.

    Raises: ImageBuildFailed: a malformed line, no archive with such a hash; ImageUnavailable: no answer from the index.
    """
    listing = context / SOURCES_FILE
    if not listing.is_file():
        return []
    requirements = _read_listing(listing)
    folder = context / "sources"
    folder.mkdir(exist_ok=True)
    placed = {need: _find(need, [folder, *([cache] if cache else [])]) for need in requirements}
    missing = [need for need, path in placed.items() if path is None]
    if missing:
        with tempfile.TemporaryDirectory(prefix="megaflow-sources-") as scratch:
            complaints = _fetch(missing, Path(scratch))
            for number, need in enumerate(missing):
                placed[need] = _keep(_choose(need, Path(scratch, str(number)), complaints), cache or folder)
    return [_place(path, folder) for path in placed.values() if path is not None]


def _read_listing(listing: Path) -> list[_Requirement]:
    lines = (
        line.split(" #")[0].strip() for line in listing.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    )
    return [_requirement(line, listing) for line in lines if line and not line.startswith("#")]


def _requirement(line: str, listing: Path) -> _Requirement:
    match = _PINNED.fullmatch(line)
    digests = frozenset(_SHA256.findall(match["options"])) if match else frozenset()
    if not match or not digests:
        raise ImageBuildFailed(
            f"{listing}: expected `name==version --hash=sha256:<64 hex digits>`, found {line!r}; "
            "try `pip hash` on the source archive"
        )
    return _Requirement(match["name"], match["version"], digests)


def _find(need: _Requirement, folders: Iterable[Path]) -> Path | None:
    candidates = (path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir()) if path.is_file())
    return next((path for path in candidates if _sounds_like(need, path) and _sha256(path) in need.digests), None)


def _sounds_like(need: _Requirement, path: Path) -> bool:
    """Whether a file's name fits, to avoid hashing a whole cache. Archive names may spell `-`, `_` and `.` alike."""
    spelled = re.sub(r"[-_.]+", "-", f"{need.name}-{need.version}").lower()
    return re.sub(r"[-_.]+", "-", path.name).lower().startswith(spelled)


def _fetch(needs: list[_Requirement], scratch: Path) -> str:
    question = [
        [need.name, need.version, sorted(need.digests), str(scratch / str(number))] for number, need in enumerate(needs)
    ]
    names = ", ".join(f"{need.name}=={need.version}" for need in needs)
    try:
        # -P and not -I: pip's own variables must reach it, the current folder must not shadow its modules.
        answer = subprocess.run(  # noqa: S603
            [sys.executable, "-P", "-W", "ignore", "-c", _PIP_PROGRAM],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=FETCH_TIMEOUT_S,
            check=True,
        )
    except subprocess.TimeoutExpired as late:
        raise ImageUnavailable(
            f"the package index did not deliver {names} in {FETCH_TIMEOUT_S:.0f} s; try again, or see `pip config list`"
        ) from late
    except subprocess.CalledProcessError as failed:
        tail = _tail(failed.stderr)
        fix = "install pip beside megaflow" if "No module named 'pip" in tail else "see `pip config list`"
        raise ImageUnavailable(f"could not fetch {names} from the package index: {tail}; {fix}") from failed
    return _tail(answer.stderr)


def _tail(said: str) -> str:
    lines = said.strip().splitlines()
    errors = [line for line in lines if "Could not" in line] or lines
    return " | ".join(errors[-2:])[:600] or "no message"


def _choose(need: _Requirement, folder: Path, complaints: str) -> Path:
    offered = list(folder.glob("*/*"))
    for path in offered:
        if _sha256(path) in need.digests:
            return path
    # Other archives offered: the recipe is wrong. None offered: the index may be temporarily out of reach.
    raise (ImageBuildFailed if offered else ImageUnavailable)(
        f"expected a source archive of {need.name}=={need.version} with the sha256 that {SOURCES_FILE} names; "
        f"the package index offers none (pip: {complaints}); `pip config list` shows the index in use"
    )


def _keep(archive: Path, folder: Path) -> Path:
    """Copies into `folder` under the index's name for the archive. A reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / archive.name
    descriptor, partial = tempfile.mkstemp(dir=folder, prefix=".partial-")
    os.close(descriptor)
    shutil.copyfile(archive, partial)
    os.replace(partial, target)
    return target


def _place(archive: Path, folder: Path) -> Path:
    target = folder / archive.name
    if archive != target:
        shutil.copyfile(archive, target)
    target.chmod(0o644)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
