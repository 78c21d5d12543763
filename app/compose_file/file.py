"""Reads a compose file into a `Project`, or refuses it with all its reasons at once. Pure: reads files, starts nothing.

Source: the Compose Specification; of it what a task needs: docs/compose.md lists the keys.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from app.compose_file.findings import Findings
from app.compose_file.model import Condition, Project, Recipe, Service
from app.compose_file.mounts import Mounts
from app.compose_file.refusals import TOP_REFUSED, refuse_listed
from app.compose_file.service_file import ServiceReader
from app.compose_file.values import Values
from app.compose_file.variables import Substitution
from app.errors import SpecInvalid

__all__ = ["MAX_SERVICES", "document", "read_project"]

MAX_SERVICES = 32
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")
_VOLUME_KEYS = {"labels", "name", "driver"}
_NETWORK_KEYS = {"labels", "name", "driver", "internal", "attachable", "enable_ipv4", "enable_ipv6"}


def document(root: Path, file: Path) -> dict[str, Any]:
    """The YAML as it stands, of a file in the folder `root`. Raises: SpecInvalid."""
    from app.compose_file import bounded_yaml  # a producer without tasks of this kind needs no YAML

    try:
        found = bounded_yaml.read(root, file)
    except (OSError, ValueError) as error:
        raise SpecInvalid(f"{file.name}: expected YAML; found {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("services"), dict) or not found["services"]:
        raise SpecInvalid(f"{file.name}: expected a map with `services`; found a {type(found).__name__} without it")
    return found


def read_project(folder: Path, file: str = "docker-compose.yaml", main: str = "main") -> Project:
    """What the file in the context `folder` asks for; the agent acts in the service `main`.

    Raises: SpecInvalid: names every place that is refused.
    """
    where = (folder / file).resolve()
    if not where.is_relative_to(folder.resolve()) or not where.is_file():
        found = ", ".join(sorted(one.name for one in folder.iterdir())[:20]) or "nothing"
        raise SpecInvalid(f"expected the compose file {file} in the context; found {found}")
    findings = Findings()
    tree = Substitution(findings).everywhere(document(folder, where)) or {}
    project = _Reader(findings, folder, main).read(tree)
    findings.settle(file)
    return project


class _Reader:
    """One reading."""

    def __init__(self, findings: Findings, folder: Path, main: str) -> None:
        self._findings = findings
        self._values = Values(findings)
        self._folder = folder
        self._main = main

    def read(self, tree: dict[str, Any]) -> Project:
        rest = refuse_listed(self._findings, tree, TOP_REFUSED, "")
        services = self._values.mapping(rest.pop("services", None), "services")
        networks = self._networks(self._values.mapping(rest.pop("networks", None), "networks"))
        volumes = self._volumes(self._values.mapping(rest.pop("volumes", None), "volumes"))
        for key in rest.keys() - {"version", "name"}:
            self._findings.refuse(key, "services, networks and volumes", rest[key])
        if not 0 < len(services) <= MAX_SERVICES:
            self._findings.refuse("services", f"1 to {MAX_SERVICES} services", len(services))
        reader = ServiceReader(self._values, self._folder, Mounts(self._values, self._folder, volumes), set(networks))
        read = {name: reader.read(name, body) for name, body in self._named(services, "services").items()}
        started = self._started(_sharing_images(read))
        used = {network for one in started.values() for network, _ in one.networks}
        named = {mount.source for one in started.values() for mount in one.mounts if mount.kind.value == "named"}
        internal = {"default": False, **networks}
        return Project(
            self._main,
            started,
            {name: internal[name] for name in internal if name in used},
            tuple(sorted(named)),
            tuple(self._findings.notes),
        )

    def _named(self, found: dict[str, Any], where: str) -> dict[str, Any]:
        """Those whose names an engine takes, too: they are part of its own objects' names."""
        for name in found:
            if _NAME.fullmatch(name) is None:
                self._findings.refuse(f"{where}.{name}", "a name of letters, digits, dots and dashes", name)
        return {name: body for name, body in found.items() if _NAME.fullmatch(name) is not None}

    def _networks(self, found: dict[str, Any]) -> dict[str, bool]:
        networks = {}
        for name, body in self._named(found, "networks").items():
            where = f"networks.{name}"
            about = self._values.mapping(body, where)
            self._declared(about, _NETWORK_KEYS, "bridge", where)
            networks[name] = self._values.flag(about.get("internal"), f"{where}.internal")
        return networks

    def _volumes(self, found: dict[str, Any]) -> set[str]:
        for name, body in self._named(found, "volumes").items():
            self._declared(self._values.mapping(body, f"volumes.{name}"), _VOLUME_KEYS, "local", f"volumes.{name}")
        return set(found)

    def _declared(self, about: dict[str, Any], known: set[str], driver: str, where: str) -> None:
        """A network or a volume of the project's own, as the engine makes it without further words."""
        if about.get("external") not in (None, False, "false"):
            self._findings.refuse(f"{where}.external", "one of the project's own", about["external"], "leave it out")
        if about.get("driver") not in (None, "", "default", driver):
            self._findings.refuse(f"{where}.driver", driver, about["driver"], "leave it out")
        for key in about.keys() - known - {"external"}:
            if not key.startswith("x-") and about[key] not in (None, {}, []):
                self._findings.refuse(f"{where}.{key}", "none of the engine's options", about[key], "leave it out")

    def _started(self, services: dict[str, Service]) -> dict[str, Service]:
        """Main, those without a profile, and what they need."""
        if self._main not in services:
            known = ", ".join(services) or "none"
            self._findings.refuse("services", f"the service {self._main!r}, in which the agent acts", known)
        else:
            self._fit_main(services[self._main])
        wanted = [name for name, one in services.items() if name == self._main or not one.profiles]
        reached: set[str] = set()
        while wanted:
            name = wanted.pop()
            if name in reached:
                continue
            reached.add(name)
            for other, condition in services[name].depends_on:
                if other in services:
                    wanted.append(other)
                    self._refuse_waiting_for_main(name, other, condition)
                else:
                    self._findings.refuse(f"services.{name}.depends_on", "services of this file", other)
        self._refuse_circles({name: services[name] for name in reached})
        for name in services.keys() - reached:
            self._findings.note(f"services.{name}", f"not started: it is for {', '.join(services[name].profiles)} only")
        return {name: one for name, one in services.items() if name in reached}

    def _fit_main(self, main: Service) -> None:
        """What a service may ask that has no session in it."""
        where = f"services.{main.name}"
        if main.read_only:
            expected = "a root that can be written to: the agent works there, and tests are laid out in it"
            self._findings.refuse(f"{where}.read_only", expected, True, "leave it out")
        if main.init:
            self._findings.note(f"{where}.init", "as in every environment: the first process takes in orphans")

    def _refuse_waiting_for_main(self, name: str, other: str, condition: Condition) -> None:
        if other == self._main and condition is Condition.COMPLETED:
            expected = "a condition that comes true: the main service does not end"
            self._findings.refuse(f"services.{name}.depends_on.{other}", expected, str(condition))

    def _refuse_circles(self, services: dict[str, Service]) -> None:
        left = {name: {other for other, _ in one.depends_on} & services.keys() for name, one in services.items()}
        while free := [name for name, needs in left.items() if not needs & left.keys()]:
            for name in free:
                del left[name]
        if left:
            self._findings.refuse("services", "an order to start in", f"a circle of {', '.join(sorted(left))}")


def _sharing_images(services: dict[str, Service]) -> dict[str, Service]:
    """A service that names what another one builds has the same image."""
    built = {one.image: one.recipe for one in services.values() if one.image and one.recipe}
    return {
        name: one if one.recipe else _with_recipe(one, built.get(one.image) if one.image else None)
        for name, one in services.items()
    }


def _with_recipe(service: Service, recipe: Recipe | None) -> Service:
    return service if recipe is None else dataclasses.replace(service, recipe=recipe)
