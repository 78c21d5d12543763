"""Makes a folder inside the environment for the framework's own files."""

from __future__ import annotations

import posixpath
import shlex
from dataclasses import dataclass

from app.agents.framework import FrameworkCommand
from app.errors import AgentFailed, EnvironmentFailed
from app.models.shell import Shell

NAME = "megaflow-agent"
_TIMEOUT_S = 60.0

# `$1` is the task's working folder: where commands see it elsewhere, all that is the environment's is below what stands
# before it. A second attempt in the same environment gets a number.
_MAKE = """\
here=$(pwd)
case $here in *"$1") root=${here%"$1"};; *) root=;; esac
umask 077
for parent in "$root/var/tmp" "$root/tmp"; do
    [ -d "$parent" ] || mkdir -p "$parent" 2>/dev/null
    number=
    while [ "${number:-0}" -lt 1000 ]; do
        place=$parent/NAME${number:+-$number}
        if mkdir "$place" 2>/dev/null; then mkdir "$place/home" && printf '%s\\n' "$place" && exit 0; fi
        [ -d "$place" ] || break
        number=$((${number:-1} + 1))
    done
done
echo "neither $root/var/tmp nor $root/tmp can be written to" >&2
exit 1
""".replace("NAME", NAME)

# The shell stays, in the foreground (what runs in its background would be deaf to SIGINT), and outlives a program that
# was asked to end: as long as it lives, what the program left behind is known as started by it, and dies with it.
_RUN = """\
place=$1; shift
trap : TERM
if [ -f "$place/stdin" ]; then exec <"$place/stdin"; else exec </dev/null; fi
if [ -p "$place/stderr" ]; then "$@" 2>"$place/stderr"; else "$@" 2>&1; fi
code=$?
[ -e "$place/stop" ] || exit "$code"
: >"$place/over"
exec sleep 1000000
"""


@dataclass(frozen=True, slots=True)
class AgentHome:
    """`place` inside; the framework's home is in it, and its other streams."""

    place: str

    @property
    def home(self) -> str:
        return f"{self.place}/home"

    @classmethod
    def made(cls, shell: Shell, workdir: str) -> AgentHome:
        """Raises: EnvironmentFailed: gone, or there is no place."""
        result = shell.run(f"set -- {shlex.quote(workdir)}\n{_MAKE}", timeout_s=_TIMEOUT_S)
        place = result.stdout.decode("utf-8", "replace").strip()
        if not result.ok or not place.startswith("/"):
            raise EnvironmentFailed(f"expected a folder for the agent inside; found none: {result.text()[-500:]}")
        return cls(place)

    def furnish(self, shell: Shell, command: FrameworkCommand) -> None:
        """Put the command's files into the home, readable by whom commands run as alone, and its input.

        Raises: EnvironmentFailed; AgentFailed: they cannot be written.
        """
        for name, content in command.files.items():
            self._write(shell, posixpath.join(self.home, _inner(name)), content)
        if command.stdin:
            self._write(shell, f"{self.place}/stdin", command.stdin)
        # Or else there is one stream.
        shell.run(f"mkfifo -m 600 {shlex.quote(self.place)}/stderr", timeout_s=_TIMEOUT_S)

    def _write(self, shell: Shell, file: str, content: bytes) -> None:
        folder = shlex.quote(posixpath.dirname(file))
        command = f"umask 077; mkdir -p {folder} && cat >{shlex.quote(file)}"
        result = shell.run(command, timeout_s=_TIMEOUT_S, stdin=content)
        if not result.ok:
            raise AgentFailed(f"expected to write {file} in the environment; found {result.text()[-500:]}")

    def announce_stop(self, shell: Shell) -> None:
        """Before the program is asked to end. Raises: EnvironmentFailed."""
        shell.run(f": >{shlex.quote(self.place)}/stop", timeout_s=_TIMEOUT_S)

    def has_stopped(self, shell: Shell) -> bool:
        """Whether it did, after that. Raises: EnvironmentFailed."""
        return shell.run(f"test -e {shlex.quote(self.place)}/over", timeout_s=_TIMEOUT_S).ok

    def argv(self, command: FrameworkCommand) -> list[str]:
        """What is started for `command`: its errors go to the pipe, its input is what was put there."""
        return ["/bin/sh", "-c", _RUN, "sh", self.place, *command.argv]

    @property
    def errors(self) -> list[str]:
        """What is started beside it, for what it writes as errors."""
        return ["/bin/sh", "-c", 'if [ -p "$1" ]; then exec cat "$1"; fi', "sh", f"{self.place}/stderr"]


def _inner(name: str) -> str:
    """Raises: AgentFailed: it leads out of the home."""
    clean = posixpath.normpath(name)
    if clean.startswith(("/", "../")) or clean in ("..", "."):
        raise AgentFailed(f"expected the name of a file below the framework's home; found {name!r}")
    return clean
