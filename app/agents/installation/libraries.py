"""Copies the shared libraries of a bundle's programs into it, and determines the C library that they need."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from app.agents.framework import FrameworkBundle
from app.errors import AgentUnavailable, AgentUnsuitable
from app.models.shell import Shell

MANIFEST = "bundle.json"
_ASK_S = 60.0

# glibc prints its version when its loader runs it as a program; that needs no tool of the image.
_ASK = """\
printf 'machine %s\\n' "$(uname -m 2>/dev/null)"
for it in /lib/ld-musl-*.so.1; do [ -e "$it" ] && printf 'musl %s\\n' "$it"; done
getconf GNU_LIBC_VERSION 2>/dev/null && exit 0
for loader in /lib64/ld-linux-*.so.* /lib/ld-linux-*.so.*; do
    [ -x "$loader" ] || continue
    for it in /lib/*-linux-gnu/libc.so.6 /usr/lib/*-linux-gnu/libc.so.6 /lib64/libc.so.6 /usr/lib64/libc.so.6 \\
        /lib/libc.so.6 /usr/lib/libc.so.6; do
        [ -e "$it" ] && "$loader" "$it" 2>/dev/null && exit 0
    done
done
exit 0
"""
_GLIBC = re.compile(r"(?:^glibc|release version) (\d+)\.(\d+)", re.MULTILINE)
_SAME = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of a bundle's programs on their environment."""

    machine: str  # as `uname -m` prints it
    glibc: str  # the oldest, such as `2.28`

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def of(cls, bundle: FrameworkBundle) -> Needs:
        manifest = json.loads((bundle.folder / MANIFEST).read_text())
        return cls(str(manifest["machine"]), manifest["glibc"])


def require(shell: Shell, name: str, needs: Needs) -> None:
    """Checks the requirements of a framework's programs. name: the agent's, for the message.

    An environment whose C library is unknown passes: the framework's own start will show.

    Raises: AgentUnsuitable.
    """
    output = shell.run(_ASK, timeout_s=_ASK_S).text()
    machine = next((line.split()[1] for line in output.splitlines() if line.startswith("machine ") and line[8:]), "")
    if machine and _SAME.get(machine, machine) != needs.machine:
        raise AgentUnsuitable(
            f"agent {name}: expected an environment of the architecture {needs.machine}, as on this host; found "
            f"{machine}; use an image for {needs.machine}, or an agent that acts from outside"
        )
    glibc = _GLIBC.search(output)
    if glibc is None and "musl " not in output:
        return
    if glibc is None:
        raise AgentUnsuitable(
            f"agent {name}: expected an environment with glibc {needs.glibc} or newer; found musl, as in Alpine; "
            "use an image of a distribution with glibc, such as Debian, or an agent that acts from outside"
        )
    if (int(glibc[1]), int(glibc[2])) < _parts(needs.glibc):
        raise AgentUnsuitable(
            f"agent {name}: expected an environment with glibc {needs.glibc} or newer; found {glibc[1]}.{glibc[2]}; "
            "use an image of a newer distribution, or an agent that acts from outside"
        )


def _parts(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor)


_OF_THE_SYSTEM = re.compile(
    r"^(ld-linux.*|linux-vdso|lib(c|m|dl|rt|util|pthread|resolv|anl|nsl|crypt|nss_.*|BrokenLocale|thread_db))\.so\b"
)
"""Parts of glibc: parts of another version would not work with the environment's loader."""
_FOUND = re.compile(r"^\t(\S+) => (/\S.*?) \(0x[0-9a-f]+\)$")
_WANTED = re.compile(r"^\t\t\S+ \(GLIBC_(\d+)\.(\d+)(?:\.\d+)?\) => ")
_OWNER = re.compile(r"^\t(/.*):$")
_AT_ONCE = 50
_TIMEOUT_S = 300.0


def carry(name: str, programs: Iterable[Path], into: Path, *, search: Sequence[Path] = ()) -> None:
    """Copies the libraries that `programs` are linked with, except glibc's own, into the folder `into`.

    search: other folders with libraries. Libraries that are not found are left out: optional parts of packages.

    Raises: AgentUnavailable: no `ldd` here.
    """
    into.mkdir(parents=True, exist_ok=True)
    for line in _describe(name, programs, [into, *search]):
        if (library := _FOUND.match(line)) is None or _OF_THE_SYSTEM.match(library[1]):
            continue
        source, target = Path(library[2]), into / library[1]
        if not target.exists() and not source.is_relative_to(into.parent):
            shutil.copyfile(os.path.realpath(source), target)
            target.chmod(0o755)


def needs(name: str, folders: Sequence[Path], search: Sequence[Path]) -> Needs:
    """Returns the requirements of programs and libraries below `folders`. Raises: AgentUnavailable: no `ldd` here."""
    newest, ours = (2, 0), False
    for line in _describe(name, (file for folder in folders for file in elf_files(folder)), search):
        if owner := _OWNER.match(line):
            ours = any(Path(owner[1]).is_relative_to(folder) for folder in folders)
        elif ours and (version := _WANTED.match(line)):
            newest = max(newest, (int(version[1]), int(version[2])))
    return Needs(platform.machine(), f"{newest[0]}.{newest[1]}")


def elf_files(folder: Path) -> list[Path]:
    """Returns programs and shared libraries of this host's architecture below `folder`, by their first bytes."""
    with Path("/proc/self/exe").open("rb") as ours:
        begin = _kind(ours.read(20))
    files = []
    for place, _, names in os.walk(folder):
        for name in names:
            file = Path(place, name)
            if file.is_symlink() or not file.is_file():
                continue
            if ".so" not in name and not os.access(file, os.X_OK):
                continue
            with file.open("rb") as reader:
                if _kind(reader.read(20)) == begin:
                    files.append(file)
    return files


def _kind(head: bytes) -> bytes:
    return head[:6] + head[18:20]


def _describe(name: str, files: Iterable[Path], search: Sequence[Path]) -> Iterable[str]:
    """Yields lines of `ldd -v`, in glibc's format."""
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
        result = subprocess.run(  # noqa: S603  our own arguments and paths
            [program, "-v", *every[at : at + _AT_ONCE]],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,  # exit code 1 when one of them is linked statically
            timeout=_TIMEOUT_S,
        )
        yield from result.stdout.splitlines()
