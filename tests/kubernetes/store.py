"""Objects with their versions and history, in memory: what a real API server keeps in etcd."""

from __future__ import annotations

import copy
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]
Selects = Callable[[Object], bool]

KINDS = {
    "pods": ("v1", "Pod"),
    "secrets": ("v1", "Secret"),
    "jobs": ("batch/v1", "Job"),
    "networkpolicies": ("networking.k8s.io/v1", "NetworkPolicy"),
}

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


class Refused(Exception):
    """An answer with a Status object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason

    def status(self) -> Object:
        """As it is sent."""
        told = {"message": str(self), "reason": self.reason, "code": self.code}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", **told}


@dataclass(frozen=True)
class Change:
    """One version of one object; `kind` as a watch tells it: ADDED, MODIFIED or DELETED."""

    version: int
    plural: str
    kind: str
    found: Object


def now() -> str:
    """As Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def selector(text: str) -> Selects:
    """A label selector of equalities: `a=b,c=d`. Raises: Refused for anything else."""
    wanted = dict(part.partition("=")[::2] for part in text.split(",") if part)
    for key, value in wanted.items():
        if not (_LABEL_KEY.fullmatch(key) and _LABEL_VALUE.fullmatch(value)):
            raise Refused(400, "BadRequest", f"unable to parse the selector {text!r}")
    return lambda found: wanted.items() <= (found["metadata"].get("labels") or {}).items()


def merge(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged


class Store:
    """Not thread-safe: everything happens on the server's event loop. `changed` is called after each change."""

    def __init__(self, changed: Callable[[Change], None]) -> None:
        self.version = 1
        self.objects: dict[tuple[str, str, str], Object] = {}
        self._history: list[Change] = []
        self._forgotten = 0
        self._changed = changed

    def since(self, version: int) -> list[Change]:
        """What happened after that version. Raises: Refused with 410 when it is forgotten."""
        if version < self._forgotten:
            raise Refused(410, "Expired", f"too old resource version: {version} ({self.version})")
        return [change for change in self._history if change.version > version]

    def forget(self) -> None:
        """No version before the next is known any more."""
        self.version += 1
        self._forgotten = self.version
        self._history.clear()

    def list(self, plural: str, selects: Selects = lambda _: True) -> list[Object]:
        """In the order of their names."""
        return [one for (kind, _, _), one in sorted(self.objects.items()) if kind == plural and selects(one)]

    def get(self, plural: str, namespace: str, name: str) -> Object:
        """Raises: Refused with 404."""
        try:
            return self.objects[plural, namespace, name]
        except KeyError:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found') from None

    def create(self, plural: str, namespace: str, body: Object) -> Object:
        """Raises: Refused with 409 when there is one of the name, 422 when name or labels are wrong."""
        made = copy.deepcopy(body)
        made["apiVersion"], made["kind"] = KINDS[plural]
        metadata = made["metadata"]
        name, labels = metadata["name"], metadata.get("labels") or {}
        if not _NAME.fullmatch(name) or (plural == "jobs" and len(name) > 63):
            raise Refused(422, "Invalid", f"metadata.name: Invalid value: {name!r}")
        if plural == "jobs":
            labels = labels | (made["spec"]["template"].get("metadata") or {}).get("labels", {})
        for key, value in labels.items():
            if not (_LABEL_KEY.fullmatch(key) and _LABEL_VALUE.fullmatch(value)):
                raise Refused(422, "Invalid", f"metadata.labels: Invalid value: {key}={value}")
        if (plural, namespace, name) in self.objects:
            raise Refused(409, "AlreadyExists", f'{plural} "{name}" already exists')
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "namespace": namespace}
        return self._put("ADDED", made)

    def update(self, present: Object, new: Object) -> Object:
        """Replace it. Raises: Refused with 409 when `new` carries another version than the present one."""
        version = new["metadata"].get("resourceVersion")
        if version not in (None, present["metadata"]["resourceVersion"]):
            raise Refused(409, "Conflict", f"Operation cannot be fulfilled on {self.key_of(present)}: it was modified")
        kept = {field: present["metadata"][field] for field in ("uid", "creationTimestamp", "name", "namespace")}
        return self._put("MODIFIED", {**present, **new, "metadata": new["metadata"] | kept})

    def change(self, found: Object, patch: Object) -> Object | None:
        """Merge into the present version of this very object; None when it is gone."""
        if (present := self.present(found)) is None:
            return None
        merged = merge(present, patch)
        return present if merged == present else self._put("MODIFIED", merged)

    def remove(self, found: Object) -> None:
        """No error when it is gone."""
        if (present := self.present(found)) is not None:
            del self.objects[self.key_of(found)]
            self._record("DELETED", dict(present))

    def present(self, found: Object) -> Object | None:
        """The present version of this very object; None when it is gone."""
        present = self.objects.get(self.key_of(found))
        return present if present and present["metadata"]["uid"] == found["metadata"]["uid"] else None

    def owned_by(self, owner: Object) -> list[Object]:
        """Objects with an owner reference to it."""
        uid = owner["metadata"]["uid"]
        return [one for one in self.objects.values() if uid in owners_of(one)]

    @staticmethod
    def key_of(found: Object) -> tuple[str, str, str]:
        """Its place in `objects`."""
        plural = next(plural for plural, (_, kind) in KINDS.items() if kind == found["kind"])
        return plural, found["metadata"]["namespace"], found["metadata"]["name"]

    def _put(self, kind: str, found: Object) -> Object:
        self.objects[self.key_of(found)] = found
        self._record(kind, found)
        return found

    def _record(self, kind: str, found: Object) -> None:
        self.version += 1
        found["metadata"] = {**found["metadata"], "resourceVersion": str(self.version)}
        change = Change(self.version, self.key_of(found)[0], kind, found)
        self._history.append(change)
        self._changed(change)


def owners_of(found: Object) -> list[str]:
    """The ids that its owner references name."""
    return [one["uid"] for one in found["metadata"].get("ownerReferences") or ()]
