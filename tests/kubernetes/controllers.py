"""What a cluster does by itself: kubelet, Job controller and garbage collector, on the server's event loop."""

from __future__ import annotations

import asyncio
import copy
import itertools
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from docker.errors import APIError, ImageNotFound

from tests.kubernetes.engine import Engine
from tests.kubernetes.store import Change, Object, Refused, Store, now, owners_of

ENDED = ("Succeeded", "Failed")
_FOREGROUND = "foregroundDeletion"


def conditions(found: Object) -> dict[str, str]:
    """Those that are true, with their reasons."""
    listed = (found.get("status") or {}).get("conditions") or ()
    return {one["type"]: one.get("reason", "") for one in listed if one["status"] == "True"}


class Controllers:
    """Reacts to every change of the store. Not thread-safe."""

    def __init__(self, cluster: str, nodes: list[str]) -> None:
        self.store = Store(self._changed)
        self.loop = asyncio.get_running_loop()
        self.nodes = nodes
        self._turn = itertools.count()
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="fake-kubelet")
        self._started: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.engine = Engine(cluster, lambda *end: self.loop.call_soon_threadsafe(self._died, *end))
        self.watchers: list[Callable[[Change], None]] = []

    def close(self) -> None:
        """End all pods."""
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=True)
        self.engine.close()

    def _go(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        return await self.loop.run_in_executor(self._threads, function, *arguments)

    def _changed(self, change: Change) -> None:
        for tell in self.watchers:
            tell(change)
        self.loop.call_soon(self._react, change)

    def _react(self, change: Change) -> None:
        found, gone = change.found, change.kind == "DELETED"
        alive = {one["metadata"]["uid"]: one for one in self.store.objects.values()}
        owners = [alive[uid] for uid in owners_of(found) if uid in alive]
        if not gone and owners_of(found) and not owners:
            self.delete(found, 0, "Background")
        if change.plural == "pods" and change.kind == "ADDED":
            self._go(self._run(found))
        if change.plural == "pods" and gone:
            self._go(self._call(self.engine.remove, found["metadata"]["uid"]))
        for one in self.store.owned_by(found) if gone else ():  # the garbage collector
            self.delete(one, None, "Background")
        for owner in owners:
            if _FOREGROUND in owner["metadata"].get("finalizers", ()) and not self.store.owned_by(owner):
                self.store.remove(owner)
            else:
                self._sync(owner)
        if change.plural == "jobs" and not gone:
            self._sync(alive.get(found["metadata"]["uid"], found))

    def delete(self, found: Object, grace_s: int | None, policy: str | None) -> None:
        """As the API's DELETE. A Job's own grace is not its pods': these get what their specification says."""
        if found["kind"] == "Pod":
            return self._delete_pod(found, grace_s)
        dependents = self.store.owned_by(found)
        if policy == "Foreground" and dependents:
            self.store.change(found, {"metadata": {"deletionTimestamp": now(), "finalizers": [_FOREGROUND]}})
            for one in dependents:
                self.delete(one, None, policy)
        else:
            self.store.remove(found)
        return None

    def _delete_pod(self, pod: Object, grace_s: int | None) -> None:
        grace = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
        before = pod["metadata"].get("deletionGracePeriodSeconds")
        if grace == 0 or pod["status"]["phase"] in ENDED or "startTime" not in pod["status"]:
            self.store.remove(pod)
        elif before is None or grace < before:
            self.store.change(pod, {"metadata": {"deletionTimestamp": now(), "deletionGracePeriodSeconds": grace}})
            self._go(self._end(pod, grace))

    async def _end(self, pod: Object, grace_s: float) -> None:
        await self._call(self.engine.kill, pod["metadata"]["uid"], "SIGTERM")
        await asyncio.sleep(grace_s)
        await self._call(self.engine.kill, pod["metadata"]["uid"], "SIGKILL")

    def fail(self, pod: Object, reason: str, message: str, condition: str | None = None) -> None:
        """End it as the kubelet does at an eviction or a deadline."""
        status = {"phase": "Failed", "reason": reason, "message": message}
        if condition is not None:
            status["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": condition}]
        self.store.change(pod, {"status": status})
        self._go(self._call(self.engine.kill, pod["metadata"]["uid"], "SIGKILL"))

    async def _run(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        node = self.nodes[next(self._turn) % len(self.nodes)]
        self.store.change(pod, {"spec": {"nodeName": node}, "status": _status(pod, "Pending", {"waiting": {}})})
        while True:
            try:
                await self._call(self.engine.create, pod, self.store)
                break
            except (Refused, ImageNotFound, APIError) as error:
                reason = {Refused: "CreateContainerConfigError", ImageNotFound: "ErrImagePull"}.get(
                    type(error), "CreateContainerError"
                )
                waiting = {"waiting": {"reason": reason, "message": str(error)}}
                if self.store.change(pod, {"status": _status(pod, "Pending", waiting)}) is None:
                    return
            await asyncio.sleep(0.5)
        status = _status(pod, "Running", {"running": {"startedAt": now()}})
        try:
            seen = await self._call(self.engine.start, uid)
            addresses = [one["IPAddress"] for one in seen["NetworkSettings"]["Networks"].values()]
            status |= {"startTime": now(), "podIP": next(filter(None, addresses), "127.0.0.1")}
            status["conditions"] = [{"type": "Ready", "status": "True"}]
        except APIError as error:
            self._died(uid, {"ExitCode": 128, "Error": str(error)})
            return
        present = self.store.present(pod)
        if present is None:
            await self._call(self.engine.remove, uid)
        elif present["status"]["phase"] == "Pending":  # else it has ended already
            self.store.change(pod, {"status": status})
        if (deadline_s := pod["spec"].get("activeDeadlineSeconds")) is not None:
            await asyncio.sleep(deadline_s)
            present = self.store.present(pod)
            if present is not None and present["status"]["phase"] == "Running":
                self.fail(pod, "DeadlineExceeded", "Pod was active on the node longer than the specified deadline")

    def _died(self, uid: str, state: Object) -> None:
        for pod in self.store.list("pods", lambda o: o["metadata"]["uid"] == uid):
            code = int(state["ExitCode"])
            reason = "OOMKilled" if state.get("OOMKilled") else "Completed" if code == 0 else "Error"
            ended = {"exitCode": code, "reason": reason, "message": state.get("Error") or "", "finishedAt": now()}
            phase = pod["status"]["phase"]
            phase = phase if phase in ENDED else "Failed" if code else "Succeeded"
            pod = self.store.change(pod, {"status": _status(pod, phase, {"terminated": ended})})
            if pod is not None and "deletionTimestamp" in pod["metadata"]:
                self.store.remove(pod)

    def _sync(self, job: Object) -> None:
        uid, spec, met = job["metadata"]["uid"], job["spec"], conditions(job)
        if "deletionTimestamp" in job["metadata"] or "Complete" in met or "Failed" in met or spec.get("suspend"):
            return
        phases = [one["status"]["phase"] for one in self.store.owned_by(job) if one["kind"] == "Pod"]
        if "FailureTarget" in met:
            if not phases:
                self._met(job, "Failed", met["FailureTarget"])
        elif uid not in self._started:
            self._started.add(uid)
            if (deadline_s := spec.get("activeDeadlineSeconds")) is not None:
                self.loop.call_later(deadline_s, self._deadline, job)
            self._make_pod(job)
        elif "Succeeded" in phases:
            self._met(job, "Complete", "CompletionsReached")
        elif all(phase == "Failed" for phase in phases):
            self._met(job, "Failed", "BackoffLimitExceeded")

    def _make_pod(self, job: Object) -> None:
        template, name, uid = copy.deepcopy(job["spec"]["template"]), job["metadata"]["name"], job["metadata"]["uid"]
        metadata: Object = template.setdefault("metadata", {})
        metadata["name"] = f"{name}-{uuid.uuid4().hex[:5]}"
        metadata.setdefault("labels", {}).update({"batch.kubernetes.io/job-name": name, "job-name": name})
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid, "blockOwnerDeletion": True}
        metadata["ownerReferences"] = [{**owner, "controller": True}]
        self.create_pod(job["metadata"]["namespace"], template)

    def create_pod(self, namespace: str, body: Object) -> Object:
        """Pods begin as Pending."""
        return self.store.create("pods", namespace, {**body, "status": {"phase": "Pending"}})

    def _deadline(self, job: Object) -> None:
        present = self.store.present(job)
        if present is not None and not {"Complete", "Failed"} & conditions(present).keys():
            self._met(job, "FailureTarget", "DeadlineExceeded")
            for pod in self.store.owned_by(job):
                if pod["kind"] == "Pod":
                    self._delete_pod(pod, None)

    def _met(self, job: Object, condition: str, reason: str) -> None:
        listed = [{"type": condition, "status": "True", "reason": reason}]
        self.store.change(job, {"status": {"conditions": listed}})


def _status(pod: Object, phase: str, state: Object) -> Object:
    one = pod["spec"]["containers"][0]
    listed = {"name": one["name"], "image": one["image"], "imageID": "", "restartCount": 0, "ready": "running" in state}
    return {"phase": phase, "containerStatuses": [{**listed, "state": state}]}
