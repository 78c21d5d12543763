"""Creates and removes what a project's containers share: networks, volumes, one cgroup."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import structlog
from docker.errors import APIError, NotFound
from docker.types import EndpointConfig, IPAMConfig, IPAMPool, Mount

from app.compose_file.model import Service
from app.compose_file.mounts import MountKind
from app.compose_file.plan import ComposePlan
from app.environments.contract import CreatedResources, Tags
from app.environments.networks import firewall
from app.errors import EnvironmentFailed
from app.host.cgroups import Cgroup
from app.host.engine import ROLE, Engine
from app.images.image_index import disk_of
from app.models.resources import KillAt
from app.models.spec import EnvironmentSpec, Network, Resources
from app.settings import Settings

log = structlog.get_logger()

PROJECT = "megaflow.project"
"""Label with the project that an object belongs to."""
SERVICE = "megaflow.service"
BESIDE = "megaflow.beside"
"""Label of every container except its project's main one, which represents the environment."""
_ROUNDS = 20
_PAUSE_S = 0.05


class ComposeResources:
    """The engine's objects of one project. Its creator removes them."""

    def __init__(self, engine: Engine, plan: ComposePlan, spec: EnvironmentSpec, tags: Tags) -> None:
        self.engine = engine
        self.plan = plan
        self.spec = spec
        self.tags = tags
        self.id = uuid4().hex[:12]
        self.nets: dict[str, ProjectNetwork] = {}
        self.cgroup: str | None = None  # around all containers; None: each has its own limits
        self.end_reason: tuple[type[EnvironmentFailed], str] | None = None  # when ended by a watch
        self._removing = threading.Lock()

    def labels(self, service: str | None = None) -> dict[str, str]:
        main = self.plan.project.main
        more = {} if service is None else {SERVICE: service, **({BESIDE: main} if service != main else {})}
        return {**self.tags.labels(), ROLE: "environment", PROJECT: self.id, **more}

    def create(self, settings: Settings) -> None:
        """Makes cgroup, networks with packet rules, and volumes. Raises: EnvironmentFailed, EngineUnavailable."""
        project, installation = self.plan.project, self.tags.installation
        self.create_cgroup()
        for name, internal in project.networks.items():
            leads_out = self.spec.network is Network.OPEN and not internal
            bridge = firewall.project_bridge(installation) if leads_out else None
            self.nets[name] = make_network(
                self.engine, f"megaflow-{self.id}-{name}", project.together(name), self.labels(), bridge=bridge
            )
            if bridge is not None:
                firewall.ensure(self.engine, settings, installation, bridge)
        self._create_volumes()

    def create_cgroup(self) -> None:
        """Limits all containers together to twice the task's limits. Raises: EngineUnavailable, EnvironmentFailed."""
        one = self.spec.resources  # formats size a task by its main container; the others together get as much again
        most = KillAt(cpus=2 * one.most.cpus, memory_bytes=2 * one.most.memory_bytes)
        both = {"cpus": 2 * one.cpus, "memory_bytes": 2 * one.memory_bytes, "pids": 2 * one.pids, "kill_at": most}
        self.cgroup = make_cgroup(self.engine, self.id, one.model_copy(update=both))

    def _create_volumes(self) -> None:
        with self.engine.named("create a volume", EnvironmentFailed):
            for name in self.plan.project.volumes:
                self.engine.api.create_volume(self._volume(name), driver="local", labels=self.labels())

    def renew_volumes(self) -> None:
        """Removes the volumes and creates empty ones, while no container uses them.

        Raises: EnvironmentFailed, EngineUnavailable."""
        with self.engine.named("remove a volume", EnvironmentFailed):
            for name in self.plan.project.volumes:
                self.engine.api.remove_volume(self._volume(name))
        self._create_volumes()

    def _volume(self, name: str) -> str:
        return f"megaflow-{self.id}-{name}"

    def network_of(self, service: Service) -> str:
        """Returns the network on which it is created; the engine takes one then, the others afterwards."""
        return self.nets[next(iter(service.aliases))].name if service.aliases else "none"

    def first_network(self, service: Service) -> dict[str, Any]:
        """Returns its endpoint on its first network, for the call that creates it."""
        for network, aliases in service.aliases.items():
            names, address = [service.name, *aliases], self.nets[network].addresses[service.name]
            endpoint = EndpointConfig(self.engine.api.api_version, aliases=names, ipv4_address=address)
            return {"networking_config": {"EndpointsConfig": {self.nets[network].name: endpoint}}}
        return {}

    def join_others(self, service: Service, container_id: str) -> None:
        for network, aliases in list(service.aliases.items())[1:]:
            self.engine.api.connect_container_to_network(
                container_id,
                self.nets[network].id,
                ipv4_address=self.nets[network].addresses[service.name],
                aliases=[service.name, *aliases],
            )

    def near(self, service: Service) -> list[str]:
        """Returns names and addresses of itself and of services that share a network with it."""
        joined = [self.nets[network].addresses.values() for network in service.aliases]
        return [*self.plan.project.near(service.name), *(one for addresses in joined for one in addresses)]

    def host_config_of(self, config: dict[str, Any], service: Service) -> dict[str, Any]:
        """Returns the engine's host configuration with the service's own part."""
        volumes = [
            Mount(
                one.target, self._volume(one.source) if one.kind is MountKind.NAMED else None, "volume", one.read_only
            )
            for one in service.mounts
            if one.kind in (MountKind.NAMED, MountKind.ANONYMOUS)
        ]
        config["Mounts"] = [*(config.get("Mounts") or []), *volumes]
        memory = [one for one in service.mounts if one.kind is MountKind.TMPFS]
        sizes = {one.target: f"rw,nosuid,nodev,size={one.size_bytes}" for one in memory}
        config["Tmpfs"] = {**(config.get("Tmpfs") or {}), **sizes}
        if service.shm_size is not None:
            config["ShmSize"] = min(service.shm_size, self.spec.resources.most.memory_bytes)
        config["ExtraHosts"] = [
            *(config.get("ExtraHosts") or []),
            *(f"{name}:{address}" for name, address in service.extra_hosts.items()),
        ]
        config["CapDrop"] = sorted({*(config.get("CapDrop") or []), *service.cap_drop})
        if self.cgroup is not None:
            config["CgroupParent"] = self.cgroup
        if self.spec.network is not Network.OPEN:
            # An engine may ask its host's resolver for unknown names, also for a closed network. Without one it leaves
            # the question unanswered: the wait is kept short.
            config["Dns"], config["DnsOptions"] = ["127.0.0.1"], ["timeout:1", "attempts:2"]
        return config

    def raise_if_ended(self) -> None:
        if self.end_reason is not None:
            kind, why = self.end_reason
            raise kind(f"project {self.id} was ended: {why}.")

    def created(self) -> CreatedResources:
        """Lists what exists now. Raises: EnvironmentFailed, EngineUnavailable."""
        api, ours = self.engine.api, {"label": f"{PROJECT}={self.id}"}
        with self.engine.named("list a project's objects", EnvironmentFailed):
            return CreatedResources(
                tuple(str(entry["Id"]) for entry in api.containers(all=True, filters=ours)),
                tuple(str(entry["Id"]) for entry in api.networks(filters=ours)),
                tuple(str(entry["Name"]) for entry in api.volumes(filters=ours)["Volumes"] or ()),
            )

    def anonymous_volumes(self, containers: tuple[str, ...]) -> tuple[str, ...]:
        """Returns volumes that the file does not name, which are removed with their containers."""
        with self.engine.named("look at a project's mounts", EnvironmentFailed):
            mounts = [one for identity in containers for one in self.engine.api.inspect_container(identity)["Mounts"]]
        named = {self._volume(name) for name in self.plan.project.volumes}
        return tuple(one["Name"] for one in mounts if one["Type"] == "volume" and one["Name"] not in named)

    def remove(self) -> None:
        """Removes all of it, by label, and checks. Raises: EnvironmentFailed: something stays; EngineUnavailable."""
        with self._removing:
            for _ in range(_ROUNDS):
                left = self.created()
                if left.none:
                    remove_cgroup(self.id)
                    return
                self._remove(left)
                time.sleep(0.0 if left.containers else _PAUSE_S)
        raise EnvironmentFailed(f"project {self.id} was removed, but {left} stay; the sweeper tries again.")

    def kill(self) -> None:
        """Ends what runs in all containers, which stay. Raises: EnvironmentFailed, EngineUnavailable."""
        with self.engine.named(f"end project {self.id}", EnvironmentFailed):
            for container in self.created().containers:
                with suppress(APIError):  # ended, or gone
                    self.engine.api.kill(container, signal="KILL")

    def remove_containers(self, but: str) -> None:
        """Removes all containers but one. Raises: EnvironmentFailed, EngineUnavailable."""
        doomed = tuple(one for one in self.created().containers if one != but)
        self._remove(CreatedResources(doomed, (), ()))

    def _remove(self, created: CreatedResources) -> None:
        """Removes objects. A container that cannot be removed keeps only what it uses."""
        with self.engine.named(f"remove project {self.id}", EnvironmentFailed):
            with ThreadPoolExecutor(len(created.containers) or 1) as pool:
                tried = [pool.submit(self.engine.remove, one) for one in created.containers]
            for volume in created.volumes:
                _remove_unless_busy(self.engine.api.remove_volume, volume)
            for network in created.networks:
                _remove_unless_busy(self.engine.api.remove_network, network)
            for one in tried:
                one.result()


