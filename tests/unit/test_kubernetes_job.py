"""What the Job of an instance says, and what its end means; with an API server: tests/contract/instances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import pytest
from lightkube import ApiError
from lightkube.models.meta_v1 import Status
from lightkube.resources.batch_v1 import Job

from app.errors import InstanceFailed, LaunchUnclear, NoCapacity, SettingsInvalid
from app.instances.kubernetes import _refusal, pod_end
from app.instances.kubernetes_job import job, overlaid, user_parts, waits_in_queue
from app.models.instance import InstanceMode, InstanceRequest
from app.settings import Settings

_ID = UUID("0190c0de-0000-7000-8000-000000000001")


def _request(**more: Any) -> InstanceRequest:
    return InstanceRequest(instance_id=_ID, mode=InstanceMode.EPHEMERAL, **more)


def _job(tmp_path: Path, parts: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return job(_request(**more), Settings(home=tmp_path, installation="here"), parts or {})


def test_a_job_runs_once_within_its_lifetime_with_the_size_of_its_class(tmp_path: Path) -> None:
    made = _job(tmp_path, lifetime_s=90.2, cpus=1.5, memory_bytes=4 << 30, gpus=1, architecture="arm64")
    spec, pod = made["spec"], made["spec"]["template"]["spec"]
    assert made["metadata"]["name"] == f"megaflow-{_ID}"
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"], spec["suspend"]) == (0, 91, True)
    assert spec["ttlSecondsAfterFinished"] > 0
    assert pod["restartPolicy"] == "Never"
    assert pod["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
    (worker,) = pod["containers"]
    assert InstanceRequest.model_validate_json(worker["args"][-1]).instance_id == _ID
    assert worker["resources"]["requests"] == {"memory": str(4 << 30), "cpu": "1500m"}
    assert worker["resources"]["limits"] == {"memory": str(4 << 30), "nvidia.com/gpu": "1"}
    assert made["metadata"]["labels"] == spec["template"]["metadata"]["labels"]
    Job.from_dict(made)  # a field of a wrong type is refused


def test_a_standing_instance_has_no_deadline_and_its_attempts_memory_is_asked_for(tmp_path: Path) -> None:
    made = _job(tmp_path, slots=3)
    assert "activeDeadlineSeconds" not in made["spec"]
    resources = made["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources == {"requests": {"memory": str(3 * (384 << 20))}, "limits": {}}


def test_the_users_parts_are_put_over_and_what_we_count_on_stays(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        """
metadata: {labels: {kueue.x-k8s.io/queue-name: agents, megaflow.instance: forged}, annotations: {a: b}}
spec:
  backoffLimit: 5
  suspend: false
  template:
    spec:
      priorityClassName: low
      restartPolicy: OnFailure
      tolerations: [{key: spot, operator: Exists}]
      volumes: [{name: cache, emptyDir: {}}]
      containers: [{name: worker, volumeMounts: [{name: cache, mountPath: /cache}], env: [{name: A, value: b}]}]
"""
    )
    made = _job(tmp_path, user_parts(file))
    pod = made["spec"]["template"]["spec"]
    assert waits_in_queue(made)
    assert (made["spec"]["backoffLimit"], made["spec"]["suspend"], pod["restartPolicy"]) == (0, True, "Never")
    assert made["metadata"]["labels"]["megaflow.instance"] == str(_ID)
    assert (pod["priorityClassName"], pod["tolerations"][0]["key"]) == ("low", "spot")
    assert [one["name"] for one in pod["volumes"]] == ["settings", "cache"]
    (worker,) = pod["containers"]
    assert [one["name"] for one in worker["volumeMounts"]] == ["settings", "cache"]
    assert worker["env"] == [{"name": "A", "value": "b"}]
    assert worker["args"][:2] == ["python", "-m"]


@pytest.mark.parametrize("text", ["- a", "spec: [", "spec: {}\nkinds: Job\n"])
def test_a_file_that_is_no_part_of_a_job_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(SettingsInvalid, match="MEGAFLOW_KUBERNETES_JOB"):
        user_parts(tmp_path / "job.yaml")
    with pytest.raises(SettingsInvalid):
        user_parts(tmp_path / "none.yaml")


def test_lists_without_names_are_replaced() -> None:
    assert overlaid({"args": ["a"], "b": [{"name": "x"}]}, {"args": ["c"], "b": ["y"]}) == {"args": ["c"], "b": ["y"]}


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        ({"containerStatuses": [{"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}]}, 0, "exit code 0"),
        (
            {"containerStatuses": [{"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]},
            137,
            "OOMKilled",
        ),
        ({"reason": "Evicted", "message": "low on memory", "phase": "Failed"}, None, "Evicted: low on memory"),
        (
            {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]},
            None,
            "DeletionByTaintManager",
        ),
        ({}, None, "its pod was deleted"),
    ],
)
def test_an_end_says_its_code_and_why(status: dict[str, Any], code: int | None, words: str) -> None:
    found, why = pod_end({"status": status})
    assert found == code
    assert words in why


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (403, 'jobs "a" is forbidden: exceeded quota: count', NoCapacity),
        (403, "jobs is forbidden: User cannot create", InstanceFailed),
        (422, "Invalid value", InstanceFailed),
        (429, "Too many requests", InstanceFailed),
        (500, "etcdserver: request timed out", LaunchUnclear),
        (503, "unavailable", LaunchUnclear),
    ],
)
def test_a_refusal_is_certain_and_a_servers_own_fault_is_not(code: int, message: str, kind: type) -> None:
    status = {"message": message, "code": code, "status": "Failure"}
    response = httpx2.Response(code, content=json.dumps(status), request=httpx2.Request("POST", "http://a"))
    assert type(_refusal(ApiError(request=response.request, response=response))) is kind
    assert type(_refusal(ApiError(status=Status(**status)))) is kind  # type: ignore[arg-type]


def test_what_was_not_sent_is_not_unclear() -> None:
    assert type(_refusal(httpx2.ConnectError("refused"))) is InstanceFailed
    assert type(_refusal(httpx2.ReadTimeout("silent"))) is LaunchUnclear
