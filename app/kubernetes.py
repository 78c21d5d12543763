"""The way to a Kubernetes API server, for instances and environments. Needs the extra `kubernetes`."""

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

# msgspec prepares a model when it first meets it. Two threads that meet it at once crash the process (seen with 0.22):
# all that we use are met here, once, under the lock of the import.
for _model in (Job, NetworkPolicy, Pod, Secret, Status):
    msgspec.json.Decoder(_model)
decode_watch_event(b'{"type": "", "object": {}}')


def configuration(settings: Settings) -> SingleConfig:
    """The file that the settings name, else this pod's own service account, else KUBECONFIG or the user's own file.

    A client is given `settings.kubernetes_namespace` beside it; None there is the namespace of the file or the pod.

    Raises: SettingsInvalid when there is none.
    """
    try:
        found = KubeConfig.from_env() if settings.kubeconfig is None else KubeConfig.from_file(settings.kubeconfig)
        chosen = found.get()
    except (ConfigError, OSError, KeyError, ValueError) as error:
        raise SettingsInvalid(f"expected the way to a Kubernetes API server, found: {error}") from error
    assert chosen is not None  # it raises where no default is given
    return chosen
