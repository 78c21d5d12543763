"""Runs a framework's process inside the environment and copies its output into files on the worker."""

from __future__ import annotations

import posixpath
import shlex
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from app.agents.framework import FrameworkCommand, Stop
from app.agents.running.clock import Clock, await_end
from app.agents.running.outputs import Output, Outputs
from app.errors import AgentFailed, DiskFull, EnvironmentFailed, StationError
from app.models.shell import CancelToken, InteractiveProgram, Shell

NAME = "megaflow-agent"
_TIMEOUT_S = 60.0

# `$1` is the task's working folder. Where commands see it at another path, the prefix before it is the environment's
# root. A second attempt in the same environment gets a number.
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

# The shell stays in the foreground (background processes would ignore SIGINT) and outlives a program that got SIGTERM.
# While it lives, processes that the program left behind count as its children and die with it.
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
    """Folder of the agent inside, at `place`; contains the framework's home and its other streams."""

    place: str

    @property
    def home(self) -> str:
        return f"{self.place}/home"

    @classmethod
    def made(cls, shell: Shell, workdir: str) -> AgentHome:
        """Raises: EnvironmentFailed: the environment is gone, or no folder is writable."""
        result = shell.run(f"set -- {shlex.quote(workdir)}\n{_MAKE}", timeout_s=_TIMEOUT_S)
        place = result.stdout.decode("utf-8", "replace").strip()
        if not result.ok or not place.startswith("/"):
            raise EnvironmentFailed(f"expected a folder for the agent inside; found none: {result.text()[-500:]}")
        return cls(place)

    def furnish(self, shell: Shell, command: FrameworkCommand) -> None:
        """Writes the command's files into the home, readable only by the user that runs commands, and its input.

        Raises: EnvironmentFailed; AgentFailed: they cannot be written.
        """
        for name, content in command.files.items():
            self._write(shell, posixpath.join(self.home, _inner(name)), content)
        if command.stdin:
            self._write(shell, f"{self.place}/stdin", command.stdin)
        # Without the pipe, stderr goes to stdout.
        shell.run(f"mkfifo -m 600 {shlex.quote(self.place)}/stderr", timeout_s=_TIMEOUT_S)

    def _write(self, shell: Shell, file: str, content: bytes) -> None:
        folder = shlex.quote(posixpath.dirname(file))
        command = f"umask 077; mkdir -p {folder} && cat >{shlex.quote(file)}"
        result = shell.run(command, timeout_s=_TIMEOUT_S, stdin=content)
        if not result.ok:
            raise AgentFailed(f"expected to write {file} in the environment; found {result.text()[-500:]}")

    def announce_stop(self, shell: Shell) -> None:
        """Marks that the program is about to get SIGTERM. Raises: EnvironmentFailed."""
        shell.run(f": >{shlex.quote(self.place)}/stop", timeout_s=_TIMEOUT_S)

    def has_stopped(self, shell: Shell) -> bool:
        """Whether the program has ended since `announce_stop`. Raises: EnvironmentFailed."""
        return shell.run(f"test -e {shlex.quote(self.place)}/over", timeout_s=_TIMEOUT_S).ok

    def argv(self, command: FrameworkCommand) -> list[str]:
        """Returns the argv for `command`: its errors go to the pipe, its input is the file that `furnish` wrote."""
        return ["/bin/sh", "-c", _RUN, "sh", self.place, *command.argv]

    @property
    def errors(self) -> list[str]:
        """The command line of the second process, which reads the program's stderr."""
        return ["/bin/sh", "-c", 'if [ -p "$1" ]; then exec cat "$1"; fi', "sh", f"{self.place}/stderr"]


def _inner(name: str) -> str:
    """Raises: AgentFailed: the path leads out of the home."""
    clean = posixpath.normpath(name)
    if clean.startswith(("/", "../")) or clean in ("..", "."):
        raise AgentFailed(f"expected the name of a file below the framework's home; found {name!r}")
    return clean


log = structlog.get_logger(__name__)

