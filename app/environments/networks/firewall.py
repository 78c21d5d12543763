"""Packet rules for policy `open`: only public addresses, not the engine's host, nothing private.

The rules are in the table `mangle` on the engine's host, in one chain per installation. They apply to every bridge
whose name begins with that installation's prefix. `mangle` comes before the filter rules of the engine and of the host.
So no other rule can accept a packet before ours drops it, and a restart of the engine does not change them.

A worker that is root on the engine's host calls iptables itself. Any other worker uses the engine: a short-lived
container with the host's network enters the engine's file system and calls the host's own iptables there.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structlog
from docker.errors import ImageNotFound
from docker.types import LogConfig

from app.errors import EnvironmentFailed
from app.host.engine import ROLE, Engine
from app.host.slots import turn
from app.settings import Settings

log = structlog.get_logger()

DROPPED = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",  # carriers' private range; Alibaba's metadata
    "127.0.0.0/8",
    "168.63.129.16/32",  # Azure's host
    "169.254.0.0/16",  # link-local; metadata of most clouds
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",  # tests of network devices; some sites use it as private
    "224.0.0.0/4",
    "240.0.0.0/4",
)
"""Addresses that no task with an open network reaches: private ones, this host or a pod's node, cloud metadata."""
_CALL_S = 60.0
_CAPABILITIES = ["NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"]

_SCRIPT = (Path(__file__).parent / "firewall.sh").read_text()
_ENTER = """
target=1
for one in /proc/[0-9]*; do
    [ "$(cat "$one/comm" 2>/dev/null)" = dockerd ] || continue
    [ "$(readlink "$one/ns/net")" = "$(readlink /proc/self/ns/net)" ] && target=${one#/proc/} && break
done
exec nsenter --target "$target" --mount -- "$@"
"""
"""Enters the mount namespace of the engine whose network this is: its iptables is the one that the engine uses."""


_BRIDGE = "com.docker.network.bridge.name"
_MEMBERS_MEET = "com.docker.network.bridge.enable_icc"


def prefix_of(installation: str) -> str:
    """Returns the name prefix of all bridges of this installation's open networks; a name has at most 15 characters."""
    return "mf" + hashlib.sha256(installation.encode()).hexdigest()[:6]


def project_bridge(installation: str) -> str:
    """Returns a new name for the bridge of a project's open network."""
    return f"{prefix_of(installation)}{secrets.token_hex(4)[:7]}"


def ensure(engine: Engine, settings: Settings, installation: str, bridge: str) -> None:
    """Makes sure that the rules are in place. `bridge` exists, and nothing runs on it before this returns.

    Does nothing when the settings waive the rules. Raises: EnvironmentFailed: they are not in place;
        EngineUnavailable.
    """
    if not settings.open_network_filter:
        return
    script = ["sh", "-c", _SCRIPT, "firewall", prefix_of(installation), bridge, rules(settings.open_network_allow)]
    with turn(settings.home / "run" / "slots" / "firewall", timeout_s=2 * _CALL_S):
        reason = _here(script, bridge)
        if reason is not None:
            log.debug("firewall.not_from_here", reason=reason)
            reason = _on_the_engines_host(engine, settings, installation, script)
    if reason is not None:
        raise EnvironmentFailed(
            "network 'open': expected packet rules on the engine's host that keep tasks from the host, link-local and"
            f' private addresses, found: {reason}. See docs/howto/networks.md, "open";'
            " MEGAFLOW_OPEN_NETWORK_FILTER=false starts such tasks without the rules."
        )


def remove(installation: str) -> None:
    """Removes this installation's rules, where this process may; none of its bridges may be in use."""
    if os.geteuid() != 0 or shutil.which("iptables", path=_path()) is None:
        return
    if (reason := _run(["sh", "-c", _SCRIPT, "firewall", prefix_of(installation), "", ""])) is not None:
        log.warning("firewall.rules_stay", installation=installation, reason=reason)


