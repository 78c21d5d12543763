"""Providers of instances. README.md in this folder explains how to add one."""

from __future__ import annotations

from app.errors import InstanceFailed, UnknownName
from app.instances.base import Provider
from app.settings import Settings

NAMES = ("process", "docker", "slurm", "kubernetes", "ec2", "alibaba", "simulated")


def provider_named(name: str, settings: Settings) -> Provider:
    """Raises: UnknownName; InstanceFailed: its packages are not there. Imports only what the provider needs."""
    match name:
        case "process":
            from app.instances.process import ProcessProvider

            return ProcessProvider(settings)
        case "docker":
            from app.instances.docker import DockerInstances

            return DockerInstances(settings)
        case "kubernetes":
            try:
                from app.instances.kubernetes import KubernetesInstances
            except ImportError as error:
                raise InstanceFailed(f"the provider kubernetes needs the extra `kubernetes`: {error}") from error

            return KubernetesInstances(settings)
        case "simulated":
            from app.instances.simulated import SimulatedProvider

            return SimulatedProvider(settings)
        case "alibaba":
            from app.instances.alibaba import AlibabaInstances

            return AlibabaInstances(settings)
        case "ec2":
            from app.instances.ec2 import Ec2Instances

            return Ec2Instances(settings)
        case "slurm":
            from app.instances.slurm import SlurmInstances

            return SlurmInstances(settings)
        case _:
            raise UnknownName.of("provider", name, list(NAMES))
