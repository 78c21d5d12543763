"""Connection settings for a Kubernetes API server, for instances and environments. Needs the extra `kubernetes`."""

from __future__ import annotations

import msgspec
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.decoders import decode_watch_event
from lightkube.core.exceptions import ConfigError
from lightkube.models.meta_v1 import Status
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Pod, Secret
from lightkube.resources.networking_v1 import NetworkPolicy

from app.errors import SettingsInvalid
from app.settings import Settings

# msgspec prepares a model at its first use. Two threads that first use one at the same time crash the process (seen
# with 0.22): prepare all models that we use here, once, under the import lock.
for _model in (Job, NetworkPolicy, Pod, Secret, Status):
    msgspec.json.Decoder(_model)
decode_watch_event(b'{"type": "", "object": {}}')


def configuration(settings: Settings) -> SingleConfig:
    """Returns the kubeconfig named in the settings, else the pod's service account, else KUBECONFIG or the user's file.

    Clients also need `settings.kubernetes_namespace`; None means the namespace of that file or pod.

    Raises: SettingsInvalid when there is none.
    """
    try:
        kubeconfig = KubeConfig.from_env() if settings.kubeconfig is None else KubeConfig.from_file(settings.kubeconfig)
        chosen = kubeconfig.get()
    except (ConfigError, OSError, KeyError, ValueError) as error:
        raise SettingsInvalid(f"expected the way to a Kubernetes API server, found: {error}") from error
    assert chosen is not None  # `get` raises when there is no default
    return chosen
