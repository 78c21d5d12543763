"""The way to a Kubernetes API server, for instances and environments. Needs the extra `kubernetes`."""

from __future__ import annotations

from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError

from app.errors import SettingsInvalid
from app.settings import Settings


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
