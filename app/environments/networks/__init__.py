"""Network policies and the egress of environments without a network. See docs/howto/networks.md.

`none` has no egress. `allowlist` has one for the environment's life (`open_egress`), `model-only` one while the agent
runs (`open_model_egress`). `open` is a network of the engine (`bridge`) with packet rules (`firewall`), without
egress.
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
"""Port on the loopback inside: the usual one of proxies."""
_PROXY = f"http://127.0.0.1:{PROXY_PORT}"
_EXEMPTING = ("NO_PROXY", "no_proxy")
_NOT_BY_PROXY = ("localhost", "127.0.0.1", "::1")


def variables(spec: EnvironmentSpec, beside: Iterable[str] = ()) -> dict[str, str]:
    """Returns the variables by which commands inside find the way out; the task's own variables override them.

    beside: names and addresses that are reached without the proxy, like the loopback.
    """
    if spec.network is not Network.ALLOWLIST:
        return {}
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")  # curl reads `http_proxy`, others `HTTP_PROXY`
    return {
        **dict.fromkeys(names, _PROXY),
        **dict.fromkeys(_EXEMPTING, ",".join(dict.fromkeys((*_NOT_BY_PROXY, *beside)))),
        "NODE_USE_ENV_PROXY": "1",  # without it Node ignores the others
    }


def exempted(spec: EnvironmentSpec, own: Mapping[str, str], beside: Iterable[str]) -> dict[str, str]:
    """Returns variables by which a command bypasses the proxy to the loopback and `beside`, despite the task's own."""
    ours = variables(spec, beside)
    return {name: ",".join(filter(None, (own.get(name), ours[name]))) for name in _EXEMPTING if name in ours}


def open_egress(spec: EnvironmentSpec, forward: OpenForward) -> Egress | None:
    """Opens the egress that the environment keeps for its life, if its policy has one. The caller closes it.

    Raises: EnvironmentFailed: the environment has no such ports; SpecInvalid: not a host name.
    """
    if spec.network is not Network.ALLOWLIST:
        return None
    allowed, traffic = AllowedHosts(spec.allowed_hosts), Traffic(Network.ALLOWLIST)
    return Egress(forward(PROXY_PORT, proxy(allowed, traffic)), traffic, allowed_hosts=list(allowed.patterns))
