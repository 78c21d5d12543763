"""Settings of the providers that create instances outside this host's processes; part of `app.settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode


class ProviderSettings(BaseSettings):
    """Settings of these providers. Credentials and regions come from the vendors' own variables and files."""

    worker_network: str = "host"
    """Container network of instances of the `docker` provider; with `host` they reach embedded servers."""
    worker_image: str = "megaflow/worker:latest"
    """Image of instances in containers and on cloud machines (worker_images/worker)."""
    kubeconfig: Path | None = None
    """Kubeconfig file for Kubernetes; None: our own pod's service account, else KUBECONFIG or `~/.kube/config`."""
    kubernetes_namespace: str | None = None
    """Kubernetes namespace of instances; None: the namespace of that file or pod."""
    kubernetes_environments: str | None = None
    """Namespace of environment pods (kind `kubernetes`), the same on every host; None: no such environments."""
    kubernetes_job: Path | None = None
    """YAML file with parts of a Job, merged over the Job of each instance of the provider `kubernetes`: labels (such
    as Kueue's), a priority class, a service account, volumes; see docs/howto/kubernetes.md."""
    slurm_arguments: str = ""
    """Additional sbatch arguments, in shell syntax; they override our own: `--partition=long --account=lab`."""
    slurm_class_arguments: dict[str, str] = {}
    """The same per resource class, as JSON; they override `slurm_arguments`: `{"gpu": "--partition=gpu", …}`."""
    slurm_python: Path | None = None
    """Python interpreter with MegaFlow on compute nodes; None: this one, on a shared file system."""
    slurm_home: Path | None = None
    """MEGAFLOW_HOME of instances on compute nodes, a local folder of each node; None: `home`, for a cluster of one."""
    queue_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds an instance may wait in its provider's queue (Slurm's); then it is ended for lack of capacity."""
    instance_prices: Path | None = None
    """YAML file of USD per hour by provider and type; overrides app/instances's table; see docs/howto/clouds.md."""
    ec2_template: str | None = None
    """Name or id (`lt-…`) of the launch template of the provider `ec2`: image, instance profile, security groups."""
    ec2_types: Annotated[tuple[str, ...], NoDecode] = ()
    """Instance types in order of preference, separated by commas; `CLASS=TYPE` applies to one resource class only.
    Empty: the launch template's type."""
    ec2_subnets: Annotated[tuple[str, ...], NoDecode] = ()
    """Subnets, one per zone, tried in this order, separated by commas. Empty: the launch template's."""
    ec2_spot: bool = False
    """Use spot instances. An instance is drained when EC2 sends a warning of its end."""
    ec2_events: str | None = None
    """URL of the SQS queue to which EventBridge sends instance states and spot warnings; None: only the reconciler
    notices that an instance ended."""

    alibaba_region: str = "cn-hangzhou"
    """Region of machines of the provider `alibaba`."""
    alibaba_endpoint: str | None = None
    """HOST[:PORT] of the ECS API; None: the region's endpoint."""
    alibaba_template: str | None = None
    """Name or id (`lt-…`) of the launch template of the provider `alibaba`."""
    alibaba_types: Annotated[tuple[str, ...], NoDecode] = ()
    """Instance types, written like `ec2_types`."""
    alibaba_switches: Annotated[tuple[str, ...], NoDecode] = ()
    """vSwitches, written like `ec2_subnets`."""
    alibaba_spot: bool = False
    """Use preemptible instances."""

    @field_validator("ec2_types", "ec2_subnets", "alibaba_types", "alibaba_switches", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
