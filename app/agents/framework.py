"""Defines the interface of a framework's adapter: what to install, what to run, what an ending means.

    Framework (one folder each)  ->  running.FrameworkAgent  ->  Agent (the interface that the worker uses)

An adapter decides nothing about processes, time, cancelling, collecting files or the model's faults: shared code does
that for all adapters.
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
    """Place where a framework's own process runs."""

    OUTSIDE = "outside"  # on the worker; its commands go into the environment over the bridge
    INSIDE = "inside"  # in the environment, from a folder that is mounted there read-only


class Stop(StrEnum):
    """Reason why a framework's process ended."""

    ITSELF = "itself"
    TIMEOUT = "timeout"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class FrameworkBundle:
    """A framework as installed on this host: a folder that can be mounted anywhere, read-only.

    `name` is its name in `EnvironmentSpec.tools`; `folder` is complete and never changes.
    """

    name: str
    folder: Path


@dataclass(frozen=True, slots=True)
class FrameworkPaths:
    """Paths and endpoints of a framework, as seen from where it runs."""

    tool: str  # the bundle's folder, as seen from where the framework runs
    home: str  # its own folder: HOME, state, logs; collected afterwards as `AgentReport.files`
    workdir: str  # the task's
    model: ModelEndpoint  # as seen from there
    bridge: str | None = None  # OUTSIDE: the bridge's address


@dataclass(frozen=True, slots=True)
class FrameworkCommand:
    """Command that starts a framework. `files` are written first, below `FrameworkPaths.home`; secrets go only into
    `env`.

    `results` are the files there that `Framework.ending` needs. INSIDE they are fetched one by one before the rest: the
    rest may be too large, or the image may lack the programs to fetch it.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict)
    stdin: bytes = b""
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a framework's process. `returncode` is negative when a signal killed it, sent by MegaFlow or not."""

    by: Stop
    returncode: int
    stdout: Path  # both are files on the worker, complete up to a limit
    stderr: Path
    home: Path  # the collected `FrameworkPaths.home`; may be empty when the process was killed

    def last_words(self) -> str:
        """Returns the end of its output, errors last."""
        return f"{tail(self.stdout)} {tail(self.stderr)}".strip()[-600:]


@dataclass(frozen=True, slots=True)
class AgentEnding:
    """Meaning of an ending in MegaFlow's terms. `steps` as the framework counts them."""

    reason: EndReason
    detail: str = ""
    steps: int | None = None
    usage: dict[str, float] = field(default_factory=dict)  # of an external agent; the gateway counts tokens


class Framework(Protocol):
    """An agent framework, unmodified."""

    name: str
    version: str
    placement: Placement
    dialect: Dialect
    needs_model: bool
    endings: Mapping[str, EndReason]
    """Every ending ever observed, by the framework's own name, and its end reason: the failure taxonomy
    (docs/reference/endings.md is generated from it). Faults of the inference server are detected by the gateway."""

    def install(self) -> FrameworkBundle:
        """Returns the framework on this host, installed now if it is missing (`app.agents.installation`).

        Raises: AgentUnavailable.
        """
        ...

    def suits(self, shell: Shell) -> None:
        """Checks that the environment can run it (C library, architecture); INSIDE only.

        Raises: AgentUnsuitable: what was expected, found, and what to try.
        """
        ...

    def command(self, job: AgentJob, place: FrameworkPaths) -> FrameworkCommand:
        """Returns the command that runs it on this job."""
        ...

    def ending(self, ended: Ended) -> AgentEnding:
        """Returns the meaning of its exit code together with its own structured result: never of the exit code alone.

        Called only for `Stop.ITSELF`; `running` handles timeout and cancel.
        """
        ...
