"""Reads a compose file into a `Project`, or refuses it with all reasons in one error. Starts nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from app.compose_file.model import (
    ComposeFile,
    Condition,
    DeclaredNetwork,
    DeclaredVolume,
    Service,
)
from app.compose_file.mounts import MountKind
from app.compose_file.refusals import FileContext
from app.compose_file.variables import Substitution
from app.errors import SpecInvalid

MAX_SERVICES = 32
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")
"""Names that an engine accepts, too: they become part of the names of its objects."""
_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Project:
    """A whole compose file. `notes`: the ignored keys, for a person to read."""

    main: str
    services: dict[str, Service]  # only the started ones
    networks: dict[str, bool] = field(default_factory=dict)  # by name; True: no access to the outside
    volumes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def waits_for(self, name: str) -> dict[str, Condition]:
        """Returns the services that `name` waits for, each with its condition."""
        return {other: one.condition for other, one in self.services[name].depends_on.items()}

    def awaited(self, name: str) -> set[Condition]:
        """Returns the conditions that other services wait for in `name`."""
        return {one.depends_on[name].condition for one in self.services.values() if name in one.depends_on}

    def together(self, network: str) -> list[str]:
        """Returns the services on a network, in the file's order."""
        return [name for name, one in self.services.items() if network in one.aliases]

    def near(self, name: str) -> tuple[str, ...]:
        """Returns the host names by which a service reaches itself and the services on its networks."""
        own = self.services[name]
        hosts = [own.name]
        hosts += [host for host, address in own.extra_hosts.items() if ip_address(address.strip("[]")).is_loopback]
        hosts += [own.hostname] if own.hostname else []
        for one in self.services.values():
            for aliases in (aliases for network, aliases in one.aliases.items() if network in own.aliases):
                hosts += [one.name, *aliases, *([one.hostname] if one.hostname else [])]
        return tuple(dict.fromkeys(hosts))


