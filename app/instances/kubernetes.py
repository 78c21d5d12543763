"""The `kubernetes` provider: an instance is a Job with one pod of the worker image; its settings are in a Secret.

A Job is created suspended, then its Secret, then the Job is resumed: a pod never waits for its Secret, and the Secret
is removed with the Job. Each step can be repeated: an instance whose launch got no answer is completed, not doubled.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from typing import Any, ClassVar, cast
from uuid import UUID

import httpx2
import structlog
from lightkube import ApiError, AsyncClient, Client
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Pod, Secret
from lightkube.types import CascadeType, PatchType

from app.errors import InstanceFailed, LaunchUnclear, NoCapacity, SettingsInvalid
from app.instances.base import OnExit
from app.instances.environment import exports, passed_on
from app.instances.kubernetes_job import INSTANCE, job, job_name, labels_of, user_parts, waits_in_queue
from app.kubernetes import configuration
from app.models.instance import InstanceRequest
from app.settings import PREFIX, Settings

log = structlog.get_logger()

_AT_ONCE = 16
_TIMEOUT_S = 30.0
_AGAIN_S = 1.0
_WATCH_S = 60
"""Duration of a watch, which then continues where it was."""
_SILENT_S = 90.0
"""Time without any message, even of its end, after which a watch has lost its connection."""
_ENDED = ("Succeeded", "Failed")
_GONE, _THERE = 404, 409
_NOT_OURS = f"{PREFIX}KUBECONFIG"  # a path on this host; an instance uses its pod's service account

_PodAsSent = create_namespaced_resource("", "v1", "Pod", "pods")
"""Pod without a model: a bookmark is a pod without containers, which the model refuses."""


class KubernetesInstances:
    """The handle is the Job's name. Safe to share among threads."""

    name: ClassVar[str] = "kubernetes"

    def __init__(self, settings: Settings) -> None:
        """Raises: SettingsInvalid when the user's own parts of a Job cannot be read."""
        self._settings = settings
        self._parts = user_parts(settings.kubernetes_job)
        self._since: dict[UUID, float] = {}  # the first look that found it on a node; monotonic seconds

    def launch(self, requests: Sequence[InstanceRequest]) -> dict[UUID, str]:
        with self._connected() as client, ThreadPoolExecutor(_AT_ONCE) as threads:
            outcomes = list(threads.map(lambda request: self._start(client, request), requests))
        refusals = [one for one in outcomes if isinstance(one, InstanceFailed)]
        for kind in (LaunchUnclear, NoCapacity, InstanceFailed):
            refusal = next((one for one in refusals if isinstance(one, kind)), None)
            if refusal is not None and (kind is LaunchUnclear or len(refusals) == len(outcomes)):
                raise refusal
        if refusals:
            log.warning("instance.not_started", count=len(refusals), error=str(refusals[0]))
        started = zip(requests, outcomes, strict=True)
        return {request.instance_id: one for request, one in started if isinstance(one, str)}

    def terminate(self, instance_id: UUID, handle: str, *, grace_s: float) -> None:
        """Deletes the Job, which is listed until its pod is gone, and the pods: a Job's grace is not theirs."""
        with self._connected() as client:
            with _unless(_GONE):
                client.delete(Job, handle, cascade=CascadeType.FOREGROUND)
            for pod in list(client.list(Pod, labels={**labels_of(self._settings), INSTANCE: str(instance_id)})):
                with _unless(_GONE):
                    client.delete(Pod, str(pod.metadata and pod.metadata.name), grace_period=max(1, int(grace_s)))

    def alive(self) -> dict[UUID, str]:
        with self._connected() as client:
            jobs = list(client.list(Job, labels=labels_of(self._settings), chunk_size=500))
        return {_instance(one.to_dict()): _name(one.to_dict()) for one in jobs if not _outcome(one.to_dict())}

    def started(self) -> dict[UUID, float | None]:
        """Returns None for instances that Kueue holds or no node has room for. Seconds are counted here, from the first
        look that found an instance on a node: the cluster's clocks may differ.
        """
        with self._connected() as client:
            jobs = [one.to_dict() for one in client.list(Job, labels=labels_of(self._settings), chunk_size=500)]
            pods = [one.to_dict() for one in client.list(Pod, labels=labels_of(self._settings), chunk_size=500)]
        placed = {_instance(pod) for pod in pods if pod["spec"].get("nodeName")}
        standing = {_instance(one): one for one in jobs if not _outcome(one)}
        waiting = {
            instance_id
            for instance_id, one in standing.items()
            if (waits_in_queue(one) if one["spec"].get("suspend") else instance_id not in placed)
        }
        now = time.monotonic()
        self._since = {one: self._since.get(one, now) for one in standing.keys() - waiting}
        return {one: None if one in waiting else now - self._since[one] for one in standing}

    def watch(self, on_exit: OnExit, stop: threading.Event) -> None:
        """Reports ends as the API server sends them, at first the earlier ones; an end may be reported twice."""
        while not stop.is_set():
            try:
                asyncio.run(self._until(stop, on_exit))
            except (SettingsInvalid, httpx2.HTTPError, OSError, TimeoutError) as error:
                log.debug("instance.cluster_silent", error=str(error))
            stop.wait(_AGAIN_S)

    def _start(self, client: Client, request: InstanceRequest) -> str | InstanceFailed | None:
        """Returns the Job's name, or why there is none; None: it exists and is being deleted."""
        manifest = job(request, self._settings, self._parts)
        try:
            try:
                created = client.create(cast(Job, Job.from_dict(manifest)))
            except ApiError as error:
                if error.status.code != 409:
                    raise
                created = client.get(Job, job_name(request.instance_id))  # requested twice: an answer was lost
            return self._go_on(client, created, waits=waits_in_queue(manifest))
        except httpx2.HTTPError as error:
            return _refusal(error)

    def _go_on(self, client: Client, made: Job, *, waits: bool) -> str | None:
        metadata = made.metadata
        assert metadata is not None and metadata.name is not None and metadata.uid is not None  # noqa: PT018
        if metadata.deletionTimestamp is not None:
            return None
        if made.spec is not None and made.spec.suspend:
            owner = OwnerReference(apiVersion="batch/v1", kind="Job", name=metadata.name, uid=metadata.uid)
            labels = labels_of(self._settings)
            about = ObjectMeta(name=metadata.name, labels=labels, ownerReferences=[owner])
            with _unless(_THERE):
                client.create(Secret(metadata=about, stringData={"environment": self._environment()}))
            if not waits:
                client.patch(Job, metadata.name, {"spec": {"suspend": False}}, patch_type=PatchType.MERGE)
        return metadata.name

    def _environment(self) -> str:
        """Returns settings, credentials of stores and proxies; no model's key."""
        variables = passed_on() | self._settings.variables()
        return exports({name: value for name, value in variables.items() if name != _NOT_OURS}).decode()

    @contextmanager
    def _connected(self) -> Iterator[Client]:
        try:
            config, namespace = configuration(self._settings), self._settings.kubernetes_namespace
            with Client(config, namespace=namespace, timeout=httpx2.Timeout(_TIMEOUT_S)) as client:
                yield client
        except httpx2.HTTPStatusError as error:
            raise InstanceFailed(f"the API server refused: {error}") from error
        except (SettingsInvalid, httpx2.HTTPError, OSError) as error:
            raise InstanceFailed(f"expected a Kubernetes API server, found: {error}") from error

    async def _until(self, stop: threading.Event, on_exit: OnExit) -> None:
        following = asyncio.ensure_future(self._follow(on_exit))
        while not stop.is_set() and not following.done():
            await asyncio.wait({following}, timeout=0.2)
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following

    async def _follow(self, on_exit: OnExit) -> None:
        config, namespace = configuration(self._settings), self._settings.kubernetes_namespace
        client = AsyncClient(config, namespace=namespace, timeout=httpx2.Timeout(_TIMEOUT_S))
        try:
            version = await self._catch_up(client, on_exit)
            while True:
                try:
                    async with aclosing(self._changes(client, version)) as changes:
                        async for kind, pod in changes:
                            version = pod["metadata"]["resourceVersion"]
                            if kind != "BOOKMARK":
                                await self._seen(client, kind, pod, on_exit)
                except httpx2.HTTPStatusError as error:
                    if _code(error) != 410:
                        raise
                    version = await self._catch_up(client, on_exit)  # the server has dropped the changes since then
                except (httpx2.TransportError, TimeoutError) as error:
                    log.debug("instance.watch_cut", error=str(error))
                    await asyncio.sleep(_AGAIN_S)
        finally:
            await client.close()

    async def _changes(self, client: AsyncClient, version: str) -> AsyncGenerator[tuple[str, Mapping[str, Any]], None]:
        """Yields pods as they change. The client's own `watch` has no bookmarks, and waits for a lost connection."""
        labels = ",".join(f"{key}={value}" for key, value in labels_of(self._settings).items())
        params = {"allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_S), "resourceVersion": version}
        request = client._client.prepare_request(
            "list", res=_PodAsSent, watch=True, params={**params, "labelSelector": labels}
        )
        async with aclosing(client._client.watch(request)) as stream:
            while True:
                yield await asyncio.wait_for(anext(stream), _SILENT_S)

    async def _catch_up(self, client: AsyncClient, on_exit: OnExit) -> str:
        """Reports what has ended. Returns the version from which to watch for changes."""
        labels = labels_of(self._settings)
        pods = client.list(_PodAsSent, labels=labels, chunk_size=500)
        known = set()
        async for pod in pods:
            known.add(_instance(pod))
            await self._seen(client, "ADDED", pod, on_exit)
        async for one in client.list(Job, labels=labels, chunk_size=500):
            manifest = one.to_dict()
            if (outcome := _outcome(manifest)) and _instance(manifest) not in known:
                on_exit(_instance(manifest), None, f"its Job ended: {outcome}")
        return pods.resourceVersion

    async def _seen(self, client: AsyncClient, kind: str, pod: Mapping[str, Any], on_exit: OnExit) -> None:
        status = pod.get("status") or {}
        if kind != "DELETED" and status.get("phase") not in _ENDED:
            return
        code, why = pod_end(pod)
        if code != 0 and (kind == "DELETED" or "deletionTimestamp" in pod["metadata"]):  # by its Job at the deadline
            with suppress(ApiError):  # the Job may be gone, too
                manifest = (await client.get(Job, job_name(_instance(pod)))).to_dict()
                why = f"{_outcome(manifest, 'FailureTarget') or 'its pod was deleted'}: {why}"
        on_exit(_instance(pod), code, why)
        if code in (0, 75):  # others stay with their logs until the Job's time to live is over
            with suppress(ApiError):
                await client.delete(Job, job_name(_instance(pod)), cascade=CascadeType.BACKGROUND)


def pod_end(pod: Mapping[str, Any]) -> tuple[int | None, str]:
    """Returns the exit code of the pod's worker, if known, and why the pod ended."""
    status = pod.get("status") or {}
    states = [one.get("state") or {} for one in status.get("containerStatuses") or ()]
    ended: Mapping[str, Any] = next((one["terminated"] for one in states if one.get("terminated")), {})
    listed = status.get("conditions") or ()
    parts = [one.get("reason") for one in listed if one["type"] == "DisruptionTarget" and one["status"] == "True"]
    parts += [status.get("reason"), status.get("message")]
    parts += [ended.get("reason") if ended.get("reason") not in ("Completed", "Error") else None, ended.get("message")]
    code: int | None = ended.get("exitCode")
    details = ": ".join(dict.fromkeys(part for part in parts if part))
    what = "its pod was deleted" if code is None else f"its pod ended with exit code {code}"
    return code, f"{what} ({details})" if details else what


def _outcome(found: Mapping[str, Any], *more: str) -> str:
    listed = (found.get("status") or {}).get("conditions") or ()
    ends = [one for one in listed if one["type"] in ("Complete", "Failed", *more) and one["status"] == "True"]
    return (ends[0].get("reason") or ends[0]["type"]) if ends else ""


def _instance(found: Mapping[str, Any]) -> UUID:
    return UUID(found["metadata"]["labels"][INSTANCE])


def _name(found: Mapping[str, Any]) -> str:
    return str(found["metadata"]["name"])


def _code(error: httpx2.HTTPStatusError) -> int | None:
    return error.status.code if isinstance(error, ApiError) else error.response.status_code


def _refusal(error: httpx2.HTTPError) -> InstanceFailed:
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout):
        return InstanceFailed(f"expected a Kubernetes API server, found: {error}")
    code = _code(error) if isinstance(error, httpx2.HTTPStatusError) else None
    if code == 403 and "quota" in str(error):
        return NoCapacity(str(error))
    if code is not None and code < 500:
        return InstanceFailed(f"the API server refused: {error}")
    return LaunchUnclear(f"the API server gave no answer: {error or type(error).__name__}")


@contextmanager
def _unless(code: int) -> Iterator[None]:
    """Ignores an error of the API server with this `code`."""
    try:
        yield
    except ApiError as error:
        if error.status.code != code:
            raise
