"""Base of cloud providers: tries machine types and places in turn, and handles unclear answers."""

from __future__ import annotations

import hashlib
import math
import re
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple
from uuid import UUID

import structlog

from app.errors import InstanceFailed, LaunchUnclear, NoCapacity
from app.instances.prices import machines
from app.ledger import hosts
from app.ledger.database import Database
from app.models.instance import InstanceRequest
from app.settings import Settings

log = structlog.get_logger()

INSTALLATION_TAG = "megaflow"
INSTANCE_TAG = "megaflow:instance"

_AT_ONCE = 32
_LONGEST_S = 10.0
"""Time after which a launch of many stops its requests. The rest is requested at the next look."""
_YOUNG_S = 60.0
"""Time for which a new machine may be missing in a cloud's lists."""

_ECR = re.compile(r"(\d{12}\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?)/")
_SOCKET, _HOME = "/var/run/docker.sock", "/var/lib/megaflow"


class Throttled(InstanceFailed):
    """Too many calls: the whole account has to wait with every request."""


class LaunchOption(NamedTuple):
    """A way of requesting a machine; None: from the launch template. place: a subnet, of one zone."""

    machine: str | None
    place: str | None


@dataclass
class _LaunchBatch:
    until: float  # monotonic seconds
    refused: set[LaunchOption] = field(default_factory=set)
    throttled: Throttled | None = None


