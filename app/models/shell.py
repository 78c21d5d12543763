"""The interface through which agents and graders act on an environment.

Agents, graders and environments do not import each other; they meet in this Protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Required, TypedDict, Unpack, runtime_checkable


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What one command gave. `exit_code` is None when it was killed for its time; of long output head and tail stay."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool
    duration_s: float
    out_of_memory: bool = False
    """The kernel killed for the environment's memory limit while it ran: itself, or a process beside it."""
    logs: tuple[str, ...] = ()
    """Of long output: the names under which all of it is kept in the attempt's `command_logs`."""

    @property
    def ok(self) -> bool:
        """True when the command ended by itself with exit code 0."""
        return self.exit_code == 0

    def text(self) -> str:
        """stdout followed by stderr, invalid UTF-8 replaced."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")


LOGS_FULL = "the attempt's command_logs are full"
"""What is said of long output for which there was no room."""


def left_out(count: int, told: str = "") -> bytes:
    """The line in the gap of a long output; `told`: where the rest is to be found, or why nowhere."""
    return f"\n[... {count} bytes left out{told and f'; {told}'} ...]\n".encode()


class FileAction(StrEnum):
    """What is done with a file that is not as the image has it, before a container is judged."""

    KEEP = "keep"
    PUT_BACK = "put back"  # as the image has it; gone where it has none
    SUSPECT = "suspect"  # kept, and told: it could change how the container is judged


class ChangedFile(Protocol):
    """A file of a container that is not as its image has it: changed, new or deleted."""

    @property
    def path(self) -> str:
        """Absolute, as seen inside."""
        ...

    @property
    def in_image(self) -> bool:
        """Whether the image has a file of that path."""
        ...

    @property
    def deleted(self) -> bool:
        """Whether the container has no longer what the image has."""
        ...

    @property
    def removable(self) -> bool:
        """Whether it can be put back. Else only what is no ordinary work should be: it becomes suspect."""
        ...

    def image_has(self, path: str) -> bool:
        """Whether the image has another path."""
        ...

    def read(self) -> bytes | None:
        """Its first 64 KiB; empty when it was deleted, None for a link and where nothing can be read. May be slow."""
        ...


DecideFile = Callable[[ChangedFile], FileAction]


@dataclass(frozen=True, slots=True)
class Restart:
    """What was done to a container between its agent and its judge."""

    killed: int  # processes
    put_back: tuple[str, ...] = ()
    suspect: tuple[str, ...] = ()  # what could change the judgement and was left


class OutputLog(Protocol):
    """All of one long stream. Used by one thread."""

    @property
    def name(self) -> str: ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Raises nothing: what cannot be kept is told."""
        ...

    def location(self, total_bytes: int) -> str:
        """Where it is to be found, for a person or an agent, and how much of the `total_bytes` that there were."""
        ...

    def close(self) -> None: ...


class OutputLogs(Protocol):
    """Where an attempt keeps the streams that are too long to be handed on whole. Safe for many threads."""

    @property
    def left_bytes(self) -> int:
        """How much more there is room for."""
        ...

    def open(self, stream: str, command: str) -> OutputLog:
        """For a stream (`stdout`, `stderr`) of this command. The opener closes it."""
        ...


class StatefulShell(Protocol):
    """A shell whose folder and exports live from one command to the next. The opener closes it.

    Raises: EnvironmentFailed when the environment itself is gone.
    """

    def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """Run `command`; its input is empty.

        A command that ends the shell (`exit`, `exec`, `set -e`, a signal) gives its status, and the next one finds a
        new shell with the folder and the exports of the old one; so it is after a timeout, which kills all that the
        command started.
        """
        ...

    def close(self) -> None:
        """End the shell; what it left running in the background lives on. Safe to call twice."""
        ...


class InteractiveProgram(Protocol):
    """A program that is talked to while it runs. The opener closes it."""

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """What it wrote next (both streams, as it came); b"" at the end, None when nothing came within `timeout_s`."""
        ...

    def write(self, data: bytes) -> None:
        """Send input."""
        ...

    def close_input(self) -> None:
        """End of input."""
        ...

    def resize(self, rows: int, columns: int) -> None:
        """Tell the terminal its size."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to the program's process group."""
        ...

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code (128 + n for a signal), or None when it runs on after `timeout_s`.

        Output that comes meanwhile stays for `read`.
        """
        ...

    def close(self) -> None:
        """Kill it with all that it started, unless it has ended. Safe to call twice."""
        ...


class CommandOptions(TypedDict, total=False):
    """How a command runs; `cwd` None is the task's working folder."""

    cwd: str | None
    env: Mapping[str, str] | None
    timeout_s: Required[float]
    stdin: bytes | None


class ProgramOptions(TypedDict, total=False):
    """How a program to talk to runs: with pipes or, with `tty`, a terminal of `rows` (24) times `columns` (80)."""

    cwd: str | None
    env: Mapping[str, str] | None
    tty: bool
    rows: int
    columns: int


class Shell(Protocol):
    """Commands and files inside one environment. Safe to share between threads.

    A command that fails or times out is an answer, not an error.

    Raises: EnvironmentFailed when the environment itself is gone, from every method.
    """

    def run(self, command: str, **how: Unpack[CommandOptions]) -> CommandResult:
        """Run `command` with a POSIX shell in a fresh process tree.

        At `timeout_s` the whole tree is killed and the environment stays usable.
        """
        ...

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> StatefulShell:
        """A shell that remembers, for as many commands as wanted; several at once do not see each other."""
        ...

    def stream(self, argv: Sequence[str], **how: Unpack[ProgramOptions]) -> InteractiveProgram:
        """Start a program to talk to. Raises: EnvironmentFailed: also when it cannot be started."""
        ...

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write one file; parent folders are made. Raises: DiskFull."""
        ...

    def get(self, path: str) -> bytes:
        """Read one file. Raises: FileNotFoundError: no such file."""
        ...

    def put_tree(self, archive: bytes, path: str) -> None:
        """Unpack an uncompressed tar into the folder `path`, made if missing.

        Raises: SpecInvalid: no tar, or a member leads outside; DiskFull.
        """
        ...

    def get_tree(self, path: str) -> bytes:
        """An uncompressed tar of what is in the folder `path`, by names relative to it.

        Raises: FileNotFoundError: no such folder.
        """
        ...


@runtime_checkable
class Services(Protocol):
    """Services beside the agent, for the grader: an environment without any has an empty list of them."""

    @property
    def services(self) -> tuple[str, ...]:
        """By name; the one in which the agent acts is among them."""
        ...

    def service(self, name: str) -> Shell:
        """Commands and files in one of them. Raises: EnvironmentFailed: no such service, or the environment is gone."""
        ...

    def logs(self) -> dict[str, bytes]:
        """What each has written, by its name; of much the end. One that cannot be read is left out. Never raises."""
        ...

    def assure(self) -> None:
        """Check that what carries the services' names and logs is there, as when they were made.

        Raises: EngineUnavailable, EnvironmentFailed: what was not reached or not read may be no one's fault.
        """
        ...


class CancelToken(Protocol):
    """The one way in which an attempt hears that it must stop."""

    def is_set(self) -> bool: ...

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once from another thread when the attempt must stop (at once if it already must).

        Returns a function that takes the callback back.
        """
        ...
