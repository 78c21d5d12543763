"""Makes machines of EC2, one for each instance, from the operator's launch template.

A machine carries two tags: the installation, and the instance that it is. They alone say whose it is: what the ledger
does not know any more is found by them and ended. What this process remembers is only an aid.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple
from uuid import UUID

import structlog

from app.errors import InstanceFailed, LaunchUnclear, NoCapacity
from app.instances.base import OnExit, OnWarning
from app.instances.ec2.calls import CloudCalls, Throttled, error_code
from app.instances.ec2.notices import MachineNotice, read_notice
from app.instances.machines import boot_script, join_token
from app.instances.prices import hourly_usd
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
"""A new machine may be missing in EC2's lists for a while."""
_PAGE = 1000
_POLL_S = 5
_AGAIN_S = 1.0
_TAGS_AT_ONCE = 200
_STANDING = ("pending", "running")
_ENDED = ("shutting-down", "terminated")


class LaunchOption(NamedTuple):
    """One way of asking for a machine; None: as the launch template says."""

    machine: str | None
    subnet: str | None


@dataclass
class _LaunchBatch:
    """What the asks of one launch know of each other."""

    until: float  # monotonic seconds
    refused: set[LaunchOption] = field(default_factory=set)
    throttled: Throttled | None = None


class Ec2Instances:
    """The handle is EC2's id of the machine. Safe to share among threads."""

    name: ClassVar[str] = "ec2"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._database = Database(settings.database(), pooled=False)
        self._calls = CloudCalls()
        self._ids: dict[str, UUID] = {}  # of machines that were seen
        self._young: dict[UUID, tuple[str, float]] = {}  # handle, and until when its absence says nothing
        self._unclear: dict[UUID, LaunchOption] = {}  # how those were asked for whose answer was lost
        self._warned: set[str] = set()
        self._on_warning: OnWarning | None = None

    # --- Launch -----------------------------------------------------------------------------------------------------

    def launch(self, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        if self._settings.ec2_template is None:
            raise InstanceFailed("expected a launch template, found none; set MEGAFLOW_EC2_TEMPLATE")
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
                failure = failure or NoCapacity(f"EC2 has no {_label(option)} now")
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
        for subnet in self._settings.ec2_subnets or (None,):
            for machine in self.machines(request.resource_class) or (None,):
                if (option := LaunchOption(machine, subnet)) != first:
                    yield option

    def machines(self, resource_class: str) -> list[str]:
        """Types for a resource class, the preferred one first; empty: the launch template's."""
        pairs = [one.rpartition("=") for one in self._settings.ec2_types]
        own = [machine for name, _, machine in pairs if name == resource_class]
        return own or [machine for name, _, machine in pairs if not name]

    def hourly_usd(self, resource_class: str) -> float | None:
        """USD for an hour of the preferred type; None: no table has it.

        Raises: SettingsInvalid: the file of prices cannot be read.
        """
        machines = self.machines(resource_class)
        return hourly_usd(self._settings, self.name, machines[0], spot=self._settings.ec2_spot) if machines else None

    def _run(self, request: InstanceRequest, option: LaunchOption) -> str:
        """Raises: InstanceFailed and its kinds."""
        script = boot_script(self._settings, request, join_token(self._database, self._settings, request))
        with self._calls.asking("start a machine", launches=True):
            client = self._calls.client("ec2", tries=1)  # refusals are repeated by us, elsewhere
            reply = client.run_instances(**self._machine(request, option), UserData=script)
        return str(reply["Instances"][0]["InstanceId"])

    def _machine(self, request: InstanceRequest, option: LaunchOption) -> dict[str, Any]:
        template = self._settings.ec2_template or ""
        tags = [
            {"Key": INSTALLATION_TAG, "Value": self._settings.installation},
            {"Key": INSTANCE_TAG, "Value": str(request.instance_id)},
            {"Key": "Name", "Value": f"megaflow-{self._settings.installation}-{str(request.instance_id)[-12:]}"},
        ]
        # The same for the same way of asking, however often: EC2 then answers with the machine that it made before.
        way = f"{request.instance_id} {option} {self._settings.ec2_spot}"
        machine: dict[str, Any] = {
            "LaunchTemplate": {"LaunchTemplateId" if template.startswith("lt-") else "LaunchTemplateName": template},
            "MinCount": 1,
            "MaxCount": 1,
            "ClientToken": hashlib.sha256(way.encode()).hexdigest(),
            "InstanceInitiatedShutdownBehavior": "terminate",
            # One hop: a task's container has no way to the credentials of the machine.
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
            "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")],
        }
        if option.machine is not None:
            machine["InstanceType"] = option.machine
        if option.subnet is not None:
            machine["SubnetId"] = option.subnet
        if self._settings.ec2_spot:
            spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
            machine["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
        return machine

    # --- What there is ----------------------------------------------------------------------------------------------

    def terminate(self, instance_id: UUID, handle: str, *, grace_s: float) -> None:
        """The machine powers off as by its button: its worker is told to stop. EC2 decides how long it waits."""
        self._young.pop(instance_id, None)
        self._terminate([handle])

    def alive(self) -> dict[UUID, str]:
        """Also ends what is one too many: a second machine of an instance, one that was stopped."""
        found: dict[UUID, str] = {}
        ended, strays = set(), []
        described = self._described()
        for machine in described:
            instance_id = self._note_seen(machine)
            state = machine["State"]["Name"]
            if state in _ENDED:
                ended.add(machine["InstanceId"])
            elif state not in _STANDING or instance_id in found:
                strays.append(machine["InstanceId"])
            else:
                found[instance_id] = machine["InstanceId"]
        if strays:
            log.warning("instance.strays", provider=self.name, machines=strays)
            self._terminate(strays)
        now = time.monotonic()
        self._young = {i: (handle, until) for i, (handle, until) in self._young.items() if until > now}
        self._ids = {machine["InstanceId"]: self._note_seen(machine) for machine in described}
        return {i: handle for i, (handle, _) in self._young.items() if handle not in ended} | found

    def _find(self, ids: Sequence[UUID]) -> dict[UUID, str]:
        """The standing machines of these instances."""
        found: dict[UUID, str] = {}
        for begin in range(0, len(ids), _TAGS_AT_ONCE):
            some = [str(instance_id) for instance_id in ids[begin : begin + _TAGS_AT_ONCE]]
            for machine in self._described({f"tag:{INSTANCE_TAG}": some, "instance-state-name": list(_STANDING)}):
                found.setdefault(self._note_seen(machine), machine["InstanceId"])
        return found

    def _described(self, more: Mapping[str, list[str]] | None = None) -> list[Any]:
        """This installation's machines, the oldest first; those that ended a while ago among them."""
        wanted = {f"tag:{INSTALLATION_TAG}": [self._settings.installation], "tag-key": [INSTANCE_TAG], **(more or {})}
        filters = [{"Name": name, "Values": values} for name, values in wanted.items()]
        with self._calls.asking("list machines"):
            pages = (
                self._calls.client("ec2")
                .get_paginator("describe_instances")
                .paginate(Filters=filters, PaginationConfig={"PageSize": _PAGE})
            )
            found = [m for page in pages for group in page["Reservations"] for m in group["Instances"]]
        return sorted(found, key=lambda machine: (machine["LaunchTime"], machine["InstanceId"]))

    def _terminate(self, handles: Sequence[str]) -> None:
        with suppress(InstanceFailed):
            with self._calls.asking("end machines"):
                self._calls.client("ec2").terminate_instances(InstanceIds=list(handles))
            return
        for handle in handles:  # one that EC2 does not know keeps the others from being ended
            try:
                with self._calls.asking("end a machine"):
                    self._calls.client("ec2").terminate_instances(InstanceIds=[handle])
            except InstanceFailed as error:
                if not error_code(error.__cause__).startswith("InvalidInstanceID"):
                    raise

    def _note(self, handle: str, instance_id: UUID) -> None:
        self._ids[handle] = instance_id
        self._young[instance_id] = (handle, time.monotonic() + _YOUNG_S)

    def _note_seen(self, machine: Mapping[str, Any]) -> UUID:
        tags = {tag["Key"]: tag["Value"] for tag in machine["Tags"]}
        return self._ids.setdefault(machine["InstanceId"], UUID(tags[INSTANCE_TAG]))

    # --- Events -----------------------------------------------------------------------------------------------------

    def warn(self, on_warning: OnWarning) -> None:
        self._on_warning = on_warning

    def watch(self, on_exit: OnExit, stop: threading.Event) -> None:
        """Report what EventBridge put into the queue, until told to stop; comes back when the queue does.

        What ended before that is reported at the start. An end may be reported twice.
        """
        while not stop.is_set():
            try:
                self._catch_up(on_exit)
                if self._settings.ec2_events is None:
                    stop.wait()
                while not stop.is_set():
                    self._receive(on_exit)
            except InstanceFailed as error:
                log.warning("instance.events_silent", provider=self.name, error=str(error))
            stop.wait(_AGAIN_S)

    def _catch_up(self, on_exit: OnExit) -> None:
        standing = set()
        for machine in reversed(self._described()):
            instance_id = self._note_seen(machine)
            if machine["State"]["Name"] not in _ENDED:
                standing.add(instance_id)
            elif instance_id not in standing:
                why = machine.get("StateReason", {}).get("Message") or machine["State"]["Name"]
                on_exit(instance_id, None, f"its machine has ended: {why}")

    def _receive(self, on_exit: OnExit) -> None:
        """One look into the queue; what it told is removed from it afterwards."""
        url = self._settings.ec2_events
        with self._calls.asking("read the queue of events"):
            reply = self._calls.client("sqs").receive_message(
                QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=_POLL_S
            )
        messages = reply.get("Messages", [])
        notices = [notice for message in messages if (notice := read_notice(message["Body"])) is not None]
        whose = self._whose([notice.handle for notice in notices])
        for notice in notices:
            if notice.handle in whose:
                self._tell(notice, whose[notice.handle], on_exit)
        if messages:
            done = [{"Id": str(n), "ReceiptHandle": m["ReceiptHandle"]} for n, m in enumerate(messages)]
            with self._calls.asking("empty the queue of events"):
                self._calls.client("sqs").delete_message_batch(QueueUrl=url, Entries=done)

    def _whose(self, handles: Sequence[str]) -> dict[str, UUID]:
        """The instances of machines; others' machines are left out."""
        unknown = [handle for handle in handles if handle not in self._ids]
        if unknown:  # made by another control worker, or by somebody else
            for machine in self._described({"instance-id": unknown}):
                self._note_seen(machine)
        return {handle: self._ids[handle] for handle in handles if handle in self._ids}

    def _tell(self, notice: MachineNotice, instance_id: UUID, on_exit: OnExit) -> None:
        if notice.warning:
            self._warned.add(notice.handle)
            if self._on_warning is not None:
                self._on_warning(instance_id, "EC2 takes its spot machine back within two minutes")
        elif notice.ended:
            self._young.pop(instance_id, None)
            taken = notice.handle in self._warned
            on_exit(instance_id, None, "EC2 took its spot machine back" if taken else f"its machine is {notice.state}")
            self._warned.discard(notice.handle)


def _label(option: LaunchOption) -> str:
    return f"{option.machine or 'machine'} in {option.subnet or 'the subnet of the template'}"