def _remove_unless_busy(remove: Callable[[str], object], identity: str) -> None:
    """Removes an object. A missing one is fine; one still in use is left for the next round."""
    try:
        remove(identity)
    except NotFound:
        pass
    except APIError as error:
        if error.status_code not in (403, 409) and "active endpoints" not in str(error):
            raise


# Small subnets of our own choice, as an engine's own pools hold about thirty, and addresses given by us: a restarted
# container keeps its address.

RANGE = IPv4Network("10.222.0.0/15")
"""Private range, so that no network policy takes its addresses for public; few other networks use it."""
SMALLEST = 28
"""Prefix length for thirteen containers; 8,192 such networks fit."""
_TRIES = 64
_ROUTES = Path("/proc/net/route")


@dataclass(frozen=True, slots=True)
class ProjectNetwork:
    """A network on the engine, with its addresses."""

    id: str
    name: str
    addresses: dict[str, str]  # by service


def make_network(
    engine: Engine, name: str, services: list[str], labels: Mapping[str, str], *, bridge: str | None
) -> ProjectNetwork:
    """Creates a bridge for these services alone. bridge: its interface on the host, which the packet rules of an open
    network match. None: it leads to no other network, and the host has no address on it: an engine's `internal` alone
    leaves the host's own addresses reachable, and with them all that listens there.

    Raises: EnvironmentFailed, EngineUnavailable.
    """
    inhibited = {"com.docker.network.bridge.inhibit_ipv4": "true"}
    with engine.named(f"create network {name}", EnvironmentFailed):
        for _ in range(_TRIES):
            subnet = _free_subnet(len(services))
            gateway, *hosts = (str(one) for one in subnet.hosts())
            pool = IPAMPool(subnet=str(subnet), gateway=gateway)
            try:
                network = engine.api.create_network(
                    name,
                    driver="bridge",
                    options=inhibited if bridge is None else {"com.docker.network.bridge.name": bridge},
                    ipam=IPAMConfig(pool_configs=[pool]),
                    internal=bridge is None,
                    labels=dict(labels),
                )
            except APIError as error:
                if "overlap" in str(error).lower():  # the subnet is in use
                    continue
                raise
            return ProjectNetwork(str(network["Id"]), name, dict(zip(services, hosts, strict=False)))
    raise EnvironmentFailed(
        f"no free subnet of {RANGE} was found for {name} in {_TRIES} tries; expected few of its networks there: "
        "`docker network prune` removes what is not in use."
    )