class CloudProvider(ABC):
    """Makes a machine for each instance. The handle is the cloud's id of the machine. Safe to share among threads.

    A machine has two tags: its installation and its instance. Only they identify it: machines that the ledger does not
    know any more are found by them and ended. The memory of this process is only an aid.
    """

    name: ClassVar[str]

    def __init__(self, settings: Settings, *, types: Sequence[str], places: Sequence[str], spot: bool) -> None:
        """Sets the machines. types: as `Settings.ec2_types`; places: one per zone; both in order of preference."""
        self._settings = settings
        self._types, self._places, self._spot = types, places, spot
        self._database = Database(settings.database(), pooled=False)
        self._young: dict[UUID, tuple[str, float]] = {}  # handle, and until when it may be missing in lists
        self._unclear: dict[UUID, LaunchOption] = {}  # the option of each request whose answer was lost

    @abstractmethod
    def _run(self, request: InstanceRequest, option: LaunchOption) -> str:
        """Requests one machine. Returns its handle. Raises: NoCapacity, Throttled, LaunchUnclear, InstanceFailed."""

    @abstractmethod
    def _find(self, ids: Sequence[UUID]) -> dict[UUID, str]:
        """Returns the standing machines of these instances. Raises: InstanceFailed."""

    def launch(self, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        handles = self._find([request.instance_id for request in requests])  # made by an earlier request
        missing = [request for request in requests if request.instance_id not in handles]
        batch = _LaunchBatch(time.monotonic() + _LONGEST_S)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            outcomes = list(threads.map(lambda request: self._ask(request, batch), missing))
        answers = dict(zip((request.instance_id for request in missing), outcomes, strict=True))
        if unclear := [i for i, answer in answers.items() if isinstance(answer, LaunchUnclear)]:
            with suppress(InstanceFailed):
                answers |= self._find(unclear)
        handles |= {i: answer for i, answer in answers.items() if isinstance(answer, str)}
        errors = [answer for answer in answers.values() if isinstance(answer, InstanceFailed)]
        for error in errors:
            if isinstance(error, LaunchUnclear):
                raise error  # the next request finds the others by their tags
        if errors and not handles:
            raise next((error for error in errors if not isinstance(error, NoCapacity)), errors[0])
        for why in {str(error) for error in errors}:
            log.warning("instance.not_started", provider=self.name, error=why)
        return handles

    def _ask(self, request: InstanceRequest, batch: _LaunchBatch) -> str | InstanceFailed | None:
        """Returns the handle, or why there is none; None: not requested any more in this launch."""
        failure: InstanceFailed | None = None
        for option in self._options(request):
            if option in batch.refused:
                failure = failure or NoCapacity(f"{self.name} has no {_label(option)} now")
                continue
            if batch.throttled or time.monotonic() > batch.until:
                return batch.throttled
            try:
                handle = self._run(request, option)
            except NoCapacity as error:
                failure = error
                batch.refused.add(option)
                self._unclear.pop(request.instance_id, None)
                log.info("instance.no_capacity", provider=self.name, option=_label(option), error=str(error))
            except Throttled as error:
                batch.throttled = error
                return error
            except LaunchUnclear as error:
                self._unclear[request.instance_id] = option
                return error
            except InstanceFailed as error:
                return error
            else:
                self._unclear.pop(request.instance_id, None)
                self._note(handle, request.instance_id)
                return handle
        return failure

    def _options(self, request: InstanceRequest) -> Iterator[LaunchOption]:
        """Yields the option whose answer was lost, then each type in the first zone, in the next, …"""
        if first := self._unclear.get(request.instance_id):
            yield first
        for place in self._places or (None,):
            for machine in machines(self._types, request.resource_class) or (None,):
                if (option := LaunchOption(machine, place)) != first:
                    yield option

    def _script(self, request: InstanceRequest) -> str:
        """Returns user data of a new machine, with a token made for it. Raises: InstanceFailed, DatabaseUnavailable."""
        token = hosts.invite(self._database, instance_id=request.instance_id, expires_s=self._settings.boot_timeout_s)
        return boot_script(self._settings, request, token)

    def _client_token(self, request: InstanceRequest, option: LaunchOption) -> str:
        """Returns the same token for the same option: the cloud then returns the machine that it made before."""
        way = f"{request.instance_id} {option.machine} {option.place} {self._spot}"
        return hashlib.sha256(way.encode()).hexdigest()

    def _tags(self, request: InstanceRequest) -> dict[str, str]:
        return {INSTALLATION_TAG: self._settings.installation, INSTANCE_TAG: str(request.instance_id)}

    def _note(self, handle: str, instance_id: UUID) -> None:
        """Records a machine that was made just now."""
        self._young[instance_id] = (handle, time.monotonic() + _YOUNG_S)

    def _with_young(self, found: dict[UUID, str], ended: set[str]) -> dict[UUID, str]:
        """Adds machines too young to be listed to those that were. `ended`: handles that were listed as gone."""
        now = time.monotonic()
        young = {i: (handle, until) for i, (handle, until) in self._young.items() if until > now and i not in found}
        self._young = young  # a machine listed once stays listed while it exists
        return {i: handle for i, (handle, _) in self._young.items() if handle not in ended} | found


def _label(option: LaunchOption) -> str:
    return f"{option.machine or 'machine'} in {option.place or 'the place of the template'}"


def boot_script(settings: Settings, request: InstanceRequest, token: str) -> str:
    """Builds a shell script for the machine's user data. Its only secret is `token`, which joins one worker, once.

    The machine needs a Docker engine, and the program `aws` where the worker image is in ECR. It powers itself off when
    the worker has left, and after the request's lifetime, even if the control plane fails meanwhile.

    Raises: InstanceFailed: machines could not reach the web server at its URL.
    """
    image = settings.worker_image
    url = reachable(settings)
    join = ["megaflow", "worker", "join", url, "--token", token, "--instance", request.model_dump_json()]
    join += ["--plain-http"] if url.startswith("http:") else []  # the operator ensures that nothing listens there
    run = ["docker", "run", "--rm", "--init", "--network", "host", "--pids-limit", "4096"]
    run += ["--volume", f"{_SOCKET}:{_SOCKET}", "--volume", f"{_HOME}:{_HOME}"]
    lines = ["#!/bin/sh", f"# An instance of the MegaFlow installation {settings.installation}."]
    if request.lifetime_s is not None:
        lines.append(f"shutdown -P +{max(1, math.ceil(request.lifetime_s / 60))}")
    lines += ["trap 'shutdown -P now' EXIT", f"cd / && mkdir -p {_HOME}"]
    lines.append("for again in $(seq 60); do docker info >/dev/null 2>&1 && break; sleep 1; done")
    if ecr := _ECR.match(image):
        host, region = ecr.groups()
        login = f"docker login --username AWS --password-stdin {host}"
        lines.append(f"aws ecr get-login-password --region {region} | {login}")
    lines.append(f"for again in 1 2 3; do docker pull --quiet {shlex.quote(image)} && break; sleep 5; done")
    lines.append(shlex.join([*run, image, *join]))
    return "\n".join(lines) + "\n"


def reachable(settings: Settings) -> str:
    """Returns the web server's URL as other machines reach it. Raises: InstanceFailed: no setting gives it."""
    url = settings.web_base()
    if settings.web_url is None:
        raise InstanceFailed(
            f"expected a URL at which machines reach the web server, found {url}, which no setting gives; "
            "set MEGAFLOW_WEB_URL, such as https://megaflow.example.org"
        )
    return url
