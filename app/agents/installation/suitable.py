"""Checks whether an environment can run a bundle: architecture and C library, asked by a POSIX shell."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from app.agents.framework import FrameworkBundle
from app.errors import AgentUnsuitable
from app.models.shell import Shell

MANIFEST = "bundle.json"
_TIMEOUT_S = 60.0

# glibc tells its version when its loader runs it as a program; that needs no tool of the image.
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
    """What a bundle's programs need of the environment that they run in."""

    machine: str  # as `uname -m` says
    glibc: str  # the oldest, such as `2.28`

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def of(cls, bundle: FrameworkBundle) -> Needs:
        told = json.loads((bundle.folder / MANIFEST).read_text())
        return cls(str(told["machine"]), told["glibc"])


def require(shell: Shell, bundle: FrameworkBundle) -> None:
    """For `Framework.suits`: what was found out about the bundle when it was installed.

    Raises: AgentUnsuitable: what was expected, found, and what to try.
    """
    require_libc(shell, bundle.name, Needs.of(bundle))


def require_libc(shell: Shell, name: str, needs: Needs) -> None:
    """The same for needs that are known otherwise. `name`: the agent's, for the message.

    An environment that does not tell its C library is let pass: the framework's own start will show.

    Raises: AgentUnsuitable.
    """
    told = shell.run(_ASK, timeout_s=_TIMEOUT_S).text()
    machine = next((line.split()[1] for line in told.splitlines() if line.startswith("machine ") and line[8:]), "")
    if machine and _SAME.get(machine, machine) != needs.machine:
        raise AgentUnsuitable(
            f"agent {name}: expected an environment of the architecture {needs.machine}, as on this host; found "
            f"{machine}; use an image for {needs.machine}, or an agent that acts from outside"
        )
    found = _GLIBC.search(told)
    if found is None and "musl " not in told:
        return
    if found is None:
        raise AgentUnsuitable(
            f"agent {name}: expected an environment with glibc {needs.glibc} or newer; found musl, as in Alpine; "
            "use an image of a distribution with glibc, such as Debian, or an agent that acts from outside"
        )
    if (int(found[1]), int(found[2])) < _parts(needs.glibc):
        raise AgentUnsuitable(
            f"agent {name}: expected an environment with glibc {needs.glibc} or newer; found {found[1]}.{found[2]}; "
            "use an image of a newer distribution, or an agent that acts from outside"
        )


def _parts(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor)
