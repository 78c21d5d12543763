"""Builds the services of a worker from the settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

from app.agents import FrameworkOptions, agent_named, tool_folder
from app.agents.base import Agent
from app.agents.external import external_manifests
from app.agents.installation import Installer
from app.artifacts import open_store
from app.artifacts.base import ArtifactStore
from app.artifacts.bundles import fetch_bundle
from app.environments import provider_for, tool_inside
from app.environments.contract import EnvironmentProvider
from app.environments.pool import EnvironmentPool
from app.environments.receipts import EnvironmentRecorder
from app.grading import grader_for
from app.grading.base import Grader
from app.grading.resident_libraries import GradingLibraries
from app.host.slots import Semaphore
from app.ledger.database import Database
from app.models.endings import RetryPolicy
from app.models.instance import MARK
from app.models.spec import Bundle, EnvironmentKind, EnvironmentSpec, Goal
from app.settings import Settings
from app.workers.usage_samples import UsageSampler

_PASSED_ON = (MARK, "STACK_OF_MEGAFLOW", "SSL_CERT_FILE", "HTTPS_PROXY", "HTTP_PROXY")
"""Variables that an agent's process gets: to find it after the worker dies, and to reach its model."""
_THIS_HOST = ("127.0.0.1", "localhost", "::1")


@dataclass(slots=True)
class WorkerServices:
    """Services that executing an attempt needs. One object per worker process; thread-safe."""

    settings: Settings
    database: Database
    store: ArtifactStore
    pool: EnvironmentPool
    retry: RetryPolicy
    libraries: GradingLibraries
    sampler: UsageSampler = field(default_factory=UsageSampler)

    def environments(self, kind: EnvironmentKind, semaphore: Semaphore | None = None) -> EnvironmentProvider:
        """Raises: EngineUnavailable."""
        return provider_for(kind, self.settings, fetch_bundle=self.bundle, semaphore=semaphore, tools=self.tool)

    def agent(self, name: str) -> Agent:
        """Raises: UnknownName."""
        return agent_named(name, agent_options(self.settings))

    def tool(self, name: str) -> Path:
        """Returns this host's folder of a framework that runs inside. Raises: UnknownName, AgentUnavailable."""
        return tool_folder(name, agent_options(self.settings))

    def tools_inside(self, spec: EnvironmentSpec) -> dict[str, str]:
        """Returns the paths of the environment's tools inside it, by name. Raises: as `tool`."""
        return {name: tool_inside(spec.kind, name, self.tool(name)) for name in spec.tools}

    def grader(self, goal: Goal) -> Grader:
        return grader_for(goal, self.libraries)

    def bundle(self, bundle: Bundle) -> bytes:
        """Returns the tar of a stored folder. Raises: ArtifactMissing, ArtifactStoreUnavailable."""
        return fetch_bundle(self.store, bundle)

    def scratch(self, instance_id: UUID, attempt_id: UUID) -> Path:
        """Creates the folder for an attempt's files on this host; the sweep of the instance deletes leftovers."""
        folder = self.settings.home / "scratch" / str(instance_id) / f"attempt-{attempt_id.hex[-12:]}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def close(self) -> None:
        """Ends idle environments, grading libraries and connections."""
        self.libraries.close()
        self.pool.close()
        self.database.close()


def agent_options(settings: Settings) -> FrameworkOptions:
    """Returns the options for creating agents on this host."""
    # A call may wait for a limit or a busy inference server before it runs: clients must not time out earlier.
    call_timeout_s = settings.gateway_patience_s + settings.model_timeout_s + 30.0
    return FrameworkOptions(
        Installer(settings.tools, ready=settings.ready_tools),
        call_timeout_s=call_timeout_s,
        process_env=_process_env(settings),
        manifests=external_manifests(settings),
        swe_agent_source=settings.swe_agent_source,
    )


def _process_env(settings: Settings) -> dict[str, str]:
    """Returns the variables of an agent's process. Excludes the gateway from proxies: a proxy would see the token."""
    no_proxy = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    gateways = [urlsplit(base).hostname for base in settings.gateway_bases()]
    hosts = [*(host.strip() for host in no_proxy.split(",")), *_THIS_HOST, *gateways]
    direct = "*" if no_proxy.strip() == "*" else ",".join(dict.fromkeys(host for host in hosts if host))
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    # Some libraries read the lower-case name, some the upper-case one; if both exist, some use only the lower-case one.
    return {**passed_on, "NO_PROXY": direct, "no_proxy": direct}


def build(settings: Settings, *, pooled: bool, max_idle: int) -> WorkerServices:
    """Builds the services of a worker that keeps up to `max_idle` environments for reuse."""
    database = Database(settings.database(), pooled=pooled)
    return WorkerServices(
        settings=settings,
        database=database,
        store=open_store(settings.artifacts(), endpoint_url=settings.s3_endpoint_url),
        pool=EnvironmentPool(max_idle=max_idle, create=EnvironmentRecorder(settings, database).create),
        retry=RetryPolicy(settings.retry_base_s, settings.retry_cap_s),
        libraries=GradingLibraries(Installer(settings.tools, ready=settings.ready_tools).install_library),
    )
