"""What the containers of one project share: labels, networks, volumes; made together, removed with all that stands."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from uuid import uuid4

from docker.errors import APIError, NotFound
from docker.types import EndpointConfig, Mount, Ulimit

from app.compose_file.model import Service
from app.compose_file.mounts import MountKind
from app.compose_file.plan import ComposePlan
from app.environments.contract import CreatedResources, Tags
from app.environments.networks import firewall
from app.environments.runtimes.compose import project_cgroup
from app.environments.runtimes.compose.network import Net, make_network
from app.errors import EnvironmentFailed
from app.host.engine import ROLE, Engine
from app.models.spec import EnvironmentSpec, Network
from app.settings import Settings

PROJECT = "megaflow.project"
"""Label that tells what belongs together."""
SERVICE = "megaflow.service"
BESIDE = "megaflow.beside"
"""Label of every container that is not its project's main one, which stands for the environment."""
_ROUNDS = 20
_PAUSE_S = 0.05


class Ground:
    """One project on one engine. Whoever makes it removes it."""

    def __init__(self, engine: Engine, plan: ComposePlan, spec: EnvironmentSpec, tags: Tags) -> None:
        self.engine = engine
        self.plan = plan
        self.spec = spec
        self.tags = tags
        self.id = uuid4().hex[:12]
        self.nets: dict[str, Net] = {}
        self.cgroup: str | None = None  # around all containers; None: they are bounded one by one
        self.fate: tuple[type[EnvironmentFailed], str] | None = None  # what all of it was ended for, not by its owner
        self._removing = threading.Lock()

    def labels(self, service: str | None = None) -> dict[str, str]:
        main = self.plan.project.main
        more = {} if service is None else {SERVICE: service, **({BESIDE: main} if service != main else {})}
        return {**self.tags.labels(), ROLE: "environment", PROJECT: self.id, **more}

    # --- Making -----------------------------------------------------------------------------------------------------

    def lay(self, settings: Settings) -> None:
        """Make the group, the networks with their packet rules, and the volumes.

        Raises: EnvironmentFailed, EngineUnavailable.
        """
        project, installation = self.plan.project, self.tags.installation
        self.bound()
        for name, internal in project.networks.items():
            leads_out = self.spec.network is Network.OPEN and not internal
            bridge = firewall.project_bridge(installation) if leads_out else None
            self.nets[name] = make_network(
                self.engine, f"megaflow-{self.id}-{name}", project.together(name), self.labels(), bridge=bridge
            )
            if bridge is not None:
                firewall.ensure(self.engine, settings, installation, bridge)
        self.make_volumes()

    def bound(self) -> None:
        """Hold all containers together to twice the task's limits, where that can be. Again, before all of them stop.

        Raises: EngineUnavailable, EnvironmentFailed.
        """
        self.cgroup = project_cgroup.make(self.engine, self.id, project_cgroup.around(self.spec.resources))

    def make_volumes(self) -> None:
        with self.engine.named("create a volume", EnvironmentFailed):
            for name in self.plan.project.volumes:
                self.engine.api.create_volume(self._volume(name), driver="local", labels=self.labels())

    def empty_volumes(self) -> None:
        """Nobody may be using them. Raises: EnvironmentFailed, EngineUnavailable."""
        with self.engine.named("remove a volume", EnvironmentFailed):
            for name in self.plan.project.volumes:
                self.engine.api.remove_volume(self._volume(name))
        self.make_volumes()

    def _volume(self, name: str) -> str:
        return f"megaflow-{self.id}-{name}"

    # --- What a container is told of it -----------------------------------------------------------------------------

    def network_of(self, service: Service) -> str:
        """The one that it is made on; the engine takes one then, the others afterwards."""
        return self.nets[next(iter(service.aliases))].name if service.aliases else "none"

    def joining(self, service: Service) -> dict[str, Any]:
        """Where it stands on its first network, for the call that makes it."""
        if not service.aliases:
            return {}
        return {"networking_config": {"EndpointsConfig": {self.network_of(service): self._endpoint(service)}}}

    def join_others(self, service: Service, container_id: str) -> None:
        for network, aliases in list(service.aliases.items())[1:]:
            self.engine.api.connect_container_to_network(
                container_id,
                self.nets[network].id,
                ipv4_address=self.nets[network].addresses[service.name],
                aliases=[service.name, *aliases],
            )

    def _endpoint(self, service: Service) -> EndpointConfig:
        network, aliases = next(iter(service.aliases.items()))
        return EndpointConfig(
            self.engine.api.api_version,
            aliases=[service.name, *aliases],
            ipv4_address=self.nets[network].addresses[service.name],
        )

    def near(self, service: Service) -> list[str]:
        """Names and addresses of itself and of those that share a network with it."""
        joined = [self.nets[network].addresses.values() for network in service.aliases]
        return [*self.plan.project.near(service.name), *(one for addresses in joined for one in addresses)]

    def amended(self, config: dict[str, Any], service: Service) -> dict[str, Any]:
        """The engine's host configuration with the service's own part."""
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
            config["ShmSize"] = min(service.shm_size, self.spec.resources.memory_bytes)
        config["ExtraHosts"] = [
            *(config.get("ExtraHosts") or []),
            *(f"{name}:{address}" for name, address in service.extra_hosts.items()),
        ]
        config["Sysctls"] = {**(config.get("Sysctls") or {}), **service.sysctls}
        config["Ulimits"] = _tighter(config.get("Ulimits") or (), service)
        config["CapDrop"] = sorted({*(config.get("CapDrop") or []), *service.cap_drop})
        if self.cgroup is not None:
            config["CgroupParent"] = self.cgroup
        if self.spec.network is not Network.OPEN:
            # An engine may ask its host's own resolver for names that it does not know, also for a closed network. It
            # leaves such a question unanswered when it has nobody to ask: then nobody should wait for long.
            config["Dns"], config["DnsOptions"] = ["127.0.0.1"], ["timeout:1", "attempts:2"]
        return config

    def raise_if_ended(self) -> None:
        if self.fate is not None:
            kind, why = self.fate
            raise kind(f"project {self.id} was ended: {why}.")

    # --- Removing ---------------------------------------------------------------------------------------------------

    def created(self) -> CreatedResources:
        """What stands now. Raises: EnvironmentFailed, EngineUnavailable."""
        api, ours = self.engine.api, {"label": f"{PROJECT}={self.id}"}
        with self.engine.named("list a project's objects", EnvironmentFailed):
            return CreatedResources(
                tuple(str(found["Id"]) for found in api.containers(all=True, filters=ours)),
                tuple(str(found["Id"]) for found in api.networks(filters=ours)),
                tuple(str(found["Name"]) for found in api.volumes(filters=ours)["Volumes"] or ()),
            )

    def anonymous_volumes(self, containers: tuple[str, ...]) -> tuple[str, ...]:
        """Volumes without a name of the file, which go with their containers."""
        with self.engine.named("look at a project's mounts", EnvironmentFailed):
            mounts = [one for identity in containers for one in self.engine.api.inspect_container(identity)["Mounts"]]
        named = {self._volume(name) for name in self.plan.project.volumes}
        return tuple(one["Name"] for one in mounts if one["Type"] == "volume" and one["Name"] not in named)

    def remove(self) -> None:
        """All of it, by label: also what was made while somebody else was removing. Proven by another look.

        Raises: EnvironmentFailed: something stays; EngineUnavailable.
        """
        with self._removing:
            for _ in range(_ROUNDS):
                left = self.created()
                if left.none:
                    project_cgroup.remove(self.id)
                    return
                self._remove(left)
                time.sleep(0.0 if left.containers else _PAUSE_S)
        raise EnvironmentFailed(f"project {self.id} was removed, but {left} stay; the sweeper tries again.")

    def kill(self) -> None:
        """End what runs in all containers; they stay. Raises: EnvironmentFailed, EngineUnavailable."""
        with self.engine.named(f"end project {self.id}", EnvironmentFailed):
            for container in self.created().containers:
                with suppress(APIError):  # ended, or gone
                    self.engine.api.kill(container, signal="KILL")

    def remove_containers(self, but: str) -> None:
        """All but one. Raises: EnvironmentFailed, EngineUnavailable."""
        doomed = tuple(one for one in self.created().containers if one != but)
        self._remove(CreatedResources(doomed, (), ()))

    def _remove(self, created: CreatedResources) -> None:
        """A container that would not go keeps only what it uses."""
        with self.engine.named(f"remove project {self.id}", EnvironmentFailed):
            with ThreadPoolExecutor(len(created.containers) or 1) as pool:
                tried = [pool.submit(self.engine.remove, one) for one in created.containers]
            for volume in created.volumes:
                self._unless_busy(self.engine.api.remove_volume, volume)
            for network in created.networks:
                self._unless_busy(self.engine.api.remove_network, network)
            for one in tried:
                one.result()

    @staticmethod
    def _unless_busy(remove: Any, identity: str) -> None:
        """Gone is fine; what is in use yet is for the next look."""
        try:
            remove(identity)
        except NotFound:
            pass
        except APIError as error:
            if error.status_code not in (403, 409) and "active endpoints" not in str(error):
                raise


def _tighter(ours: Iterable[Any], service: Service) -> list[Ulimit]:
    """Our limits and the file's, the tighter one where both say something."""
    limits = {one["Name"]: Ulimit(name=one["Name"], soft=one["Soft"], hard=one["Hard"]) for one in ours}
    for name, (soft, hard) in service.ulimits.items():
        most = limits[name]["Hard"] if name in limits else -1
        hard = _smaller(hard, most)
        limits[name] = Ulimit(name=name, soft=_smaller(soft, hard), hard=hard)
    return list(limits.values())


def _smaller(one: int, other: int) -> int:
    """Below zero is without end."""
    return max(one, other) if min(one, other) < 0 else min(one, other)
