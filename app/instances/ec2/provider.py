"""Makes machines of EC2, one for each instance, from the operator's launch template."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal
from uuid import UUID

import structlog
from pydantic import BaseModel, Field, ValidationError

from app.errors import InstanceFailed
from app.instances.base import OnExit, OnWarning
from app.instances.cloud import INSTALLATION_TAG, INSTANCE_TAG, CloudProvider, LaunchOption
from app.instances.ec2.calls import CloudCalls, error_code
from app.models.instance import InstanceRequest
from app.settings import Settings

log = structlog.get_logger()

_PAGE = 1000
_POLL_S = 5
_AGAIN_S = 1.0
_TAGS_AT_ONCE = 200
_STANDING = ("pending", "running")
_ENDED = ("shutting-down", "terminated")
STATES = "EC2 Instance State-change Notification"
SPOT = "EC2 Spot Instance Interruption Warning"

_GONE = frozenset({"shutting-down", "terminated", "stopping", "stopped"})


class _EventDetail(BaseModel):
    handle: str = Field(alias="instance-id")
    state: str = ""


class _EventEnvelope(BaseModel):
    source: Literal["aws.ec2"]
    kind: Literal["EC2 Instance State-change Notification", "EC2 Spot Instance Interruption Warning"] = Field(
        alias="detail-type"
    )
    detail: _EventDetail


class MachineNotice(BaseModel):
    """A notice about a machine, from the queue of events."""

    handle: str
    state: str
    warning: bool

    @property
    def ended(self) -> bool:
        return self.state in _GONE


def read_notice(body: str) -> MachineNotice | None:
    """Parses a notice. None: it is about something else, and of no use here."""
    try:
        envelope = _EventEnvelope.model_validate_json(body)
    except ValidationError as error:
        log.debug("instance.event_unknown", error=str(error))
        return None
    return MachineNotice(handle=envelope.detail.handle, state=envelope.detail.state, warning=envelope.kind == SPOT)


class Ec2Instances(CloudProvider):
    """The handle is EC2's id of the machine."""

    name: ClassVar[str] = "ec2"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, types=settings.ec2_types, places=settings.ec2_subnets, spot=settings.ec2_spot)
        self._calls = CloudCalls()
        self._ids: dict[str, UUID] = {}  # instances of known machines, by handle
        self._warned: set[str] = set()
        self._on_warning: OnWarning | None = None

    def launch(self, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        if self._settings.ec2_template is None:
            raise InstanceFailed("expected a launch template, found none; set MEGAFLOW_EC2_TEMPLATE")
        return super().launch(requests)

    def _run(self, request: InstanceRequest, option: LaunchOption) -> str:
        script = self._script(request)
        with self._calls.asking("start a machine", launches=True):
            client = self._calls.client("ec2", tries=1)  # refused requests are retried elsewhere
            reply = client.run_instances(**self._machine(request, option), UserData=script)
        return str(reply["Instances"][0]["InstanceId"])

    def _machine(self, request: InstanceRequest, option: LaunchOption) -> dict[str, Any]:
        template = self._settings.ec2_template or ""
        name = f"megaflow-{self._settings.installation}-{str(request.instance_id)[-12:]}"
        tags = [{"Key": key, "Value": value} for key, value in {**self._tags(request), "Name": name}.items()]
        machine: dict[str, Any] = {
            "LaunchTemplate": {"LaunchTemplateId" if template.startswith("lt-") else "LaunchTemplateName": template},
            "MinCount": 1,
            "MaxCount": 1,
            "ClientToken": self._client_token(request, option),
            "InstanceInitiatedShutdownBehavior": "terminate",
            # One hop: a task's container cannot reach the credentials of the machine.
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
            "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")],
        }
        if option.machine is not None:
            machine["InstanceType"] = option.machine
        if option.place is not None:
            machine["SubnetId"] = option.place
        if self._spot:
            spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
            machine["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
        return machine

    def terminate(self, instance_id: UUID, handle: str, *, grace_s: float) -> None:
        """Powers the machine off like its button, which stops the worker. EC2 decides how long it waits."""
        self._young.pop(instance_id, None)
        self._terminate([handle])

    def alive(self) -> dict[UUID, str]:
        """Returns living instances. Ends surplus machines: an instance's second one, one that was stopped."""
        handles: dict[UUID, str] = {}
        ended, strays = set[str](), []
        described = self._described()
        for machine in described:
            instance_id = self._note_seen(machine)
            state = machine["State"]["Name"]
            if state in _ENDED:
                ended.add(machine["InstanceId"])
            elif state not in _STANDING or instance_id in handles:
                strays.append(machine["InstanceId"])
            else:
                handles[instance_id] = machine["InstanceId"]
        if strays:
            log.warning("instance.strays", provider=self.name, machines=strays)
            self._terminate(strays)
        self._ids = {machine["InstanceId"]: self._note_seen(machine) for machine in described}
        return self._with_young(handles, ended)

    def _find(self, ids: Sequence[UUID]) -> dict[UUID, str]:
        handles: dict[UUID, str] = {}
        for begin in range(0, len(ids), _TAGS_AT_ONCE):
            some = [str(instance_id) for instance_id in ids[begin : begin + _TAGS_AT_ONCE]]
            for machine in self._described({f"tag:{INSTANCE_TAG}": some, "instance-state-name": list(_STANDING)}):
                handles.setdefault(self._note_seen(machine), machine["InstanceId"])
        return handles

    def _described(self, more: Mapping[str, list[str]] | None = None) -> list[Any]:
        """Returns this installation's machines, the oldest first, with those that ended a while ago."""
        conditions = {
            f"tag:{INSTALLATION_TAG}": [self._settings.installation],
            "tag-key": [INSTANCE_TAG],
            **(more or {}),
        }
        filters = [{"Name": name, "Values": values} for name, values in conditions.items()]
        with self._calls.asking("list machines"):
            pages = (
                self._calls.client("ec2")
                .get_paginator("describe_instances")
                .paginate(Filters=filters, PaginationConfig={"PageSize": _PAGE})
            )
            machines = [m for page in pages for group in page["Reservations"] for m in group["Instances"]]
        return sorted(machines, key=lambda machine: (machine["LaunchTime"], machine["InstanceId"]))

    def _terminate(self, handles: Sequence[str]) -> None:
        with suppress(InstanceFailed):
            with self._calls.asking("end machines"):
                self._calls.client("ec2").terminate_instances(InstanceIds=list(handles))
            return
        for handle in handles:  # an unknown handle prevents that the others are ended
            try:
                with self._calls.asking("end a machine"):
                    self._calls.client("ec2").terminate_instances(InstanceIds=[handle])
            except InstanceFailed as error:
                if not error_code(error.__cause__).startswith("InvalidInstanceID"):
                    raise

    def _note(self, handle: str, instance_id: UUID) -> None:
        super()._note(handle, instance_id)
        self._ids[handle] = instance_id

    def _note_seen(self, machine: Mapping[str, Any]) -> UUID:
        tags = {tag["Key"]: tag["Value"] for tag in machine["Tags"]}
        return self._ids.setdefault(machine["InstanceId"], UUID(tags[INSTANCE_TAG]))

    def warn(self, on_warning: OnWarning) -> None:
        self._on_warning = on_warning

    def watch(self, on_exit: OnExit, stop: threading.Event) -> None:
        """Reports EventBridge's messages in the queue, at first earlier ends; an end may be reported twice."""
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
        """Reads the queue once and reports the notices. Then removes the messages from it."""
        url = self._settings.ec2_events
        with self._calls.asking("read the queue of events"):
            reply = self._calls.client("sqs").receive_message(
                QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=_POLL_S
            )
        messages = reply.get("Messages", [])
        notices = [notice for message in messages if (notice := read_notice(message["Body"])) is not None]
        whose = self._whose([notice.handle for notice in notices])
        standing = self._find([whose[one.handle] for one in notices if one.ended and one.handle in whose])
        for notice in notices:
            if notice.handle not in whose:
                continue
            # If an instance has two machines, the end of one is not the end of the instance.
            if not notice.ended or standing.get(whose[notice.handle], notice.handle) == notice.handle:
                self._tell(notice, whose[notice.handle], on_exit)
        if messages:
            entries = [{"Id": str(n), "ReceiptHandle": m["ReceiptHandle"]} for n, m in enumerate(messages)]
            with self._calls.asking("empty the queue of events"):
                self._calls.client("sqs").delete_message_batch(QueueUrl=url, Entries=entries)

    def _whose(self, handles: Sequence[str]) -> dict[str, UUID]:
        unknown = [handle for handle in handles if handle not in self._ids]
        if unknown:  # made by another control worker, or by hand
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
            interrupted = notice.handle in self._warned
            on_exit(
                instance_id, None, "EC2 took its spot machine back" if interrupted else f"its machine is {notice.state}"
            )
            self._warned.discard(notice.handle)
