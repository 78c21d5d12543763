"""Copies the shared libraries of a bundle's programs into it, and finds which C library they need."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from app.agents.installation.suitable import Needs
from app.errors import AgentUnavailable

_OF_THE_SYSTEM = re.compile(
    r"^(ld-linux.*|linux-vdso|lib(c|m|dl|rt|util|pthread|resolv|anl|nsl|crypt|nss_.*|BrokenLocale|thread_db))\.so\b"
)
"""Parts of glibc: those of another version would not work with the loader that the environment has."""
_FOUND = re.compile(r"^\t(\S+) => (/\S.*?) \(0x[0-9a-f]+\)$")
_WANTED = re.compile(r"^\t\t\S+ \(GLIBC_(\d+)\.(\d+)(?:\.\d+)?\) => ")
_OWNER = re.compile(r"^\t(/.*):$")
_AT_ONCE = 50
_TIMEOUT_S = 300.0


def carry(name: str, programs: Iterable[Path], into: Path, *, search: Sequence[Path] = ()) -> None:
    """Copy what `programs` are linked with, but for glibc's own, into the folder `into`.

    search: where else libraries are. What is not found is left out: optional parts of packages.

    Raises: AgentUnavailable: no `ldd` here.
    """
    into.mkdir(parents=True, exist_ok=True)
    for line in _describe(name, programs, [into, *search]):
        if (found := _FOUND.match(line)) is None or _OF_THE_SYSTEM.match(found[1]):
            continue
        source, target = Path(found[2]), into / found[1]
        if not target.exists() and not source.is_relative_to(into.parent):
            shutil.copyfile(os.path.realpath(source), target)
            target.chmod(0o755)


def needs(name: str, folders: Sequence[Path], search: Sequence[Path]) -> Needs:
    """What the programs and libraries below `folders` need. Raises: AgentUnavailable: no `ldd` here."""
    newest, ours = (2, 0), False
    for line in _describe(name, (file for folder in folders for file in elf_files(folder)), search):
        if owner := _OWNER.match(line):
            ours = any(Path(owner[1]).is_relative_to(folder) for folder in folders)
        elif ours and (wanted := _WANTED.match(line)):
            newest = max(newest, (int(wanted[1]), int(wanted[2])))
    return Needs(platform.machine(), f"{newest[0]}.{newest[1]}")


def elf_files(folder: Path) -> list[Path]:
    """Programs and shared libraries of this host's architecture below `folder`, found by how they begin."""
    with Path("/proc/self/exe").open("rb") as ours:
        begin = _kind(ours.read(20))
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            file = Path(place, name)
            if file.is_symlink() or not file.is_file():
                continue
            if ".so" not in name and not os.access(file, os.X_OK):
                continue
            with file.open("rb") as reader:
                if _kind(reader.read(20)) == begin:
                    found.append(file)
    return found


def _kind(head: bytes) -> bytes:
    return head[:6] + head[18:20]


def _describe(name: str, files: Iterable[Path], search: Sequence[Path]) -> Iterable[str]:
    """Lines of `ldd -v`, in the words of glibc's."""
    program = shutil.which("ldd")
    if program is None or platform.libc_ver()[0] != "glibc":
        raise AgentUnavailable(
            f"agent {name}: expected a host with glibc and its program ldd; found another, where no bundle for "
            "environments can be made; use an agent that acts from outside"
        )
    every = [str(file) for file in files]
    env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"}
    env["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, search))
    for at in range(0, len(every), _AT_ONCE):
        done = subprocess.run(  # noqa: S603  our own words and paths
            [program, "-v", *every[at : at + _AT_ONCE]],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,  # 1 when one of them is linked statically
            timeout=_TIMEOUT_S,
        )
        yield from done.stdout.splitlines()
