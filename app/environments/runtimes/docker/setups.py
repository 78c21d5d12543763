"""Keeps the result of set-up commands as an image, so that they run once per image and commands.

The first environment with given commands runs them in a container of its own, which is committed and removed. It and
all later ones start from the result, so that each can be reset to it. Concurrent requests for the same wait. What is
not in files (processes, memory, volumes) is in no image: such a set-up is not kept, and each environment runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from app.environments.contract import Route, Times
from app.environments.runtimes.docker.container import DockerEnvironment
from app.environments.runtimes.session_environment import ended_on_error, give_up
from app.environments.runtimes.setup import EnvironmentRequest, carry_out, refuse_read_only, setup_key, setup_turn
from app.errors import EnvironmentFailed, ImageUnavailable
from app.host.engine import ROLE, Engine
from app.images import references
from app.images.layer_store import ImageStore
from app.images.metadata import ImageMetadata
from app.models.spec import Reuse
from app.settings import Settings

log = structlog.get_logger()

REPOSITORY = "megaflow/setup"
"""Repository of the images; the tag is the key."""
KEY = "megaflow.setup"
"""Label of such an image: its key."""
BASE = "megaflow.setup.base"
"""Label of such an image: the id of the task's image that it was made from."""
_OWNERS = ("instance", "run", "task", "attempt", "deadline")
"""Labels of the container that its image must not pass on to containers based on it."""
_BESIDE = (
    "cat /etc/hosts /etc/hostname /etc/resolv.conf; ls -ln /etc/hosts /etc/hostname /etc/resolv.conf;"
    " ls -A /dev; ls -lnA /dev/shm /dev/mqueue; exit 0"
)
"""Command that shows what a set-up may leave outside a container's own files."""
_LOOK_S = 30.0


def _pulled(image: dict[str, Any]) -> bool:
    return any(not digest.startswith("<none>") for digest in image.get("RepoDigests") or ())


Start = Callable[[EnvironmentRequest, str | None], DockerEnvironment]
"""Starts an environment, on another image than the task's if one is given."""


class Setups:
    """Store of set-up results as images in one engine. Threads and processes of one home may share it."""

    def __init__(self, settings: Settings, engine: Callable[[], Engine], start: Start) -> None:
        self._engine_of = engine
        self._start = start
        self._book = ImageMetadata(settings)
        self._turns = settings.home / "run" / "slots"
        self._store = ImageStore(settings.home.resolve())
        self._installation = settings.installation

    def environment(self, request: EnvironmentRequest) -> DockerEnvironment:
        """Returns an environment with the commands done. Raises: SetupFailed, SetupTimedOut, and errors of `Start`."""
        key = setup_key(request.spec, request.image_id)
        request.times.phases["set_up"] = 0.0
        snapshot = self._find(key)
        if snapshot is None and not self._store.is_unkept(key):
            with setup_turn(self._turns / f"setup-{key[:24]}", request):
                snapshot = self._find(key)
                if snapshot is None and not self._store.is_unkept(key):
                    result = self._first_of_its_kind(request, key)
                    return result if isinstance(result, DockerEnvironment) else self._start(request, result)
        if snapshot is None:
            return self._set_up(request)
        request.times.route = Route.SNAPSHOT
        self._book.used(snapshot, references.key_of(request.spec))
        return self._start(request, snapshot)

    def _find(self, key: str) -> str | None:
        engine = self._engine_of()
        with engine.named("look for a kept set-up", ImageUnavailable):
            images = engine.api.images(name=f"{REPOSITORY}:{key}")
        # The name can be guessed: an image that came from a registry is not ours.
        ours = [one for one in images if not _pulled(one)]
        return str(ours[0]["Id"]) if ours else None

    def _first_of_its_kind(self, request: EnvironmentRequest, key: str) -> str | DockerEnvironment:
        """Returns the image that was kept, or the environment itself when nothing could be kept."""
        apart = replace(request, times=Times())
        with request.times.measure("set_up"):
            environment, before = self._prepared(apart)
            with ended_on_error(environment):
                carry_out(request.spec.setup, environment, request.deadline)
                if (reason := _beyond_files(environment, before)) is None:
                    return self._keep(environment, request, key)
        self._store.note_unkept(key, request.image_id)
        log.info("environment.setup_not_cached", environment=environment.id, reason=reason)
        with ended_on_error(environment):
            refuse_read_only(request.spec, reason)
        environment.note_set_up_done()
        paid, inside_s = request.times.phases, sum(environment.times.phases.values())
        environment.times.phases |= {**paid, "set_up": paid["set_up"] - inside_s}
        return environment

    def _set_up(self, request: EnvironmentRequest) -> DockerEnvironment:
        refuse_read_only(request.spec, "that was found before")
        environment, _ = self._prepared(request)
        with ended_on_error(environment), request.times.measure("set_up"):
            carry_out(request.spec.setup, environment, request.deadline)
            environment.note_set_up_done()
        return environment

    def _prepared(self, request: EnvironmentRequest) -> tuple[DockerEnvironment, str]:
        writable = request.spec.model_copy(update={"reuse": Reuse.RECYCLED})
        environment = self._start(replace(request, spec=writable), None)
        environment.mark_set_up()
        with ended_on_error(environment):
            return environment, _outside_files(environment)

    def _keep(self, environment: DockerEnvironment, request: EnvironmentRequest, key: str) -> str:
        engine = self._engine_of()
        labels = {"megaflow": self._installation, "megaflow.image": "setup", KEY: key}
        begun = time.monotonic()
        blank = dict.fromkeys((ROLE, *(f"megaflow.{owner}" for owner in _OWNERS)), "")
        with engine.named("keep what a set-up made", EnvironmentFailed):
            user = engine.user_of(request.image_id) or "0"
            conf = {"Labels": {**blank, BASE: request.image_id, **labels}, "User": user}
            image_id = str(engine.api.commit(environment.id, repository=REPOSITORY, tag=key, conf=conf)["Id"])
        self._book.made(image_id, references.key_of(request.spec), [f"{REPOSITORY}:{key}"])
        log.info(
            "environment.setup_cached", image=request.spec.label, key=key, took_s=round(time.monotonic() - begun, 3)
        )
        give_up(environment)
        return image_id


def _outside_files(environment: DockerEnvironment) -> str:
    return environment.run(_BESIDE, cwd="/", timeout_s=_LOOK_S).text()


def _beyond_files(environment: DockerEnvironment, before: str) -> str | None:
    if environment.stats().processes:
        return "processes are running in it"
    if environment.volumes():
        return "it has volumes"
    if _outside_files(environment) != before:
        return "it changed the engine's own files, or left some in memory"
    return None
