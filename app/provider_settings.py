"""Settings of providers of instances beyond this host's processes: a part of `app.settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode


class ProviderSettings(BaseSettings):
    """What such a provider has to be told. Credentials and regions come from the vendors' own variables and files."""

    worker_network: str = "host"
    """Network of instances made by the `docker` provider; `host` reaches embedded servers."""
    worker_image: str = "megaflow/worker:latest"
    """The image of instances in containers and on clouds' machines (worker_images/worker)."""
    kubeconfig: Path | None = None
    """How Kubernetes is reached; None: by the account of our own pod, else KUBECONFIG or `~/.kube/config`."""
    kubernetes_namespace: str | None = None
    """Where instances are made in Kubernetes; None: the namespace of that file or pod."""
    kubernetes_environments: str | None = None
    """Namespace of the pods that are environments (kind `kubernetes`), the same on every host; None: none are made."""
    kubernetes_job: Path | None = None
    """YAML file with parts of a Job, put over the one that each instance of the provider `kubernetes` is: labels (such
    as Kueue's), a priority class, a service account, volumes; see docs/howto/kubernetes.md."""
    slurm_arguments: str = ""
    """More arguments for sbatch, as in a shell: `--partition=long --account=lab`; they go before our own."""
    slurm_class_arguments: dict[str, str] = {}
    """The same for single resource classes, as JSON: `{"gpu": "--partition=gpu", …}`."""
    slurm_python: Path | None = None
    """The Python on compute nodes that has MegaFlow; None: this one, on a shared file system."""
    slurm_home: Path | None = None
    """MEGAFLOW_HOME of instances on compute nodes, a folder of each node's own; None: `home`, for a cluster of one."""
    queue_timeout_s: float = Field(default=3600.0, gt=0)
    """An instance that its provider's own queue (Slurm's) has not started by then is ended, for lack of capacity."""
    instance_prices: Path | None = None
    """YAML file of USD per hour by provider and type, before the table in app/instances; see docs/howto/clouds.md."""
    ec2_template: str | None = None
    """Name or id (`lt-…`) of the launch template of the provider `ec2`: image, instance profile, security groups."""
    ec2_types: Annotated[tuple[str, ...], NoDecode] = ()
    """Types of instances, the preferred one first, separated by commas; `CLASS=TYPE` is for one resource class alone.
    Empty: the template's."""
    ec2_subnets: Annotated[tuple[str, ...], NoDecode] = ()
    """Subnets, one for each zone, tried one after the other, separated by commas. Empty: the template's."""
    ec2_spot: bool = False
    """Asks for spot instances. One that EC2 warns of its end is drained."""
    ec2_events: str | None = None
    """URL of the SQS queue to which EventBridge sends the states of instances and spot warnings; None: ends are
    noticed by the reconciler alone."""

    @field_validator("ec2_types", "ec2_subnets", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
