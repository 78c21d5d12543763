"""The runtime `kubernetes`: a pod per environment, entered over execs that stay open."""

from app.environments.runtimes.kubernetes.provider import KubernetesProvider

__all__ = ["KubernetesProvider"]