def rules(allowed: Iterable[str]) -> str:
    """Returns lines for iptables, without the chain: what is accepted, then what is dropped. Resolvers come before."""
    accepted = [f"{match} -j ACCEPT" for one in allowed for match in _matches(one)]
    dropped = [f"-d {network} -j DROP" for network in DROPPED]
    return "\n".join([*accepted, "-m addrtype ! --dst-type UNICAST -j DROP", *dropped])


def _matches(destination: str) -> list[str]:
    """Returns iptables matches. destination: `ADDRESS[/BITS][:PORT]`, as the settings have checked it."""
    network, _, port = destination.partition(":")
    if not port:
        return [f"-d {network}"]
    return [f"-d {network} -p {protocol} -m {protocol} --dport {port}" for protocol in ("tcp", "udp")]


def _here(script: list[str], bridge: str) -> str | None:
    """Applies the rules in this process. Returns why not; None: done."""
    if os.geteuid() != 0:
        return "the worker is not root"
    if not any(line.split(":")[0].strip() == bridge for line in Path("/proc/net/dev").read_text().splitlines()):
        return "the worker has not the network of the engine's host"
    if shutil.which("iptables", path=_path()) is None:
        return "the worker has no iptables"
    return _run(script)


def _run(script: list[str]) -> str | None:
    try:
        result = subprocess.run(  # noqa: S603  our own script and names
            script, env={**os.environ, "PATH": _path()}, capture_output=True, text=True, timeout=_CALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"iptables did not end within {_CALL_S:.0f} s"
    return None if result.returncode == 0 else _last_words(result.stderr)


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def _on_the_engines_host(engine: Engine, settings: Settings, installation: str, script: list[str]) -> str | None:
    """Applies the rules by a container of the engine. Returns why not; None: done."""
    api: Any = engine.api
    with engine.named("put the rules of open networks in place", EnvironmentFailed):
        image = _image(engine, settings)
        if image is None:
            return f"neither {settings.worker_image} nor {settings.base_image} is on the engine to run iptables from"
        container_id = api.create_container(
            image,
            entrypoint=["sh", "-c", _ENTER, "enter"],
            command=script,
            user="0",
            labels={"megaflow": installation, ROLE: "firewall"},
            host_config=api.create_host_config(
                network_mode="host",
                pid_mode="host",
                cap_add=_CAPABILITIES,
                security_opt=["apparmor=unconfined", "label=disable"],
                log_config=LogConfig(type="json-file"),
            ),
        )["Id"]
        try:
            api.start(container_id)
            code = api.wait(container_id, timeout=_CALL_S)["StatusCode"]
            return None if code == 0 else _last_words(api.logs(container_id).decode("utf-8", "replace"))
        finally:
            engine.remove(container_id)


def _image(engine: Engine, settings: Settings) -> str | None:
    """Returns one of our own images: nothing of a task may run there."""
    for name in (settings.worker_image, settings.base_image):
        try:
            return str(engine.api.inspect_image(name)["Id"])  # type: ignore[no-untyped-call]
        except ImageNotFound:
            continue
    return None


def _last_words(text: str) -> str:
    return " ".join(text.split())[-300:] or "iptables said nothing"


def open_network(engine: Engine, settings: Settings, installation: str) -> str:
    """Makes the network, with the packet rules, and returns its name. Its members do not reach each other.

    Raises: EnvironmentFailed: a network of that name is not ours, or the rules are not in place; EngineUnavailable.
    """
    name = f"megaflow-tasks-{installation}"
    bridge = f"{prefix_of(installation)}-tasks"
    expected: dict[str, Any] = {
        "Driver": "bridge",
        "Internal": False,
        "Labels": {"megaflow": installation, ROLE: "environment"},
        "Options": {_MEMBERS_MEET: "false", _BRIDGE: bridge},
    }
    with (
        turn(settings.home / "run" / "slots" / "network", timeout_s=60.0),
        engine.named(f"create network {name}", EnvironmentFailed),
    ):
        networks = [one for one in engine.api.networks(names=[name]) if one["Name"] == name]
        if not networks:
            engine.api.create_network(
                name, driver="bridge", options=expected["Options"], labels=expected["Labels"], check_duplicate=True
            )
        for one in networks:
            _refuse_another(one, expected)
    ensure(engine, settings, installation, bridge)
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
