"""Makes memory environments: from nothing, from images that it was given, or by the `setup.sh` of a build context."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.environments.base import Route, Snapshot, Tags
from app.environments.living import give_up
from app.environments.memory import snapshots
from app.environments.memory.environment import MemoryEnvironment
from app.environments.memory.faults import Fault, Faults, Trouble
from app.environments.memory.programs import PROGRAMS
from app.environments.memory.shell.calls import Program
from app.environments.setting_up import carry_out
from app.environments.tools import tool_inside
from app.errors import EnvironmentFailed, ImageBuildFailed, ImageUnavailable, SpecInvalid
from app.models.spec import Bundle, EnvironmentSpec, Network, Reuse
from app.settings import Settings

EMPTY = "memory:empty"
"""The image that is always there: a shell, and no file but /testbed and /tmp."""


@dataclass(frozen=True)
class _Living:
    environment: MemoryEnvironment
    installation: str


_living: dict[str, _Living] = {}
"""All of this process, by id: a sweep is done by another provider than the one that made them."""
_lock = threading.Lock()


class MemoryProvider:
    """Keeps everything in this process.

    images: uncompressed tars of root file systems by reference. programs: commands beside those of `PROGRAMS` (a name
    of theirs replaces it). faults: what is to go wrong, once each or as often as it says.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        fetch_bundle: Callable[[Bundle], bytes],
        images: Mapping[str, bytes] | None = None,
        programs: Mapping[str, Program] | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        self._fetch_bundle = fetch_bundle
        self._images = dict(images or {})
        self._programs = {**PROGRAMS, **(programs or {})}
        self._faults = Faults(faults)

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        _refuse(spec)
        if spec.build is not None:
            return f"memory:{spec.build.context.sha256[:24]}"
        if spec.image != EMPTY and spec.image not in self._images:
            known = ", ".join([EMPTY, *sorted(self._images)])
            raise ImageUnavailable(
                f"expected an image that a memory environment was given ({known}), found {spec.image}: it pulls none."
                " Use the kind `docker`, or a build context with a setup.sh."
            )
        content = self._images.get(spec.image, b"")
        return f"memory:{hashlib.sha256(content).hexdigest()[:24]}"

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> MemoryEnvironment:
        deadline = time.monotonic() + timeout_s
        environment = MemoryEnvironment(spec, self._programs, self._faults)
        with environment.times.measure("image"):
            self.prepare_image(spec, timeout_s=timeout_s)
        return self._made(
            environment, spec, tags, lambda: self._fill(environment, spec, deadline), spec.setup, deadline
        )

    def create_from(
        self, snapshot: Snapshot, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float
    ) -> MemoryEnvironment:
        _refuse(spec)
        deadline = time.monotonic() + timeout_s
        environment = MemoryEnvironment(spec, self._programs, self._faults)
        environment.times.route = Route.SNAPSHOT
        with environment.times.measure("image"):
            root = snapshots.find(snapshot)
        return self._made(environment, spec, tags, lambda: environment.take_files(root), (), deadline)

    def remove_snapshot(self, snapshot: Snapshot) -> None:
        snapshots.remove(snapshot)

    def _made(
        self,
        environment: MemoryEnvironment,
        spec: EnvironmentSpec,
        tags: Tags,
        fill: Callable[[], None],
        setup: Sequence[str],
        deadline: float,
    ) -> MemoryEnvironment:
        measure = environment.times.measure
        if self._faults.due(spec.label, Trouble.NOT_MADE):
            raise EnvironmentFailed(f"no environment could be made of {spec.label}, as a fault ordered.")
        try:
            with measure("create"):
                fill()
            with measure("set_up"):
                carry_out(setup, environment, deadline)
            environment.keep_as_pristine()
        except BaseException:
            give_up(environment)
            raise
        with _lock:
            _living[environment.id] = _Living(environment, tags.installation)
        environment.when_gone(lambda: _forget(environment.id))
        return environment

    def sweep(self, *, installation: str, keep: Mapping[str, bool] | None = None) -> list[str]:
        with _lock:
            found = [
                (name, one.environment)
                for name, one in _living.items()
                if one.installation == installation and not (keep or {}).get(name, False)
            ]
        for _, environment in found:
            environment.destroy()
        return [*(name for name, _ in found), *snapshots.sweep(installation, keep or {})]

    def _fill(self, environment: MemoryEnvironment, spec: EnvironmentSpec, deadline: float) -> None:
        if spec.build is None:
            if content := self._images.get(spec.image or "", b""):
                environment.unpack_root(content)
            return
        environment.put_tree(self._fetch_bundle(spec.build.context), "/build")
        try:
            environment.get("/build/setup.sh")
        except FileNotFoundError as error:
            raise ImageUnavailable(
                f"expected a setup.sh in the build context of {spec.label}, found none: a memory environment cannot"
                " follow a Dockerfile. Use the kind `docker`."
            ) from error
        left_s = min(spec.build.timeout_s, deadline - time.monotonic())
        result = environment.run("sh /build/setup.sh", cwd="/build", timeout_s=max(0.1, left_s))
        if not result.ok:
            how = "took longer than its time" if result.timed_out else f"left with {result.exit_code}"
            raise ImageBuildFailed(f"setup.sh of {spec.label} {how}; its output ends:\n{result.text()[-3000:]}")


def _forget(name: str) -> None:
    with _lock:
        _living.pop(name, None)


def _refuse(spec: EnvironmentSpec) -> None:
    """Raises: SpecInvalid: it wants what a memory environment would have to pretend."""
    if spec.compose is not None:
        raise SpecInvalid("expected `image` or `build`, found `compose`: a memory environment is one, not several.")
    for name in spec.tools:
        tool_inside(spec.kind, name, Path("/"))
    if spec.network is Network.OPEN:
        raise SpecInvalid("expected another network than `open`: a memory environment reaches nothing.")
    if spec.reuse is Reuse.SHARED_READONLY:
        raise SpecInvalid("expected `reuse` fresh or recycled, found shared-readonly: a memory root can be written to.")
