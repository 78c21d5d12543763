"""Makes the engine's network for policy `open`, one per installation."""

from __future__ import annotations

from typing import Any

from app.environments.networks import firewall
from app.errors import EnvironmentFailed
from app.host.engine import ROLE, Engine
from app.host.slots import turn
from app.settings import Settings

_BRIDGE = "com.docker.network.bridge.name"
_MEMBERS_MEET = "com.docker.network.bridge.enable_icc"


def open_network(engine: Engine, settings: Settings, installation: str) -> str:
    """The name of the network, with the packet rules of `firewall` in place; its members do not reach each other.

    Raises: EnvironmentFailed: a network of that name is not ours, or the rules are not in place; EngineUnavailable.
    """
    name = f"megaflow-tasks-{installation}"
    bridge = f"{firewall.prefix_of(installation)}-tasks"
    wanted: dict[str, Any] = {
        "Driver": "bridge",
        "Internal": False,
        "Labels": {"megaflow": installation, ROLE: "environment"},
        "Options": {_MEMBERS_MEET: "false", _BRIDGE: bridge},
    }
    with (
        turn(settings.home / "run" / "slots" / "network", timeout_s=60.0),
        engine.named(f"create network {name}", EnvironmentFailed),
    ):
        found = [one for one in engine.api.networks(names=[name]) if one["Name"] == name]
        if not found:
            engine.api.create_network(
                name, driver="bridge", options=wanted["Options"], labels=wanted["Labels"], check_duplicate=True
            )
        for one in found:
            _refuse_another(one, wanted)
    firewall.ensure(engine, settings, installation, bridge)
    return name


def _refuse_another(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises: EnvironmentFailed: tasks would meet whatever else is connected to it."""
    has = {
        key: {name: (found[key] or {}).get(name) for name in value} if isinstance(value, dict) else found[key]
        for key, value in wanted.items()
    }
    if has != wanted:
        differs = [f"{key} {wanted[key]}, found {has[key]}" for key in wanted if has[key] != wanted[key]]
        raise EnvironmentFailed(
            f"network {found['Name']}, which tasks with an open network join, was not made by MegaFlow: expected"
            f" {'; '.join(differs)}. Remove it (`docker network rm {found['Name']}`), or give this deployment another"
            " MEGAFLOW_INSTALLATION."
        )
