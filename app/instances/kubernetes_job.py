"""Builds the Job of an instance from the request, the settings and the user's own parts of a Job."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from app.errors import SettingsInvalid
from app.models.instance import InstanceRequest
from app.settings import Settings

INSTANCE = "megaflow.instance"
QUEUE = "kueue.x-k8s.io/queue-name"
_SECRETS = "/run/megaflow/settings"  # read by worker_images/worker/bin/entrypoint
_KEPT_S = 600  # how long an ended Job stays, with its pod's log

Manifest = dict[str, Any]


def user_parts(file: Path | None) -> Manifest:
    """Reads the file of the setting `kubernetes_job`. Raises: SettingsInvalid when it is no part of a Job."""
    if file is None:
        return {}
    try:
        parts = yaml.safe_load(file.read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsInvalid(f"MEGAFLOW_KUBERNETES_JOB: expected a YAML file, found: {error}") from error
    if not isinstance(parts, dict) or not parts.keys() <= {"apiVersion", "kind", "metadata", "spec"}:
        raise SettingsInvalid(f"MEGAFLOW_KUBERNETES_JOB: expected parts of a Job (metadata, spec) in {file}")
    return parts


def overlaid(base: Any, parts: Any) -> Any:
    """Merges `parts` over `base`: mappings are merged, lists of named things by name, everything else is replaced."""
    if isinstance(base, dict) and isinstance(parts, dict):
        return {**base, **{name: overlaid(base.get(name), value) for name, value in parts.items()}}
    if isinstance(base, list) and isinstance(parts, list) and all(_named(one) for one in [*base, *parts]):
        new = {one["name"]: one for one in parts}
        return [overlaid(one, new.pop(one["name"], {})) for one in base] + list(new.values())
    return parts


def _named(one: Any) -> bool:
    return isinstance(one, dict) and "name" in one


def labels_of(settings: Settings) -> dict[str, Any]:
    """Returns the labels of every Job and pod of the installation, and of no other."""
    return {"megaflow": settings.installation, "megaflow.role": "instance"}


def job_name(request_id: object) -> str:
    """Returns a name from the instance's id alone, so that an instance requested twice is made once."""
    return f"megaflow-{request_id}"


def job(request: InstanceRequest, settings: Settings, parts: Manifest) -> Manifest:
    """Builds the Job, suspended until its Secret is there. `waits_in_queue` tells whether others resume it."""
    labels = {**labels_of(settings), INSTANCE: str(request.instance_id), "megaflow.mode": request.mode.value}
    name = job_name(request.instance_id)
    custom: Manifest = overlaid({"spec": {"template": {"spec": _pod(request, settings, name)}}}, parts)
    fixed: Manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "suspend": True,
            "backoffLimit": 0,
            "parallelism": 1,
            "completions": 1,
            "ttlSecondsAfterFinished": _KEPT_S,
            "template": {"metadata": {"labels": labels}, "spec": {"restartPolicy": "Never"}},
        },
    }
    if request.lifetime_s is not None:
        fixed["spec"]["activeDeadlineSeconds"] = max(1, math.ceil(request.lifetime_s))
    merged: Manifest = overlaid(custom, fixed)
    return merged


def waits_in_queue(manifest: Manifest) -> bool:
    """Whether Kueue resumes the Job, not MegaFlow."""
    return QUEUE in manifest["metadata"]["labels"]


def _pod(request: InstanceRequest, settings: Settings, name: str) -> Manifest:
    container: Manifest = {
        "name": "worker",
        "image": settings.worker_image,
        "args": ["python", "-m", "app.workers.instance", request.model_dump_json()],
        "resources": _resources(request, settings),
        "volumeMounts": [{"name": "settings", "mountPath": _SECRETS, "readOnly": True}],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    pod: Manifest = {
        "containers": [container],
        "volumes": [{"name": "settings", "secret": {"secretName": name, "defaultMode": 0o440}}],
        "terminationGracePeriodSeconds": math.ceil(settings.drain_s) + 10,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
    }
    if request.architecture is not None:
        pod["nodeSelector"] = {"kubernetes.io/arch": request.architecture}
    return pod


def _resources(request: InstanceRequest, settings: Settings) -> Manifest:
    """Returns the resources of its class. Without a class, requests the memory of its attempts, limits nothing."""
    memory = request.memory_bytes or request.slots * settings.instance_memory_bytes
    requests: Manifest = {"memory": str(memory)}
    if request.cpus is not None:
        requests["cpu"] = f"{round(request.cpus * 1000)}m"
    limits: Manifest = {"memory": str(memory)} if request.memory_bytes is not None else {}
    if request.gpus:
        limits["nvidia.com/gpu"] = str(request.gpus)
    return {"requests": requests, "limits": limits}
