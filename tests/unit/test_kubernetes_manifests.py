"""The manifests in deploy/kubernetes against the models of lightkube, which are made from Kubernetes' own schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from lightkube.codecs import from_dict
from lightkube.resources.batch_v1 import Job

import app
from app.instances.kubernetes_job import job, user_parts
from app.models.instance import InstanceMode, InstanceRequest
from app.settings import PREFIX, Settings

FOLDER = Path(app.__file__).parent.parent / "deploy" / "kubernetes"
MANIFESTS = [
    pytest.param(found, id=f"{file.stem}-{found['kind']}-{found['metadata']['name']}")
    for file in sorted(FOLDER.glob("*.yaml"))
    for found in yaml.safe_load_all(file.read_text())
]


def _all(kind: str) -> list[dict[str, Any]]:
    return [one.values[0] for one in MANIFESTS if one.values[0]["kind"] == kind]  # type: ignore[misc,index,call-overload]


def _named(kind: str, name: str) -> dict[str, Any]:
    (found,) = (one for one in _all(kind) if one["metadata"]["name"] == name)
    return found


def _unknown(written: Any, read: Any, path: str = "") -> list[str]:
    """Fields that a model does not have: it leaves them out without a word."""
    if isinstance(written, dict):
        known = read if isinstance(read, dict) else {}
        return [f for key, value in written.items() for f in _unknown(value, known.get(key), f"{path}.{key}")]
    if isinstance(written, list):
        pairs = zip(written, read if isinstance(read, list) else [None] * len(written), strict=True)
        return [field for at, (one, two) in enumerate(pairs) for field in _unknown(one, two, f"{path}[{at}]")]
    return [] if written == read else [path]


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_manifest_has_known_fields_of_the_right_types(manifest: dict[str, Any]) -> None:
    assert _unknown(manifest, from_dict(manifest).to_dict()) == []


def test_a_field_that_there_is_not_would_be_noticed() -> None:
    wrong = yaml.safe_load((FOLDER / "50-pool.yaml").read_text())
    wrong["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = [{"name": "home"}]
    assert _unknown(wrong, from_dict(wrong).to_dict()) == [".spec.template.spec.containers[0].volumeMount[0].name"]


def test_the_job_of_an_instance_is_one_that_the_namespace_admits(tmp_path: Path) -> None:
    """`restricted`, as Kubernetes' standards for pods say; the same holds for the Deployments."""
    (tmp_path / "job.yaml").write_text(_named("ConfigMap", "instance-job")["data"]["job.yaml"])
    request = InstanceRequest(instance_id=uuid4(), mode=InstanceMode.EPHEMERAL, lifetime_s=60)
    made = job(request, Settings(home=tmp_path), user_parts(tmp_path / "job.yaml"))
    assert _unknown(made, Job.from_dict(made).to_dict()) == []  # empty mappings and lists are left out
    for one in [made, *_all("Deployment")]:
        pod = one["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert all({"emptyDir", "secret", "configMap"} & volume.keys() for volume in pod["volumes"])


def test_settings_are_known_and_names_lead_somewhere() -> None:
    values = _named("ConfigMap", "megaflow")["data"]
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    assert values.keys() <= known
    assert values[f"{PREFIX}GATEWAY_URL"] == "http://gateway.megaflow.svc:8766"
    accounts = {one["metadata"]["name"] for one in _all("ServiceAccount")} | {"default"}
    for one in _all("Deployment"):
        assert one["spec"]["template"]["spec"]["serviceAccountName"] in accounts
    for one in _all("Service"):
        labels = _named("Deployment", one["metadata"]["name"])["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"] == labels


def test_no_account_may_do_everything_or_read_secrets() -> None:
    for role in _all("Role"):
        for rule in role["rules"]:
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
            assert "secrets" not in rule["resources"] or rule["verbs"] == ["create"]
    assert _all("ClusterRole") == _all("ClusterRoleBinding") == []
