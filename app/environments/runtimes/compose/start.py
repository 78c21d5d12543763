"""One project under construction: networks and volumes, then the services in their order, then the set-up commands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import structlog

from app.environments.contract import Times
from app.environments.runtimes.compose.disk_usage import Footprint
from app.environments.runtimes.compose.environment import ComposeEnvironment
from app.environments.runtimes.compose.main_container import MainProvider, start_inside
from app.environments.runtimes.compose.resources import Ground
from app.environments.runtimes.compose.service import Peer
from app.environments.runtimes.compose.start_order import Order
from app.environments.runtimes.docker import disk_limits
from app.environments.runtimes.docker.container import DockerEnvironment
from app.environments.runtimes.setup import carry_out
from app.environments.session.transport import binary_for
from app.environments.tools import Find
from app.errors import NoPlaceToStart, ServiceUnhealthy, StationError
from app.host.disk_watch import DiskWatch, limit_of
from app.host.slots import Gate
from app.images.task_images import Images, host_of
from app.settings import Settings

log = structlog.get_logger()


class Making:
    """Makes one environment, or leaves nothing."""

    def __init__(
        self,
        settings: Settings,
        images: Images,
        gate: Gate,
        watch: DiskWatch,
        ground: Ground,
        image_ids: dict[str, str],
        times: Times,
        tools: Find | None,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._ground = ground
        self._image_ids = image_ids
        self._times = times
        self._provider = MainProvider(settings, images, gate, ground, watch, tools)
        self._project = ground.plan.project
        self._main: DockerEnvironment | None = None
        helper = binary_for(ground.engine, settings.home)
        self._peers = {
            name: Peer(ground, one, image_ids[name], helper)
            for name, one in self._project.services.items()
            if name != self._project.main
        }
        self._watch = watch
        self._footprint = Footprint(ground, self._peers.values())

    def environment(self, deadline: float, start_s: float) -> ComposeEnvironment:
        """deadline: monotonic. start_s: what a start may take again, after a reset.

        Raises: ServiceUnhealthy: names the one at fault; SetupFailed, SetupTimedOut, NoPlaceToStart;
            EnvironmentFailed; EngineUnavailable.
        """
        if disk_limits.in_sight(self._ground.engine):  # else nobody can look from here
            self._watch.watch(self._footprint, limit_of(self._ground.spec))
        try:
            return self._made(deadline, start_s)
        except StationError:
            self._ground.raise_if_ended()  # that is why
            raise

    def _made(self, deadline: float, start_s: float) -> ComposeEnvironment:
        with self._times.measure("network"):
            self._ground.lay(self._settings)
        with self._times.measure("services"):
            order = Order(self._project, self._peers, lambda: self._place(deadline), lambda: self._start_main(deadline))
            order.carry_out(deadline)
        assert self._main is not None
        with self._main.times.measure("set_up"):
            self._set_up(self._main, deadline)
        self._add_up(self._main.times.phases)
        self._ground.raise_if_ended()
        return ComposeEnvironment(self._main, self._peers, self._ground, self._footprint, self._start_again, start_s)

    def _add_up(self, phases: dict[str, float]) -> None:
        """The main container's phases become the whole project's: it starts when the last service is ready."""
        own = self._times.phases
        within = phases.get("image", 0.0) + phases.get("create", 0.0) + phases.get("session", 0.0)
        phases["image"] = own["image"]
        phases["create"] = phases.get("create", 0.0) + own["network"]
        phases["start"] = max(phases.get("start", 0.0), own["services"] - within)

    def abandon(self) -> None:
        """Remove whatever stands; what cannot be removed now is the sweeper's."""
        self._footprint.end()
        for peer in self._peers.values():
            peer.close()
        try:
            if self._main is not None:
                with suppress(StationError):
                    self._main.destroy()
            self._ground.remove()
        except StationError as error:
            log.warning("environment.project_stays", project=self._ground.id, reason=str(error))

    @contextmanager
    def _place(self, deadline: float) -> Iterator[None]:
        limit, capacity = f"environment_starts:{host_of(self._ground.engine)}", self._settings.environment_starts
        try:
            with self._gate.hold(limit, capacity, timeout_s=deadline - time.monotonic()):
                yield
        except TimeoutError as error:
            raise NoPlaceToStart(f"no service could be started in time: {error}.") from error

    def _start_main(self, deadline: float) -> None:
        plan, spec = self._ground.plan, self._ground.spec
        service = plan.main
        image = plan.images[service.name]  # the rest is this task's own, whoever made the plan
        environment = {**service.variables, **spec.env}
        part = spec.model_copy(
            update={"compose": None, "image": image.image, "build": image.build, "setup": (), "env": environment}
        )
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ServiceUnhealthy(f"service {service.name!r} was not started in time: the others took all of it.")
        self._main = self._footprint.main = self._provider.create(part, self._ground.tags, timeout_s=left_s)
        self._watch.forget(self._main)  # it is watched as a part of the whole
        self._ground.raise_if_ended()  # before it was known
        start_inside(self._main, self._ground, self._image_ids[service.name], deadline)

    def _start_again(self, deadline: float) -> None:
        """The others, and what the main service runs of its own: it has just been reset."""
        assert self._main is not None
        Order(self._project, self._peers, lambda: self._place(deadline), None).carry_out(deadline)
        start_inside(self._main, self._ground, self._image_ids[self._project.main], deadline)

    def _set_up(self, main: DockerEnvironment, deadline: float) -> None:
        """Here and not by the main container's own provider, whose snapshots know nothing of the other services."""
        carry_out(self._ground.spec.setup, main, deadline)
