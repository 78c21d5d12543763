"""crun: where it is, and how it is loaded in half of the time.

To load crun takes as long as all that it does. Most of its libraries are there for one: systemd's, by which it talks to
a bus about control groups. Whoever keeps control groups himself can do without; an empty library of the same name, with
the functions that crun looks for, is loaded in its place then. A crun without that library (upstream's static one, if
it comes first in PATH) is sooner still, and needs nothing of this.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

import structlog

from app.environments import compiling

log = structlog.get_logger()

_ELSEWHERE = "/usr/local/sbin:/usr/sbin:/sbin"
_NAME = "libsystemd.so.0"
_NEEDED = re.compile(r"\bUND (sd_\w+)@(\w+)")
_PATIENCE_S = 60.0


def find(name: str = "crun") -> Path | None:
    """A runtime's program on this host, also where a user's PATH does not lead."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_ELSEWHERE}")
    return None if found is None else Path(found)


def light(program: Path, cache: Path) -> Path | None:
    """A folder below `cache` for LD_LIBRARY_PATH with which crun is loaded sooner; made when it is missing.

    Good for `program` as it is now: to be asked for at each use. Only where crun is told to leave control groups alone,
    or to keep them in the file system (its default): not with `--systemd-cgroup`. None: it needs none, or none can be
    made here (no compiler, another crun than expected), or somebody else may have written what is there; a process
    that was told so once does not try again.
    """
    about = program.stat()
    return _light(program, about.st_mtime_ns, about.st_size, cache)


@functools.lru_cache(maxsize=16)
def _light(program: Path, changed_ns: int, size_bytes: int, cache: Path) -> Path | None:
    key = hashlib.sha256(f"{program}\0{changed_ns}\0{size_bytes}".encode()).hexdigest()[:16]
    folder = cache / f"light-{key}"
    try:
        if (folder / _NAME).exists():
            if nobody_elses(cache, folder, folder / _NAME):
                return folder
            log.warning("crun.loaded_whole", reason=f"somebody else may write to {cache}; remove it, or take that away")
            return None
        functions = _functions(program)
        if functions:
            _make(functions, program, folder)
    except (OSError, subprocess.SubprocessError, compiling.NotCompiled) as error:
        said = getattr(error, "stderr", None) or b""
        log.info("crun.loaded_whole", reason=str(error), said=said.decode("utf-8", "replace")[-500:])
        return None
    return folder if functions else None


def nobody_elses(*places: Path) -> bool:
    """Whether only we and root can have written there: what is loaded runs as we do."""
    found = [place.lstat() for place in places]
    return all(one.st_uid in (0, os.geteuid()) and not one.st_mode & 0o022 for one in found)


def _functions(program: Path) -> dict[str, list[str]]:
    """What it wants of systemd's library, by version."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, version in _NEEDED.findall(_told("readelf", "--dyn-syms", "--wide", str(program))):
        found[version].append(name)
    return found


def _make(functions: dict[str, list[str]], program: Path, folder: Path) -> None:
    """In a folder of our own, tried, then moved to its place: another process sees none of it or all."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    with tempfile.TemporaryDirectory(prefix=".light-", dir=folder.parent) as scratch:
        made, source, versions = Path(scratch, "made"), Path(scratch, "empty.c"), Path(scratch, "versions")
        made.mkdir(mode=0o755)
        names = sorted(name for found in functions.values() for name in found)
        source.write_text("".join(f"long {name}(void) {{ return -38; /* no such function */ }}\n" for name in names))
        versions.write_text("".join(f"{key} {{ global: {'; '.join(found)}; }};\n" for key, found in functions.items()))
        script = f"-Wl,-soname,{_NAME},--version-script={versions}"
        compiling.compile_to(made / _NAME, [source], ("-shared", "-nostdlib", "-O2", "-s", script))
        _told(str(program), "--version", libraries=made)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / _NAME).exists():  # else another process was sooner
                raise


def _told(*command: str, libraries: Path | None = None) -> str:
    variables = os.environ | ({} if libraries is None else {"LD_LIBRARY_PATH": str(libraries)})
    done = subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE_S, env=variables)  # noqa: S603
    return done.stdout.decode("utf-8", "replace")