def _free_subnet(services: int) -> IPv4Network:
    """Chooses a random subnet, large enough and not routed by this host (more closely than the whole range)."""
    prefix = next(one for one in range(SMALLEST, 15, -1) if (1 << (32 - one)) - 3 >= services)
    routed = [one for one in _routed() if one.prefixlen > RANGE.prefixlen]
    for _ in range(_TRIES):
        start = random.randrange(RANGE.num_addresses >> (32 - prefix)) << (32 - prefix)
        subnet = IPv4Network((int(RANGE.network_address) + start, prefix))
        if not any(subnet.overlaps(one) for one in routed):
            return subnet
    raise EnvironmentFailed(f"no subnet of {RANGE} was found that this host does not route elsewhere in {_TRIES} tries")


def _routed() -> list[IPv4Network]:
    """Returns subnets in our range that this host already routes. An engine elsewhere reports overlaps itself."""
    try:
        rows = [line.split() for line in _ROUTES.read_text().splitlines()[1:]]
        networks = [IPv4Network((_address(row[1]), str(_address(row[7])))) for row in rows]
    except (OSError, ValueError, IndexError):
        return []
    return [one for one in networks if one.overlaps(RANGE)]


def _address(digits: str) -> IPv4Address:
    """Reads an address, which the kernel writes in its own byte order."""
    return IPv4Address(bytes.fromhex(digits)[::-1])


