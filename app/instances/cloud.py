"""What providers of clouds share: types and places asked for in turn and unclear answers."""

from __future__ import annotations

import hashlib
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
from app.instances.machines import boot_script, join_token
from app.instances.prices import machines
from app.ledger.database import Database
from app.models.instance import InstanceRequest
from app.settings import Settings

log = structlog.get_logger()

INSTALLATION_TAG = "megaflow"
INSTANCE_TAG = "megaflow:instance"

_AT_ONCE = 32
_LONGEST_S = 10.0
"""A launch of many stops asking after this long: what is left is asked for again at the next look."""
_YOUNG_S = 60.0
"""A new machine may be missing in a cloud's lists for a while."""


class Throttled(InstanceFailed):
    """Too many calls: the whole account is to wait, whatever it asks for."""


class LaunchOption(NamedTuple):
    """One way of asking for a machine; None: as the launch template says. place: a subnet, of one zone."""

    machine: str | None
    place: str | None


@dataclass
class _LaunchBatch:
    until: float  # monotonic seconds
    refused: set[LaunchOption] = field(default_factory=set)
    throttled: Throttled | None = None


class CloudProvider(ABC):
    """Makes a machine for each instance. The handle is the cloud's id of it. Safe to share among threads.

    A machine carries two tags: the installation, and the instance that it is. They alone say whose it is: what the
    ledger does not know any more is found by them and ended. What this process remembers is only an aid.
    """

    name: ClassVar[str]

    def __init__(self, settings: Settings, *, types: Sequence[str], places: Sequence[str], spot: bool) -> None:
        """types: as `Settings.ec2_types`; places: one for each zone; both in the order of preference."""
        self._settings = settings
        self._types, self._places, self._spot = types, places, spot
        self._database = Database(settings.database(), pooled=False)
        self._young: dict[UUID, tuple[str, float]] = {}  # handle, and until when its absence says nothing
        self._unclear: dict[UUID, LaunchOption] = {}  # how those were asked for whose answer was lost

    @abstractmethod
    def _run(self, request: InstanceRequest, option: LaunchOption) -> str:
        """Ask for one machine; its handle. Raises: NoCapacity, Throttled, LaunchUnclear, InstanceFailed."""

    @abstractmethod
    def _find(self, ids: Sequence[UUID]) -> dict[UUID, str]:
        """The standing machines of these instances. Raises: InstanceFailed."""

    def launch(self, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        handles = self._find([request.instance_id for request in requests])  # made when they were asked for before
        missing = [request for request in requests if request.instance_id not in handles]
        batch = _LaunchBatch(time.monotonic() + _LONGEST_S)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            asked = list(threads.map(lambda request: self._ask(request, batch), missing))
        answers = dict(zip((request.instance_id for request in missing), asked, strict=True))
        if unclear := [i for i, answer in answers.items() if isinstance(answer, LaunchUnclear)]:
            with suppress(InstanceFailed):
                answers |= self._find(unclear)
        handles |= {i: answer for i, answer in answers.items() if isinstance(answer, str)}
        errors = [answer for answer in answers.values() if isinstance(answer, InstanceFailed)]
        for error in errors:
            if isinstance(error, LaunchUnclear):
                raise error  # the others are found by their tags when they are asked for again
        if errors and not handles:
            raise next((error for error in errors if not isinstance(error, NoCapacity)), errors[0])
        for why in {str(error) for error in errors}:
            log.warning("instance.not_started", provider=self.name, error=why)
        return handles

    def _ask(self, request: InstanceRequest, batch: _LaunchBatch) -> str | InstanceFailed | None:
        """The handle, or why there is none; None: not asked for any more in this launch."""
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
        """First the one whose answer was lost, then each type in the first zone, in the next, …"""
        if first := self._unclear.get(request.instance_id):
            yield first
        for place in self._places or (None,):
            for machine in machines(self._types, request.resource_class) or (None,):
                if (option := LaunchOption(machine, place)) != first:
                    yield option

    def _script(self, request: InstanceRequest) -> str:
        """User data of a new machine, with a token made for it. Raises: InstanceFailed, DatabaseUnavailable."""
        return boot_script(self._settings, request, join_token(self._database, self._settings, request))

    def _client_token(self, request: InstanceRequest, option: LaunchOption) -> str:
        """The same for the same way of asking, however often: the cloud then names the machine that it made before."""
        way = f"{request.instance_id} {option.machine} {option.place} {self._spot}"
        return hashlib.sha256(way.encode()).hexdigest()

    def _tags(self, request: InstanceRequest) -> dict[str, str]:
        return {INSTALLATION_TAG: self._settings.installation, INSTANCE_TAG: str(request.instance_id)}

    def _note(self, handle: str, instance_id: UUID) -> None:
        """A machine was made just now."""
        self._young[instance_id] = (handle, time.monotonic() + _YOUNG_S)

    def _with_young(self, found: dict[UUID, str], ended: set[str]) -> dict[UUID, str]:
        """What was listed, and what is too young to be; `ended`: handles that were listed as gone."""
        now = time.monotonic()
        young = {i: (handle, until) for i, (handle, until) in self._young.items() if until > now and i not in found}
        self._young = young  # one that was listed once is listed as long as it is there
        return {i: handle for i, (handle, _) in self._young.items() if handle not in ended} | found


def _label(option: LaunchOption) -> str:
    return f"{option.machine or 'machine'} in {option.place or 'the place of the template'}"