_GRACE_S = 3.0  # between SIGTERM and SIGKILL
_LOOK_S = 0.25  # only the reader may close a stream, so it checks this often
_SILENCE_S = 1.0  # after this time without output its exit code is requested: a child may hold the output open
_ASK_S = 0.1
_LAST_WORDS_S = 1.0  # for stderr, after the program has ended
_PROBE_S = 30.0
_KILLED = -9


def run_inside(
    command: FrameworkCommand,
    agent_home: AgentHome,
    shell: Shell,
    *,
    outputs: Outputs,
    clock: Clock,
    cancel: CancelToken,
) -> tuple[Stop, int]:
    """Runs `command` inside until it ends, its time is up, or `cancel` is set. Returns what ended it and the exit code.

    The code is negative when a signal killed it. After a timeout no process that it started is left. If it ended by
    itself, its background processes live on.

    Raises: EnvironmentFailed, or other shell errors when it is gone; DiskFull: for its outputs on this host.
    """
    bell = threading.Event()
    errors = _OutputReader(shell.stream(agent_home.errors), outputs, outputs.stderr, bell)
    try:
        program = shell.stream(agent_home.argv(command), env=command.env)
        main = _OutputReader(program, outputs, outputs.stdout, bell)
        try:
            by = await_end(bell, lambda: main.over.is_set() or errors.full is not None, clock, cancel)
            if by is not Stop.ITSELF:
                _ask_to_end(main, agent_home, shell, cancel)
        finally:
            main.end()
    finally:
        errors.over.wait(_LAST_WORDS_S)
        errors.end()
    if by is Stop.CANCEL:  # the cancel itself may have broken the environment
        return by, _KILLED
    for reader in (main, errors):
        if reader.full is not None:
            raise DiskFull(f"the outputs of the agent cannot be kept: {reader.full}.") from reader.full
    if main.fault is not None:
        # Killing all processes inside also cuts the stream; the environment itself knows whether it lives.
        shell.run("true", timeout_s=_PROBE_S)
        log.warning("agent.stream_lost", reason=str(main.fault))
    return by, main.returncode


def _ask_to_end(main: _OutputReader, agent_home: AgentHome, shell: Shell, cancel: CancelToken) -> None:
    """Sends SIGTERM, and waits for the last files; does not wait when the environment itself is being ended."""
    until = time.monotonic() + _GRACE_S
    with suppress(StationError):
        agent_home.announce_stop(shell)
        main.stream.signal(signal.SIGTERM)
        while time.monotonic() < until and not cancel.is_set():
            if main.over.wait(_ASK_S) or agent_home.has_stopped(shell):
                return


@dataclass
class _OutputReader:
    """Reads one stream to its end in its own thread."""

    stream: InteractiveProgram
    outputs: Outputs
    output: Output
    bell: threading.Event
    over: threading.Event = field(default_factory=threading.Event)
    fault: StationError | None = None
    full: OSError | None = None
    returncode: int = _KILLED

    def __post_init__(self) -> None:
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._work, name="agent-output", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._enough.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            code = self._read()
            if code is not None:
                self.returncode = 128 - code if 128 < code < 128 + signal.NSIG else code
        except StationError as error:
            self.fault = error
        finally:
            self.over.set()
            self.bell.set()
            with suppress(StationError):
                self.stream.close()

    def _read(self) -> int | None:
        heard, code = time.monotonic(), None
        while not self._enough.is_set():
            piece = self.stream.read(_LOOK_S)
            if piece:
                heard = time.monotonic()
                self._keep(piece)
            elif piece is not None or code is not None:
                return self._exit_code() if code is None else code
            elif time.monotonic() - heard >= _SILENCE_S:
                heard, code = time.monotonic(), self.stream.wait(0.0)
        return None

    def _exit_code(self) -> int | None:
        while not self._enough.is_set():
            if (code := self.stream.wait(_LOOK_S)) is not None:
                return code
        return None

    def _keep(self, data: bytes) -> None:
        if self.full is not None:
            return
        try:
            self.outputs.write(self.output, data)
        except OSError as error:
            self.full = error
            self.bell.set()