BOUNDED_APART = "resources: no control group could be made around all services: each alone is held to the task's limits"
_REMOVAL_S = 2.0


def make_cgroup(engine: Engine, project: str, most: Resources) -> str | None:
    """Makes a cgroup and returns its name; None: impossible. Raises: EngineUnavailable, EnvironmentFailed."""
    if engine.about.get("CgroupDriver") != "cgroupfs" or disk_of(engine) is None:  # systemd's, or another host's
        return None
    group = Cgroup(f"project-{project}")
    try:
        group.make(most, devices=None)
        for folder in group.folders:
            _count_all_below(folder / "memory.use_hierarchy")
            os.utime(folder)  # the sweeper uses this time
    except OSError as error:
        log.debug("environment.no_project_cgroup", project=project, reason=str(error))
        remove_cgroup(project)
        return None
    return f"/{group.folders[0].name}"


def remove_cgroup(project: str, *, timeout_s: float = _REMOVAL_S) -> None:
    """Removes it once it is empty, within this time; a later sweep removes what is left. A missing one is fine."""
    with suppress(OSError):  # a host that has none at all
        if not Cgroup(f"project-{project}").remove(timeout_s=timeout_s):
            log.debug("environment.project_cgroup_left", project=project)


def _count_all_below(switch: os.PathLike[str]) -> None:
    """Makes cgroup version 1 count what is below a group, which it does only on request before Linux 5.11."""
    if os.path.exists(switch):
        with open(switch, "r+") as file:
            if file.read().strip() == "0":
                file.write("1")


def remove_container(engine: Engine, container_id: str, labels: Mapping[str, str]) -> None:
    """Removes an environment's container; with a project's last one the cgroup, too. Raises: as `Engine.remove`."""
    engine.remove(container_id)
    if (project := labels.get(PROJECT)) is not None:
        remove_cgroup(project, timeout_s=0.0)


@dataclass(frozen=True, slots=True)
class SharedResource:
    """A network or a volume of a project."""

    kind: Literal["network", "volume"]
    id: str
    labels: dict[str, str]
    created: str  # as the engine writes it

    @property
    def project(self) -> str:
        return self.labels[PROJECT]

    def remove(self, engine: Engine) -> bool:
        """Removes it and its project's cgroup. False: the project still has a container, also a stopped one.

        A recycled project has the labels of its first attempt, whose deadline may have passed.

        Raises: EnvironmentFailed: a container of another owner uses it; errors of the engine's client.
        """
        if engine.api.containers(all=True, filters={"label": f"{PROJECT}={self.project}"}):
            return False
        remove_cgroup(self.project)
        remove = engine.api.remove_network if self.kind == "network" else engine.api.remove_volume
        try:
            remove(self.id)
        except NotFound:
            return True
        except APIError as error:
            if error.status_code in (403, 409):
                raise EnvironmentFailed(
                    f"{self.kind} {self.id[:12]} is in use, and not by its project: {error.explanation}"
                ) from error
            raise
        return True


def shared(engine: Engine, installation: str) -> list[SharedResource]:
    """Lists all networks and volumes of this installation's projects. Raises: errors of the engine's client."""
    ours = {"label": [f"megaflow={installation}", f"{ROLE}=environment", PROJECT]}
    networks, volumes = engine.api.networks(filters=ours), engine.api.volumes(filters=ours)["Volumes"] or ()
    return [
        *(SharedResource("network", str(one["Id"]), one["Labels"] or {}, str(one["Created"])) for one in networks),
        *(SharedResource("volume", str(one["Name"]), one["Labels"] or {}, str(one["CreatedAt"])) for one in volumes),
    ]
