"""What a compose file asks for, after reading: plain frozen data, nothing of the host in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_address


class Condition(StrEnum):
    """What a service waits for in another."""

    STARTED = "service_started"
    HEALTHY = "service_healthy"
    COMPLETED = "service_completed_successfully"


@dataclass(frozen=True, slots=True)
class Recipe:
    """An image to build: a folder of the bundle, with arguments and a last stage."""

    context: str = "."  # relative to the bundle's root
    dockerfile: str = "Dockerfile"  # relative to the context
    args: tuple[tuple[str, str], ...] = ()
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """When a service counts as healthy. `test` begins with CMD or CMD-SHELL; empty: the image's own."""

    test: tuple[str, ...] = ()
    disabled: bool = False
    interval_s: float = 30.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    retries: int = 3


class MountKind(StrEnum):
    NAMED = "named"  # a volume of the project
    ANONYMOUS = "anonymous"  # a volume of the container
    COPY = "copy"  # a path of the bundle, copied in
    FOLDER = "folder"  # where a harness mounts a folder of its own: made, empty
    TMPFS = "tmpfs"


@dataclass(frozen=True, slots=True)
class Mounted:
    """Something that a container finds at `target`."""

    kind: MountKind
    target: str
    source: str = ""  # a volume's name, or a path in the bundle
    read_only: bool = False
    size_bytes: int | None = None  # of a tmpfs


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds that the file asks for; None: those of the task."""

    cpus: float | None = None
    memory_bytes: int | None = None
    pids: int | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """One container of the project."""

    name: str
    image: str | None = None
    recipe: Recipe | None = None
    command: tuple[str, ...] | None = None  # None: the image's
    entrypoint: tuple[str, ...] | None = None
    environment: tuple[tuple[str, str], ...] = ()
    working_dir: str | None = None
    user: str | None = None
    hostname: str | None = None
    depends_on: tuple[tuple[str, Condition], ...] = ()
    check: Check | None = None
    mounts: tuple[Mounted, ...] = ()
    networks: tuple[tuple[str, tuple[str, ...]], ...] = ()  # network and the service's further names there
    hosts: tuple[tuple[str, str], ...] = ()  # name and address
    exposed: tuple[str, ...] = ()
    bounds: Bounds = Bounds()
    shm_bytes: int | None = None
    cap_drop: tuple[str, ...] = ()
    sysctls: tuple[tuple[str, str], ...] = ()
    ulimits: tuple[tuple[str, int, int], ...] = ()  # name, soft, hard
    read_only: bool = False
    init: bool = False
    stop_signal: str | None = None
    profiles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Project:
    """A whole file. `notes`: what was passed over, for a person."""

    main: str
    services: dict[str, Service]  # those that are started
    networks: dict[str, bool] = field(default_factory=dict)  # by name; True: never leads outside
    volumes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def waits_for(self, name: str) -> dict[str, Condition]:
        """What `name` needs before it starts."""
        return dict(self.services[name].depends_on)

    def awaited(self, name: str) -> set[Condition]:
        """What others wait for in `name`."""
        return {found for one in self.services.values() for other, found in one.depends_on if other == name}

    def together(self, network: str) -> list[str]:
        """The services on a network, in the file's order."""
        return [name for name, one in self.services.items() if network in dict(one.networks)]

    def near(self, name: str) -> tuple[str, ...]:
        """Host names by which a service reaches itself and those that share a network with it."""
        own = self.services[name]
        joined = {network for network, _ in own.networks}
        found = [own.name, *(host for host, address in own.hosts if ip_address(address.strip("[]")).is_loopback)]
        found += [own.hostname] if own.hostname else []
        for one in self.services.values():
            for aliases in (aliases for network, aliases in one.networks if network in joined):
                found += [one.name, *aliases, *([one.hostname] if one.hostname else [])]
        return tuple(dict.fromkeys(found))
