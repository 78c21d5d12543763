"""Objects with their versions and history, in memory: what a real API server keeps in etcd."""

from __future__ import annotations

import copy
import re
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]

KINDS = {
    "pods": ("v1", "Pod"),
    "secrets": ("v1", "Secret"),
    "configmaps": ("v1", "ConfigMap"),
    "nodes": ("v1", "Node"),
    "jobs": ("batch/v1", "Job"),
    "networkpolicies": ("networking.k8s.io/v1", "NetworkPolicy"),
}
GLOBAL = {"nodes"}

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_SET = re.compile(r"(?P<key>[^\s!=,()]+)\s+(?P<word>in|notin)\s+\((?P<values>[^)]*)\)")
_EQUAL = re.compile(r"(?P<key>[^\s!=,()]+)\s*(?P<sign>!=|==?)\s*(?P<value>[^\s,()]*)")
_EXISTS = re.compile(r"(?P<no>!?)\s*(?P<key>[^\s!=,()]+)")
_HISTORY = 1000


class Refused(Exception):
    """An answer with a Status object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason

    def status(self) -> Object:
        """As it is sent."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }


@dataclass(frozen=True)
class Change:
    """One version of one object. `before` is None for a new object, `after` for one that was removed."""

    version: int
    plural: str
    before: Object | None
    after: Object | None

    def seen_by(self, selects: Callable[[Object], bool]) -> tuple[str, Object] | None:
        """The event of a watch with this selector, or None."""
        was = self.before is not None and selects(self.before)
        found = self.after is not None and selects(self.after)
        if not was and not found:
            return None
        if found:
            return ("MODIFIED" if was else "ADDED"), self.after  # type: ignore[return-value]
        last = copy.deepcopy(self.before) or {}
        last["metadata"]["resourceVersion"] = str(self.version)
        return "DELETED", last


def now() -> str:
    """As Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def selector(text: str) -> Callable[[Object], bool]:
    """A label selector: `a=b,c!=d,e in (f,g),h notin (i),j,!k`. Raises: Refused for anything else."""
    checks: list[Callable[[Mapping[str, str]], bool]] = []
    rest = text.strip()
    while rest:
        if (at := _SET.match(rest)) is not None:
            key, values = at["key"], {v.strip() for v in at["values"].split(",")}
            inside = at["word"] == "in"
            checks.append(
                lambda ls, k=key, vs=values, i=inside: (k in ls and ls[k] in vs) if i else ls.get(k) not in vs
            )
        elif (at := _EQUAL.match(rest)) is not None:
            key, value, equal = at["key"], at["value"], at["sign"] != "!="
            checks.append(lambda ls, k=key, v=value, e=equal: (ls.get(k) == v) is e)
        elif (at := _EXISTS.match(rest)) is not None:
            key, exists = at["key"], not at["no"]
            checks.append(lambda ls, k=key, e=exists: (k in ls) is e)
        if at is None or (not (rest := rest[at.end() :].lstrip()).startswith((",",)) and rest):
            raise Refused(400, "BadRequest", f"unable to parse the selector {text!r}")
        rest = rest[1:].lstrip()
    return lambda found: all(check(found["metadata"].get("labels") or {}) for check in checks)


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
        self.history: deque[Change] = deque(maxlen=_HISTORY)
        self._forgotten = 0
        self._changed = changed

    def since(self, version: int) -> list[Change]:
        """What happened after that version. Raises: Refused with 410 when it is forgotten."""
        oldest = self.history[0].version - 1 if len(self.history) == _HISTORY else 0
        if version < max(oldest, self._forgotten):
            raise Refused(410, "Expired", f"too old resource version: {version} ({self.version})")
        return [change for change in self.history if change.version > version]

    def forget(self) -> None:
        """No version before the next is known any more."""
        self.version += 1
        self._forgotten = self.version
        self.history.clear()

    def list(self, plural: str, namespace: str | None, selects: Callable[[Object], bool]) -> list[Object]:
        """In the order of their names; all namespaces for None."""
        found = [o for (p, n, _), o in sorted(self.objects.items()) if p == plural and namespace in (None, n)]
        return [one for one in found if selects(one)]

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
        metadata = made.setdefault("metadata", {})
        name = metadata.get("name") or ""
        if not _NAME.fullmatch(name) or (plural == "jobs" and len(name) > 63):
            raise Refused(422, "Invalid", f"metadata.name: Invalid value: {name!r}")
        labels = metadata.get("labels") or {}
        if plural == "jobs":
            labels = labels | (made["spec"]["template"].get("metadata") or {}).get("labels", {})
        for key, value in labels.items():
            if not (_LABEL_KEY.fullmatch(key) and _LABEL_VALUE.fullmatch(value)):
                raise Refused(422, "Invalid", f"metadata.labels: Invalid value: {key}={value}")
        if (plural, namespace, name) in self.objects:
            raise Refused(409, "AlreadyExists", f'{plural} "{name}" already exists')
        for mine in ("resourceVersion", "deletionTimestamp"):
            metadata.pop(mine, None)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
        if plural not in GLOBAL:
            metadata["namespace"] = namespace
        return self._put(plural, namespace, name, None, made)

    def update(self, plural: str, namespace: str, name: str, new: Object) -> Object:
        """Replace it. Raises: Refused with 404; with 409 when `new` carries another version than the present one."""
        present = self.get(plural, namespace, name)
        version = new["metadata"].get("resourceVersion")
        if version not in (None, present["metadata"]["resourceVersion"]):
            raise Refused(409, "Conflict", f'Operation cannot be fulfilled on {plural} "{name}": it has been modified')
        kept = {field: present["metadata"].get(field) for field in ("uid", "creationTimestamp", "name", "namespace")}
        metadata = new["metadata"] | {field: value for field, value in kept.items() if value is not None}
        return self._put(plural, namespace, name, present, {**new, "metadata": metadata})

    def change(self, found: Object, patch: Object) -> Object | None:
        """Merge into the present version of this very object; None when it is gone."""
        plural, namespace, name = self.key_of(found)
        present = self.objects.get((plural, namespace, name))
        if present is None or present["metadata"]["uid"] != found["metadata"]["uid"]:
            return None
        merged = merge(present, patch)
        return present if merged == present else self._put(plural, namespace, name, present, merged)

    def remove(self, found: Object) -> None:
        """No error when it is gone."""
        key = self.key_of(found)
        present = self.objects.get(key)
        if present is None or present["metadata"]["uid"] != found["metadata"]["uid"]:
            return
        del self.objects[key]
        self._record(key[0], present, None)

    def owned_by(self, owner: Object) -> list[Object]:
        """Objects with an owner reference to it."""
        uid = owner["metadata"]["uid"]
        return [
            one
            for one in list(self.objects.values())
            if any(each["uid"] == uid for each in one["metadata"].get("ownerReferences") or ())
        ]

    @staticmethod
    def key_of(found: Object) -> tuple[str, str, str]:
        """Its place in `objects`."""
        plural = next(plural for plural, (_, kind) in KINDS.items() if kind == found["kind"])
        return plural, found["metadata"].get("namespace", ""), found["metadata"]["name"]

    def _put(self, plural: str, namespace: str, name: str, before: Object | None, after: Object) -> Object:
        after["metadata"]["resourceVersion"] = str(self.version + 1)
        self.objects[plural, namespace, name] = after
        self._record(plural, before, after)
        return after

    def _record(self, plural: str, before: Object | None, after: Object | None) -> None:
        self.version += 1
        change = Change(self.version, plural, before, after)
        self.history.append(change)
        self._changed(change)
