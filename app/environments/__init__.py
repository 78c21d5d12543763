"""Environments in which agents act: containers, or, by name only, a folder of this host."""

from __future__ import annotations

from collections.abc import Callable

from app.environments.contract import EnvironmentProvider
from app.environments.tools import Find, tool_inside
from app.errors import EngineUnavailable
from app.host.slots import Semaphore
from app.models.spec import Bundle, EnvironmentKind
from app.settings import Settings

__all__ = ["KINDS", "provider_for", "tool_inside"]

KINDS: dict[EnvironmentKind, str] = {
    EnvironmentKind.DOCKER: "a container with limits, made by a Docker engine or, where that gives the same, as oci",
    EnvironmentKind.OCI: "the same without a daemon, on Linux as root: an OCI runtime on unpacked images",
    EnvironmentKind.KUBERNETES: "a pod of a Kubernetes cluster, whose nodes pull the image",
    EnvironmentKind.LOCAL: "a temporary folder and marked processes of this host; no isolation",
}


def provider_for(
    kind: EnvironmentKind,
    settings: Settings,
    fetch_bundle: Callable[[Bundle], bytes],
    semaphore: Semaphore | None = None,
    tools: Find | None = None,
) -> EnvironmentProvider:
    """Returns the provider of a kind. `fetch_bundle` returns a bundle's uncompressed tar.

    Raises: EngineUnavailable: the packages of the kind's extra are not installed.

    semaphore: limits starts, pulls and builds at the same time; None: for this host alone, by file locks.
    tools: returns the folder of a tool that a spec names; None: there are no tools.

    Connects to nothing yet: a missing engine shows at the first use. Providers are imported late, so that a machine
    without the engine's client can still use the other kinds.
    """
    match kind:
        case EnvironmentKind.DOCKER:
            from app.environments.runtimes.auto import AutoProvider

            return AutoProvider(settings, fetch_bundle=fetch_bundle, semaphore=semaphore, tools=tools)
        case EnvironmentKind.OCI:
            from app.environments.runtimes.oci import OciProvider

            return OciProvider(settings, fetch_bundle=fetch_bundle, semaphore=semaphore, tools=tools)
        case EnvironmentKind.KUBERNETES:
            try:
                from app.environments.runtimes.kubernetes.provider import KubernetesProvider
            except ImportError as error:
                raise EngineUnavailable(f"the kind 'kubernetes' takes the extra `kubernetes`: {error}") from error
            return KubernetesProvider(settings, tools=tools)
        case EnvironmentKind.LOCAL:
            from app.environments.runtimes.local.environment import LocalProvider

            return LocalProvider(settings, fetch_bundle=fetch_bundle, semaphore=semaphore, tools=tools)
