"""A small API server that speaks enough of Kubernetes for our tests; its pods are containers. See README.md."""

from tests.kubernetes.cluster import FakeCluster, Fault, kubeconfig

__all__ = ["FakeCluster", "Fault", "kubeconfig"]
