"""Defines the interface of a framework's adapter: what to install, what to run, what an ending means.

    Framework (one folder each)  ->  running.FrameworkAgent  ->  Agent (what the spine knows)

An adapter decides nothing about processes, time, cancelling, collecting files or the model's faults: those are one
piece of code for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from app.agents.base import AgentJob, ModelEndpoint
from app.agents.stream_json import tail
from app.models.endings import EndReason
from app.models.model_calls import Dialect
from app.models.shell import Shell


class Placement(StrEnum):
    """Where a framework's own process runs."""

    OUTSIDE = "outside"  # on the worker; its commands go into the environment over the bridge
    INSIDE = "inside"  # in the environment, from a folder that is mounted there read-only


class Stop(StrEnum):
    """Who ended a framework's process."""

    ITSELF = "itself"
    TIMEOUT = "timeout"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class FrameworkBundle:
    """A framework as installed on this host: a folder that can be mounted anywhere, read-only.

    `name` is what `EnvironmentSpec.tools` calls it; `folder` is complete and never changes.
    """

    name: str
    folder: Path


@dataclass(frozen=True, slots=True)
class FrameworkPaths:
    """Where the framework runs and what it may touch there."""

    tool: str  # the bundle's folder, as seen from where the framework runs
    home: str  # a folder of its own: HOME, its state, its logs; collected afterwards as `AgentReport.files`
    workdir: str  # the task's
    model: ModelEndpoint  # as seen from there
    bridge: str | None = None  # OUTSIDE: the bridge's address


@dataclass(frozen=True, slots=True)
class FrameworkCommand:
    """What is run. `files` are written before, below `FrameworkPaths.home`; secrets go into `env` alone.

    `results` are the files below it that `Framework.ending` cannot do without: INSIDE they are fetched one by one
    before the rest, for which an image may lack the programs or which may be too much.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict)
    stdin: bytes = b""
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """How its process ended. `returncode` is negative when a signal killed it, ours or another."""

    by: Stop
    returncode: int
    stdout: Path  # both as files on the worker, complete up to a bound
    stderr: Path
    home: Path  # what was collected of `FrameworkPaths.home`; may be empty when the process was killed

    def last_words(self) -> str:
        """The end of what it wrote, its errors last."""
        return f"{tail(self.stdout)} {tail(self.stderr)}".strip()[-600:]


@dataclass(frozen=True, slots=True)
class AgentEnding:
    """What the ending means, in our words. `steps` as the framework counts them."""

    reason: EndReason
    detail: str = ""
    steps: int | None = None
    usage: dict[str, float] = field(default_factory=dict)


class Framework(Protocol):
    """One agent framework, unmodified."""

    name: str
    version: str
    placement: Placement
    dialect: Dialect
    needs_model: bool
    endings: Mapping[str, EndReason]
    """Every ending that was ever observed, by the framework's own word for it, and what it means: the failure taxonomy
    (docs/reference/endings.md is made from it). The gateway tells an engine's faults."""

    def install(self) -> FrameworkBundle:
        """The framework on this host, installed now if it is not there (`app.agents.installation`).

        Raises: AgentUnavailable.
        """
        ...

    def suits(self, shell: Shell) -> None:
        """Whether the environment can run it (C library, architecture); INSIDE only.

        Raises: AgentUnsuitable: what was expected, found, and what to try.
        """
        ...

    def command(self, job: AgentJob, place: FrameworkPaths) -> FrameworkCommand:
        """How to run it on this job."""
        ...

    def ending(self, ended: Ended) -> AgentEnding:
        """What its exit code together with its own structured result mean: never the exit code alone.

        Only called for `Stop.ITSELF`; time and cancel are told by `running`.
        """
        ...