def document(root: Path, file: Path) -> dict[str, Any]:
    """Reads the unprocessed YAML of a file in the folder `root`. Raises: SpecInvalid."""
    from app.compose_file import bounded_yaml  # imported here: a producer without compose tasks needs no YAML

    try:
        content = bounded_yaml.read(root, file)
    except (OSError, ValueError) as error:
        raise SpecInvalid(f"{file.name}: expected YAML; found {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("services"), dict) or not content["services"]:
        raise SpecInvalid(f"{file.name}: expected a map with `services`; found a {type(content).__name__} without it")
    return content


def read_project(folder: Path, file: str = "docker-compose.yaml", main: str = "main") -> Project:
    """Reads a file in `folder` as a project; the agent acts in `main`. Raises: SpecInvalid: names refused places."""
    context = FileContext(folder.resolve())
    try:
        where = (folder / file).resolve()
        if not where.is_relative_to(folder.resolve()) or not where.is_file():
            names = ", ".join(sorted(one.name for one in folder.iterdir())[:20]) or "nothing"
            raise SpecInvalid(f"expected the compose file {file} in the context; found {names}")
        tree = Substitution(context).everywhere(document(folder, where)) or {}
        project = _project(tree, context, main)
    except (OSError, OverflowError, RuntimeError) as error:  # such as a too long name or circular links
        raise SpecInvalid(
            f"{file}: expected names and numbers that a system takes; found {str(error)[:200]}"
        ) from error
    context.raise_refused(file)
    return replace(project, notes=tuple(dict.fromkeys(context.notes)))


def _project(tree: dict[str, Any], context: FileContext, main: str) -> Project:
    whole = _section(ComposeFile, tree, context)
    if not 0 < len(whole.services) <= MAX_SERVICES:
        context.refuse("services", f"1 to {MAX_SERVICES} services", len(whole.services))
    networks = {
        name: _section(DeclaredNetwork, body, replace(context, where=f"networks.{name}")).internal
        for name, body in _named(whole.networks, "networks", context).items()
    }
    for name, body in _named(whole.volumes, "volumes", context).items():
        _section(DeclaredVolume, body, replace(context, where=f"volumes.{name}"))
    volumes, joined = frozenset(whole.volumes), frozenset(networks)
    services = {
        name: _service(name, body, replace(context, where=f"services.{name}", volumes=volumes, networks=joined))
        for name, body in _named(whole.services, "services", context).items()
    }
    started = _started(_sharing_images(services), main, context)
    used = {network for one in started.values() for network in one.aliases}
    named = {mount.source for one in started.values() for mount in one.mounts if mount.kind is MountKind.NAMED}
    internal = {"default": False, **networks}
    return Project(main, started, {name: internal[name] for name in internal if name in used}, tuple(sorted(named)))


def _section(model: type[_Model], body: Any, context: FileContext) -> _Model:
    """Validates a section. After errors, validates its other keys again, to find everything wrong with the file."""
    try:
        return model.model_validate(body, context=context)
    except ValidationError as error:
        wrong = context.add(error)
        rest = {key: value for key, value in body.items() if key not in wrong} if isinstance(body, dict) else {}
        return model.model_validate(rest, context=context)


def _service(name: str, body: Any, context: FileContext) -> Service:
    given = body if isinstance(body, dict) else {}
    if body is not None and not isinstance(body, dict):
        context.refuse("", "a map", body)
    if "name" in given:
        context.refuse("name", "a key that we know", given["name"], "leave it out")
    if given.get("image") in (None, "") and given.get("build") is None:
        context.refuse("", "`image` or `build`", list(given))
    return _section(Service, {**given, "name": name}, context)


def _named(found: dict[str, Any], where: str, context: FileContext) -> dict[str, Any]:
    for name in found:
        if _NAME.fullmatch(name) is None:
            context.refuse(f"{where}.{name}", "a name of letters, digits, dots and dashes", name)
    return {name: body for name, body in found.items() if _NAME.fullmatch(name) is not None}


def _sharing_images(services: dict[str, Service]) -> dict[str, Service]:
    built = {one.image: one.build for one in services.values() if one.image and one.build}
    return {
        name: one.model_copy(update={"build": one.build or (one.image and built.get(one.image)) or None})
        for name, one in services.items()
    }


def _started(services: dict[str, Service], main: str, context: FileContext) -> dict[str, Service]:
    """Returns the services to start: main, those without a profile, and their dependencies."""
    if main not in services:
        known = ", ".join(services) or "none"
        context.refuse("services", f"the service {main!r}, in which the agent acts", known)
    elif services[main].init:
        context.note(f"services.{main}.init", "as in every environment: the first process takes in orphans")
    pending = [name for name, one in services.items() if name == main or not one.profiles]
    reached: set[str] = set()
    while pending:
        name = pending.pop()
        if name in reached:
            continue
        reached.add(name)
        for other, dependency in services[name].depends_on.items():
            where = f"services.{name}.depends_on"
            if other not in services:
                context.refuse(where, "services of this file", other)
                continue
            pending.append(other)
            if other == main and dependency.condition is Condition.COMPLETED:
                expected = "a condition that comes true: the main service does not end"
                context.refuse(f"{where}.{other}", expected, str(dependency.condition))
    _refuse_circles({name: services[name] for name in reached}, context)
    for name in services.keys() - reached:
        context.note(f"services.{name}", f"not started: it is for {', '.join(services[name].profiles)} only")
    return {name: one for name, one in services.items() if name in reached}


def _refuse_circles(services: dict[str, Service], context: FileContext) -> None:
    try:
        TopologicalSorter({name: one.depends_on.keys() & services.keys() for name, one in services.items()}).prepare()
    except CycleError as error:
        context.refuse("services", "an order to start in", f"a circle of {', '.join(sorted(set(error.args[1])))}")
