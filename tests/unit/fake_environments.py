"""Environments that are only noted: what pools are tried on without a container."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from app.environments.contract import CommandResult, Environment, ResetProof, Route, Stats, Tags
from app.errors import EnvironmentFailed
from app.models.shell import StatefulShell
from app.models.spec import EnvironmentSpec


@dataclass
class World:
    """What exists, whoever made it."""

    alive: dict[str, Tags] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def born(self, identity: str, tags: Tags) -> None:
        with self.lock:
            self.alive[identity] = tags


class FakeEnvironment(Environment):
    id = ""

    def __init__(self, world: World, identity: str, spec: EnvironmentSpec, *, image_id: str | None = None) -> None:
        self.world = world
        self.image_id = image_id or f"id-of-{spec.label}"
        self.tools: dict[str, str] = {}
        self.id = identity
        self.route = Route.COLD
        self.resets = 0
        self.clean = True
        self.blocked = threading.Event()
        self.release = threading.Event()

    def describe(self) -> dict[str, Any]:
        told = {"kind": "docker", "id": self.id, "image_id": self.image_id, "origin": "fresh"}
        return {**told, **({"tools": self.tools} if self.tools else {}), "path": self.route.value}

    def adopt(self, tags: Tags) -> None:
        self._raise_if_gone()
        self.world.alive[self.id] = tags

    def _raise_if_gone(self) -> None:
        if self.id not in self.world.alive:
            raise EnvironmentFailed(f"environment {self.id} is gone")

    def run(self, command: str, *, timeout_s: float, **_: object) -> CommandResult:
        self._raise_if_gone()
        if command == "block":
            self.blocked.set()
            self.release.wait(timeout_s)
        return CommandResult(0, command.encode(), b"", False, False, 0.0)

    def shell(self, **_: object) -> StatefulShell:
        return FakeShell(self)

    def stats(self) -> Stats:
        self._raise_if_gone()
        return Stats(1, None, None, None)

    def reset(self) -> ResetProof:
        self.resets += 1
        return ResetProof(clean=self.clean)

    def destroy(self) -> None:
        with self.world.lock:
            self.world.alive.pop(self.id, None)


class FakeShell:
    def __init__(self, environment: FakeEnvironment) -> None:
        self.environment = environment
        self.closed = False

    def run(self, command: str, *, timeout_s: float) -> CommandResult:
        return self.environment.run(command, timeout_s=timeout_s)

    def close(self) -> None:
        self.closed = True


class FakeProvider:
    """broken: references whose environments cannot be made, and why. moved: what a reference has come to mean since.

    tools: versions by name, of what is made now.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.takes_s = 0.0
        self.broken: dict[str, Exception] = {}
        self.moved: dict[str, str] = {}
        self.tools: dict[str, str] = {}
        self.created: list[EnvironmentSpec] = []
        self.made: dict[str, FakeEnvironment] = {}
        self._numbers = itertools.count()

    def tool_versions(self, spec: EnvironmentSpec) -> dict[str, str]:
        return {name: self.tools.get(name, "1") for name in spec.tools}

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> FakeEnvironment:
        if (error := self.broken.get(spec.label)) is not None:
            raise error
        self.created.append(spec)
        identity = f"e{next(self._numbers)}-{uuid.uuid4().hex[:6]}"
        made = self.made[identity] = FakeEnvironment(self.world, identity, spec, image_id=self.moved.get(spec.label))
        made.tools = self.tool_versions(spec)
        self.world.born(identity, tags)
        time.sleep(self.takes_s)
        return made


def an_attempts(run_id: uuid.UUID | None = None, *, deadline_unix_s: float | None = None) -> Tags:
    deadline = time.time() + 600 if deadline_unix_s is None else deadline_unix_s
    return Tags("test", uuid.uuid4(), run_id or uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), deadline)
