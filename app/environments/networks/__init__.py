"""Network policies and the egress of environments without a network. See docs/howto/networks.md.

`none` has no egress. `allowlist` has one while the environment lives (`open_egress`), `model-only` one for the agent's
time (`open_model_egress`). `open` is a network of the engine's (`bridge`) with packet rules
(`firewall`), and none of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from app.environments.networks.allowlist import proxy
from app.environments.networks.egress import Egress, OpenForward, Traffic
from app.environments.networks.model_port import MODEL_PORT, model_base_url, open_model_egress
from app.models.hosts import AllowedHosts
from app.models.spec import EnvironmentSpec, Network

__all__ = [
    "MODEL_PORT",
    "PROXY_PORT",
    "Egress",
    "exempted",
    "model_base_url",
    "open_egress",
    "open_model_egress",
    "variables",
]

PROXY_PORT = 3128
"""Of the loopback inside: the customary one of proxies."""
_PROXY = f"http://127.0.0.1:{PROXY_PORT}"
_EXEMPTING = ("NO_PROXY", "no_proxy")
_NOT_BY_PROXY = ("localhost", "127.0.0.1", "::1")


def variables(spec: EnvironmentSpec, beside: Iterable[str] = ()) -> dict[str, str]:
    """What every command inside needs in its environment variables to find the way out; the task's own override them.

    beside: names and addresses that are reached without the proxy, as the loopback is.
    """
    if spec.network is not Network.ALLOWLIST:
        return {}
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")  # curl reads the small one, some the large one
    return {
        **dict.fromkeys(names, _PROXY),
        **dict.fromkeys(_EXEMPTING, ",".join(dict.fromkeys((*_NOT_BY_PROXY, *beside)))),
        "NODE_USE_ENV_PROXY": "1",  # without it Node ignores the others
    }


def exempted(spec: EnvironmentSpec, own: Mapping[str, str], beside: Iterable[str]) -> dict[str, str]:
    """For a command that must reach the loopback and `beside` without the proxy, whatever the task's own say."""
    ours = variables(spec, beside)
    return {name: ",".join(filter(None, (own.get(name), ours[name]))) for name in _EXEMPTING if name in ours}


def open_egress(spec: EnvironmentSpec, forward: OpenForward) -> Egress | None:
    """The egress that the environment has all its life, if its policy gives it one; the caller closes it.

    Raises: EnvironmentFailed: the environment has no such ports; SpecInvalid: no name of a host.
    """
    if spec.network is not Network.ALLOWLIST:
        return None
    allowed, traffic = AllowedHosts(spec.allowed_hosts), Traffic(Network.ALLOWLIST)
    return Egress(forward(PROXY_PORT, proxy(allowed, traffic)), traffic, allowed_hosts=list(allowed.patterns))
