"""Makes machines of Alibaba Cloud's ECS, one for each instance. Experimental: never run on the real cloud."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

import structlog

from app.errors import DependencyMissing, InstanceFailed, LaunchUnclear, NoCapacity
from app.instances.base import OnExit
from app.instances.cloud import INSTALLATION_TAG, INSTANCE_TAG, CloudProvider, LaunchOption, Throttled
from app.models.instance import InstanceRequest
from app.settings import Settings

try:
    from alibabacloud_credentials.client import Client as Credentials
    from alibabacloud_ecs20140526 import models
    from alibabacloud_ecs20140526.client import Client
    from alibabacloud_tea_openapi.models import Config
    from darabonba.runtime import RuntimeOptions
    from Tea.exceptions import TeaException
except ImportError as error:
    raise DependencyMissing(
        "expected Alibaba Cloud's SDK for the provider `alibaba`, found none; try: pip install 'megaflow[alibaba]'"
    ) from error

log = structlog.get_logger()

_NO_CAPACITY = (
    *("OperationDenied.NoStock", "QuotaExceed", "Zone.NotOnSale", "InvalidResourceType.NotSupported"),
    *("InvalidInstanceType.ZoneNotSupported", "InvalidVSwitchId.IpNotEnough"),
)
_LOGIN = ("InvalidSecurityToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "IncompleteSignature")
_MADE_BEFORE = "IdempotentParameterMismatch"
_NEVER_SENT = ("Failed to establish a new connection", "ConnectTimeout", "unable to load credentials")
_SERVER_ERROR = 500
_STANDING = ("Pending", "Starting", "Running")
_PAGE = 100
_POLL_S = 5.0
_SOONEST = timedelta(minutes=31)
"""Minimum lifetime: ECS releases a machine automatically no sooner than half an hour after the request."""


class AlibabaInstances(CloudProvider):
    """The handle is ECS's id of the machine. There are no events: lists are compared every five seconds."""

    name: ClassVar[str] = "alibaba"

    def __init__(self, settings: Settings) -> None:
        places = settings.alibaba_switches
        super().__init__(settings, types=settings.alibaba_types, places=places, spot=settings.alibaba_spot)
        self._region = settings.alibaba_region
        self._once = RuntimeOptions(autoretry=False, connect_timeout=5_000, read_timeout=30_000)
        self._kept: Any = None

    def launch(self, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        if self._settings.alibaba_template is None:
            raise InstanceFailed("expected a launch template, found none; set MEGAFLOW_ALIBABA_TEMPLATE")
        return super().launch(requests)

    def _run(self, request: InstanceRequest, option: LaunchOption) -> str:
        machine = self._machine(request, option)
        reply = self._call("run_instances", machine, launches=True)
        return str(reply.instance_id_sets.instance_id_set[0])

    def _machine(self, request: InstanceRequest, option: LaunchOption) -> Any:
        template = self._settings.alibaba_template or ""
        named = "launch_template_id" if template.startswith("lt-") else "launch_template_name"
        released = None
        if request.lifetime_s is not None:
            end = datetime.now(UTC) + max(_SOONEST, timedelta(seconds=request.lifetime_s))
            released = end.strftime("%Y-%m-%dT%H:%M:%SZ")
        tags = self._tags(request)
        return models.RunInstancesRequest(
            region_id=self._region,
            instance_type=option.machine,
            v_switch_id=option.place,
            amount=1,
            client_token=self._client_token(request, option),
            user_data=base64.b64encode(self._script(request).encode()).decode(),
            auto_release_time=released,
            http_tokens="required",
            spot_strategy="SpotAsPriceGo" if self._spot else "NoSpot",
            spot_interruption_behavior="Terminate" if self._spot else None,
            tag=[models.RunInstancesRequestTag(key=key, value=value) for key, value in tags.items()],
            **{named: template},
        )

    def _find(self, ids: Sequence[UUID]) -> dict[UUID, str]:
        handles, requested = dict[UUID, str](), set(ids)
        for instance_id, handle, status in self._listed():
            if instance_id in requested and status in _STANDING:
                handles.setdefault(instance_id, handle)
        return handles

    def terminate(self, instance_id: UUID, handle: str, *, grace_s: float) -> None:
        """Releases the machine at once: ECS waits for no worker."""
        self._young.pop(instance_id, None)
        self._release(handle)

    def alive(self) -> dict[UUID, str]:
        """Returns living instances. Ends surplus machines: an instance's second one, a powered-off one."""
        return self._look()[0]

    def _look(self) -> tuple[dict[UUID, str], set[UUID]]:
        handles: dict[UUID, str] = {}
        still, strays = set[UUID](), set[str]()
        for instance_id, handle, status in self._listed():
            if status in _STANDING and instance_id not in handles:
                handles[instance_id] = handle
                continue
            self._release(handle)
            strays.add(handle)
            if status not in _STANDING:
                still.add(instance_id)
        return self._with_young(handles, strays), still - handles.keys()

    def watch(self, on_exit: OnExit, stop: threading.Event) -> None:
        """Reports machines that are stopped, or were listed and are no longer, until `stop` is set."""
        before: dict[UUID, str] = {}
        while not stop.is_set():
            try:
                now, still = self._look()
            except InstanceFailed as error:
                log.warning("instance.list_failed", provider=self.name, error=str(error))
            else:
                for instance_id in still | (before.keys() - now.keys()):
                    on_exit(instance_id, None, "its machine has ended")
                before = now
            stop.wait(_POLL_S)

    def _listed(self) -> Iterator[tuple[UUID, str, str]]:
        tag = models.DescribeInstancesRequestTag(key=INSTALLATION_TAG, value=self._settings.installation)
        page: str | None = None
        machines: list[Any] = []
        while True:
            request = models.DescribeInstancesRequest(
                region_id=self._region, tag=[tag], max_results=_PAGE, next_token=page
            )
            reply = self._call("describe_instances", request)
            machines += reply.instances.instance
            page = reply.next_token
            if not page:
                break
        for one in sorted(machines, key=lambda one: (one.creation_time, one.instance_id)):
            tags = {each.tag_key: each.tag_value for each in one.tags.tag}
            if INSTANCE_TAG in tags:
                yield UUID(tags[INSTANCE_TAG]), one.instance_id, one.status

    def _release(self, handle: str) -> None:
        request = models.DeleteInstancesRequest(region_id=self._region, instance_id=[handle], force=True)
        try:
            self._call("delete_instances", request)
        except InstanceFailed as error:
            if not str(getattr(error.__cause__, "code", "")).startswith("InvalidInstanceId"):
                raise

    def _call(self, verb: str, asked: Any, *, launches: bool = False) -> Any:
        """Returns the answer's body. Raises: as `_run`; LaunchUnclear only when the call `launches`."""
        try:
            call: Callable[..., Any] = getattr(self._client(), f"{verb}_with_options")
            return call(asked, self._once).body
        except TeaException as error:
            raise self._meaning(verb, error, launches=launches) from error

    def _meaning(self, verb: str, error: Any, *, launches: bool) -> InstanceFailed:
        code, status = str(error.code or ""), int(getattr(error, "statusCode", None) or 0)
        message = f"could not {verb.replace('_', ' ')}: {error}"
        if code.startswith(_NO_CAPACITY):
            return NoCapacity(message)
        if code.startswith("Throttling"):
            return Throttled(message)
        if code.startswith(_LOGIN) or not status:
            self._kept = None  # credentials are read again at the next call
        never_sent = any(words in str(error) for words in _NEVER_SENT)
        if launches and (code == _MADE_BEFORE or status >= _SERVER_ERROR or (not status and not never_sent)):
            return LaunchUnclear(message)
        return InstanceFailed(message)

    def _client(self) -> Any:
        if self._kept is None:
            endpoint = self._settings.alibaba_endpoint
            way = "HTTP" if endpoint and endpoint.startswith("127.0.0.1:") else "HTTPS"
            self._kept = Client(
                Config(credential=Credentials(), region_id=self._region, endpoint=endpoint, protocol=way)
            )
        return self._kept
