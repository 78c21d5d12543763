"""Runs a task's set-up commands, and computes the key of their result."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, TypedDict, Unpack

from app.environments.contract import EnvironmentProvider, Tags, Times
from app.environments.tools import Find, tools_of, versions
from app.errors import EnvironmentOverLimit, NoPlaceToStart, SetupFailed, SetupTimedOut
from app.host.slots import HostSemaphore, Semaphore, turn
from app.models.shell import CommandResult, Shell
from app.models.spec import Bundle, EnvironmentSpec, Reuse
from app.settings import Settings

_TOLD_CHARACTERS = 2000
"""Maximum characters of a command's output in a message: its end."""


@dataclass
class EnvironmentRequest:
    """An environment to create. `image_id`: of the task's image, where an engine names it."""

    spec: EnvironmentSpec
    tags: Tags
    deadline: float  # monotonic
    times: Times = field(default_factory=Times)
    image_id: str = ""

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()


class ProviderOptions(TypedDict):
    """Options of providers. semaphore: limits starts (None: by file locks). tools: finds tools' folders."""

    fetch_bundle: Callable[[Bundle], bytes]
    semaphore: NotRequired[Semaphore | None]
    tools: NotRequired[Find | None]


class HostProvider(EnvironmentProvider):
    """Makes environments on a host."""

    def __init__(self, settings: Settings, **options: Unpack[ProviderOptions]) -> None:
        self._settings = settings
        self._fetch_bundle = options["fetch_bundle"]
        self._semaphore = options.get("semaphore") or HostSemaphore(settings.home / "run" / "slots")
        self._find = options.get("tools")

    def tool_versions(self, spec: EnvironmentSpec) -> dict[str, str]:
        return versions(tools_of(spec, self._find))

    @contextmanager
    def start_slot(self, host: str, left_s: float) -> Iterator[None]:
        """Holds a slot among the environments that start on `host`. Raises: NoPlaceToStart."""
        limit, capacity = f"environment_starts:{host}", self._settings.environment_starts
        try:
            with self._semaphore.hold(limit, capacity, timeout_s=left_s):
                yield
        except TimeoutError as error:
            raise NoPlaceToStart(f"no environment could be started in time: {error}.") from error


_WATCH: ContextVar[Callable[[Shell], Shell] | None] = ContextVar("watch_set_up", default=None)


@contextmanager
def watched_setup(watch: Callable[[Shell], Shell]) -> Iterator[None]:
    """Makes set-up commands of this thread in the block run in the shell that `watch` returns for their shell."""
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


def setup_key(spec: EnvironmentSpec, image_id: str) -> str:
    """Returns the key that two environments must share so that one can use the other's set-up."""
    network = [spec.network.value, sorted(spec.allowed_hosts)]
    parts = [image_id, list(spec.setup), sorted(spec.env.items()), spec.workdir, network]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@contextmanager
def setup_turn(lock: Path, request: EnvironmentRequest) -> Iterator[None]:
    """Lets one process at a time run the same set-up. Raises: SetupTimedOut."""
    with ExitStack() as held:
        try:
            held.enter_context(turn(lock, timeout_s=request.left_s))
        except TimeoutError as error:
            raise SetupTimedOut(f"another environment's set-up did not end in time: {error}.") from error
        yield


def refuse_read_only(spec: EnvironmentSpec, reason: str) -> None:
    """Refuses a read-only environment whose set-up's result could not be kept, and why. Raises: SetupFailed."""
    if spec.reuse is Reuse.SHARED_READONLY:
        raise SetupFailed(
            f"expected set-up commands whose result can be kept, as a read-only environment needs, found otherwise: "
            f"{reason}; bring it into the image, or take another policy than {Reuse.SHARED_READONLY.value!r}."
        )


def carry_out(commands: Sequence[str], shell: Shell, deadline: float) -> None:
    """Runs the commands one after the other, until `deadline` (monotonic).

    Raises: SetupFailed: a command's exit code was not 0, or it wrote more than the environment may;
        SetupTimedOut; EnvironmentFailed: the environment is gone.
    """
    watch = _WATCH.get()
    shell = watch(shell) if watch is not None else shell
    for command in commands:
        try:
            result = shell.run(command, timeout_s=max(0.1, deadline - time.monotonic()))
        except EnvironmentOverLimit as error:
            raise SetupFailed(f"set-up command {shlex.quote(command)}: {error}") from error
        if result.timed_out:
            raise SetupTimedOut(_failure(command, "ran out of the environment's time", result))
        if not result.ok:
            raise SetupFailed(_failure(command, f"exit code {result.exit_code}", result))


def _failure(command: str, how: str, result: CommandResult) -> str:
    output = result.text()[-_TOLD_CHARACTERS:].strip() or "(no output)"
    return f"set-up command {shlex.quote(command)}: {how}: {output}"
