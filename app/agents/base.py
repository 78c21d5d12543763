"""Defines the interface of an agent: an adapter that lets one framework work on one task.

An agent gets a `Shell` onto the environment and does not know the kind of environment. It always ends by returning a
report, even when the model or the framework failed: a bad rollout is data, not an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr

from app.models.endings import EndReason
from app.models.shell import CancelToken, OutputLogs, Shell
from app.models.spec import Limits, Solution


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """The gateway, as the agent's model endpoint. The key is the attempt's own token and is valid for nothing else."""

    base_url: str  # the gateway's, in the form for OpenAI clients: with /v1
    name: str
    api_key: SecretStr | None = None

    @property
    def key_text(self) -> str:
        """The key as clients need it: never empty, `none` when there is no key."""
        return self.api_key.get_secret_value() if self.api_key else "none"

    @property
    def anthropic_url(self) -> str:
        """The base URL in the form for Anthropic clients: without /v1."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class AgentJob:
    """Input of an agent for one attempt."""

    task_name: str
    description: str
    workdir: str
    limits: Limits
    model: ModelEndpoint | None
    solution: Solution | None  # None for every agent but `oracle`
    solution_files: bytes | None  # the solution's folder as a tar, for script solutions
    scratch: Path  # a folder on the worker for this attempt only; removed after the artifacts are stored
    model_inside_url: str | None = None  # URL of the model for commands inside (with /v1), if they can reach it
    tools_inside: Mapping[str, str] = field(default_factory=dict)  # tool bundle: its folder inside the environment
    arguments: Mapping[str, str] = field(default_factory=dict)  # from `--agent-arg`, checked at submission
    recording: bytes | None = None  # trajectory (ATIF) of the attempt to repeat, only for `replay`
    recorded_end: EndReason | None = None  # how that attempt ended
    logs: OutputLogs | None = None  # store for complete outputs that are too long for `scratch`
    waited_s: Callable[[], float] = lambda: 0.0  # waits for limits so far: not the agent's time

    def inside(self) -> ModelEndpoint | None:
        """Returns the endpoint as reachable from inside the environment; None: it cannot be reached from there."""
        if self.model is None or self.model_inside_url is None:
            return None
        return replace(self.model, base_url=self.model_inside_url)


@dataclass(frozen=True, slots=True)
class AgentReport:
    """Result of an agent's run. The files that it left are in the job's scratch folder."""

    end_reason: EndReason
    detail: str = ""
    log: Path | None = None  # its stdout and stderr
    files: Path | None = None  # folder: its own trajectory, state, configuration
    steps: int | None = None
    usage: dict[str, float] = field(
        default_factory=dict
    )  # counted by the framework; the gateway's counts override these


class Agent(Protocol):
    """An agent framework."""

    name: str
    version: str
    needs_model: bool = False
    needs_solution: bool = False
    """Only `oracle` may see the gold answer."""

    def check(self) -> None:
        """Checks that its framework, if it has one, is installed; installs it if allowed. Raises: AgentUnavailable."""

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        """Works on the task until it is finished, out of budget, or cancelled; leaves no process behind.

        Raises: EnvironmentFailed when the environment is gone; AgentFailed when the framework cannot be run at all;
        AgentUnsuitable when it cannot run in this environment.
        """
        ...
