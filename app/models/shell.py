"""Defines the interface through which agents and graders act on an environment.

Agents, graders and environments do not import each other; they share this Protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Required, TypedDict, Unpack, runtime_checkable


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command. `exit_code` is None after a timeout. Long output contains only its head and tail."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool
    duration_s: float
    out_of_memory: bool = False
    """The kernel killed the command or another process for the environment's memory limit while it ran."""
    logs: tuple[str, ...] = ()
    """Names of the full text of long output in the attempt's `command_logs`."""

    @property
    def ok(self) -> bool:
        """Whether the command ended by itself with exit code 0."""
        return self.exit_code == 0

    def text(self) -> str:
        """Returns stdout followed by stderr, with invalid UTF-8 replaced."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")


LOGS_FULL = "the attempt's command_logs are full"
"""Message for long output that was not stored for lack of space."""


def left_out(count: int, told: str = "") -> bytes:
    """Returns the line that replaces the middle of long output. told: the location of the rest, or why it is lost."""
    return f"\n[... {count} bytes left out{told and f'; {told}'} ...]\n".encode()


class FileAction(StrEnum):
    """Action for a file that differs from the image, before grading in the container."""

    KEEP = "keep"
    PUT_BACK = "put back"  # restore from the image; delete if not in the image
    SUSPECT = "suspect"  # keep and report: it could change the grading


class ChangedFile(Protocol):
    """A file of a container that differs from its image: changed, new or deleted."""

    @property
    def path(self) -> str:
        """The absolute path inside the container."""
        ...

    @property
    def in_image(self) -> bool:
        """Whether the image has a file at this path."""
        ...

    @property
    def deleted(self) -> bool:
        """Whether the container no longer has the image's file."""
        ...

    @property
    def removable(self) -> bool:
        """Whether `PUT_BACK` can restore it. If not, it makes most files suspect: use it only for unusual changes."""
        ...

    @property
    def target(self) -> str:
        """A link's target; empty: no link, or not visible."""
        ...

    def image_has(self, path: str) -> bool:
        """Whether the image has the given path."""
        ...

    def read(self) -> bytes | None:
        """Returns its first 64 KiB; empty: deleted, or no regular file; None: a link, or not readable. May be slow."""
        ...


DecideFile = Callable[[ChangedFile], FileAction]


@dataclass(frozen=True, slots=True)
class Restart:
    """Changes to a container between agent and grading."""

    killed: int  # processes
    put_back: tuple[str, ...] = ()
    suspect: tuple[str, ...] = ()  # unchanged files that could change the grading


class OutputLog(Protocol):
    """Full text of one long stream. Used by one thread."""

    @property
    def name(self) -> str: ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Writes data. Raises nothing: `location` reports what was not stored."""
        ...

    def location(self, total_bytes: int) -> str:
        """Returns a text for people and agents: where the stream is stored, and how much of its `total_bytes`."""
        ...

    def close(self) -> None: ...


class OutputLogs(Protocol):
    """Store of an attempt's streams that are too long to return in full. Thread-safe."""

    @property
    def left_bytes(self) -> int:
        """The remaining space in bytes."""
        ...

    def open(self, stream: str, command: str) -> OutputLog:
        """Opens a log for a stream (`stdout`, `stderr`) of this command. The caller must close it."""
        ...


class StatefulShell(Protocol):
    """A shell that keeps its folder and exports between commands. The caller must close it.

    Raises: EnvironmentFailed: the environment itself has ended.
    """

    def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """Runs `command` with empty input.

        If a command ends the shell (`exit`, `exec`, `set -e`, a signal), the result has its status, and the next
        command runs in a new shell with the same folder and exports. The same applies after a timeout, which kills all
        processes that the command started.
        """
        ...

    def close(self) -> None:
        """Ends the shell; its background processes continue. Safe to call twice."""
        ...


class InteractiveProgram(Protocol):
    """A running program with input and output. The caller must close it."""

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """Returns the next output (both streams, in order); b"": end; None: no output within `timeout_s`."""
        ...

    def write(self, data: bytes) -> None:
        """Sends input."""
        ...

    def close_input(self) -> None:
        """Closes the input."""
        ...

    def resize(self, rows: int, columns: int) -> None:
        """Sets the terminal's size."""
        ...

    def signal(self, number: int) -> None:
        """Sends a signal to the program's process group."""
        ...

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for the exit code (128 + n for a signal); None: still running after `timeout_s`.

        Output that arrives during the wait stays available to `read`.
        """
        ...

    def close(self) -> None:
        """Kills the program and all its child processes, unless it has ended. Safe to call twice."""
        ...


class CommandOptions(TypedDict, total=False):
    """Options of a command; `cwd` None: the task's working folder."""

    cwd: str | None
    env: Mapping[str, str] | None
    timeout_s: Required[float]
    stdin: bytes | None


class ProgramOptions(TypedDict, total=False):
    """Options of an interactive program: pipes or, with `tty`, a terminal of `rows` (24) times `columns` (80)."""

    cwd: str | None
    env: Mapping[str, str] | None
    tty: bool
    rows: int
    columns: int


class Shell(Protocol):
    """Commands and files inside one environment. Thread-safe.

    A command that fails or times out gives a result, not an error.

    Raises: EnvironmentFailed: the environment itself has ended (every method).
    """

    def run(self, command: str, **how: Unpack[CommandOptions]) -> CommandResult:
        """Runs `command` with a POSIX shell in a new process tree.

        After `timeout_s` the whole tree is killed; the environment stays usable.
        """
        ...

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> StatefulShell:
        """Opens a stateful shell for any number of commands; parallel shells do not share state."""
        ...

    def stream(self, argv: Sequence[str], **how: Unpack[ProgramOptions]) -> InteractiveProgram:
        """Starts an interactive program. Raises: EnvironmentFailed: also if it cannot be started."""
        ...

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Writes one file; creates parent folders. Raises: DiskFull."""
        ...

    def get(self, path: str) -> bytes:
        """Reads one file. Raises: FileNotFoundError: no such file."""
        ...

    def put_tree(self, archive: bytes, path: str) -> None:
        """Extracts an uncompressed tar into the folder `path`, created if missing.

        Raises: SpecInvalid: not a tar, or a member path outside the folder; DiskFull.
        """
        ...

    def get_tree(self, path: str) -> bytes:
        """Returns an uncompressed tar of the content of the folder `path`, with relative names.

        Raises: FileNotFoundError: no such folder.
        """
        ...


@runtime_checkable
class Services(Protocol):
    """An environment's services, for the grader. Without services the list is empty."""

    @property
    def services(self) -> tuple[str, ...]:
        """The names of all services, including the agent's own."""
        ...

    def service(self, name: str) -> Shell:
        """Returns the shell of a service. Raises: EnvironmentFailed: no such service, or the environment has ended."""
        ...

    def logs(self) -> dict[str, bytes]:
        """Returns each service's log by name, long logs only in part (the end). Skips unreadable logs. Never raises."""
        ...

    def assure(self) -> None:
        """Checks that the services' names and logs are still reachable.

        Raises: EngineUnavailable, EnvironmentFailed: a failed connection or read may be an outside fault.
        """
        ...


class CancelToken(Protocol):
    """Signal that an attempt must stop; there is no other signal."""

    def is_set(self) -> bool: ...

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls `callback` once from another thread when the attempt must stop (at once if it already must).

        Returns a function that removes the callback.
        """
        ...
