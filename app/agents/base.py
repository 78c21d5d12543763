"""Defines the interface of an agent: an adapter that lets one framework work on one task.

An agent gets a `Shell` onto the environment and never learns what kind of environment it is. It ends by returning a
report, whatever happened to the model or the framework: a bad rollout is data, not an exception.
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
    """Where the agent's model is: the gateway. The key is the attempt's own token and good for nothing else."""

    base_url: str  # of the gateway as OpenAI's clients want it, with /v1
    name: str
    api_key: SecretStr | None = None

    @property
    def key_text(self) -> str:
        """The key as clients want it, also where there is none."""
        return self.api_key.get_secret_value() if self.api_key else "none"

    @property
    def anthropic_url(self) -> str:
        """The base URL as Anthropic's clients want it: without /v1."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class AgentJob:
    """What an agent is given for one attempt."""

    task_name: str
    description: str
    workdir: str
    limits: Limits
    model: ModelEndpoint | None
    solution: Solution | None  # None for every agent but `oracle`
    solution_files: bytes | None  # the solution's folder as a tar, for script solutions
    scratch: Path  # a folder on the worker, this attempt's alone; removed after the artifacts are stored
    model_inside_url: str | None = None  # where commands inside reach the model (with /v1), when they do at all
    tools_inside: Mapping[str, str] = field(default_factory=dict)  # tool bundle: its folder inside the environment
    arguments: Mapping[str, str] = field(default_factory=dict)  # of `--agent-arg`, checked at the submission
    recording: bytes | None = None  # the trajectory (ATIF) of the attempt that is done again, for `replay` alone
    recorded_end: EndReason | None = None  # how that attempt ended
    logs: OutputLogs | None = None  # where all of an output goes that is too long to be kept whole in `scratch`
    waited_s: Callable[[], float] = lambda: 0.0  # that limits have made its calls wait so far: not the agent's time

    def inside(self) -> ModelEndpoint | None:
        """The endpoint as seen from inside the environment; None: there is no way from there."""
        if self.model is None or self.model_inside_url is None:
            return None
        return replace(self.model, base_url=self.model_inside_url)


@dataclass(frozen=True, slots=True)
class AgentReport:
    """How the agent ended. What it left lies in the job's scratch folder."""

    end_reason: EndReason
    detail: str = ""
    log: Path | None = None  # what it wrote to its outputs
    files: Path | None = None  # folder: its own trajectory, state, configuration
    steps: int | None = None
    usage: dict[str, float] = field(
        default_factory=dict
    )  # as the framework counts; the gateway's own count goes before


class Agent(Protocol):
    """One agent framework."""

    name: str
    version: str
    needs_model: bool
    needs_solution: bool
    """Only `oracle` may see the gold answer."""

    def check(self) -> None:
        """Make sure that the framework is there, installing it if it may. Raises: AgentUnavailable."""
        ...

    def run(self, job: AgentJob, shell: Shell, cancel: CancelToken) -> AgentReport:
        """Work on the task until done, out of budget, or told to stop; leave no process behind.

        Raises: EnvironmentFailed when the environment went away; AgentFailed when the framework cannot be run at all;
        AgentUnsuitable when it cannot run in this environment.
        """
        ...
