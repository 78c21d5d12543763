"""What an agent or a grader may do to an environment: the narrow waist between the stations.

Agents, graders and environments do not import each other; they meet in this Protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What one command gave. `exit_code` is None when it was killed for its time; of long output head and tail stay."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool
    duration_s: float

    @property
    def ok(self) -> bool:
        """True when the command ended by itself with exit code 0."""
        return self.exit_code == 0

    def text(self) -> str:
        """stdout followed by stderr, invalid UTF-8 replaced."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")


class Shell(Protocol):
    """Commands and files inside one environment.

    A command that fails or times out is an answer, not an error.

    Raises: EnvironmentFailed when the environment itself is gone, from every method.
    """

    def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        stdin: bytes | None = None,
    ) -> CommandResult:
        """Run `command` with a POSIX shell in a fresh process tree; `cwd` None is the task's working folder.

        At `timeout_s` the whole tree is killed and the environment stays usable.
        """
        ...

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write one file; parent folders are made."""
        ...

    def get(self, path: str) -> bytes:
        """Read one file.

        Raises: FileNotFoundError: no such file.
        """
        ...

    def put_tree(self, archive: bytes, path: str) -> None:
        """Unpack an uncompressed tar into the folder `path`, made if missing."""
        ...


class CancelToken(Protocol):
    """The one way in which an attempt hears that it must stop."""

    def is_set(self) -> bool: ...

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once from another thread when the attempt must stop (at once if it already must).

        Returns a function that takes the callback back.
        """
        ...
