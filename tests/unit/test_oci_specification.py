"""What a runtime is told, and what images and registries are called."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from app.environments.isolation import seccomp
from app.environments.runtimes.docker.provider import CAP_DROP
from app.environments.runtimes.oci.specification import ENGINE_CAPABILITIES, ConfigOptions, configuration
from app.environments.runtimes.oci.system_layer import stacked
from app.environments.runtimes.setup import setup_key
from app.host.environment_records import Record, Records
from app.images.references import Reference
from app.models.spec import EnvironmentSpec, Network


def plan(**changes: object) -> ConfigOptions:
    values: dict[str, object] = {
        "root": Path("/r"),
        "env": {"A": "b"},
        "cgroup_mounts": [],
        "annotations": {},
        "seccomp": None,
        "users": 1 << 30,
    }
    return ConfigOptions(**(values | changes))  # type: ignore[arg-type]


def test_capabilities_are_the_engines_without_ours_and_none_is_inheritable() -> None:
    sets = configuration(plan())["process"]["capabilities"]
    assert set(sets) == {"bounding", "effective", "permitted"}
    assert {name.removeprefix("CAP_") for name in sets["bounding"]} == set(ENGINE_CAPABILITIES) - set(CAP_DROP)
    assert configuration(plan())["process"]["noNewPrivileges"] is True


def test_every_namespace_is_its_own() -> None:
    names = {one["type"] for one in configuration(plan())["linux"]["namespaces"]}
    assert names == {"user", "mount", "network", "uts", "pid", "ipc"}


@pytest.mark.parametrize(
    "call",
    ["mount", "umount2", "unshare", "setns", "bpf", "chroot", "keyctl", "io_uring_setup", "kexec_load", "init_module"],
)
def test_calls_that_reach_the_host_are_not_allowed(call: str) -> None:
    rules = seccomp.profile("amd64")
    assert rules["defaultAction"] == "SCMP_ACT_ERRNO"
    assert all(call not in rule["names"] for rule in rules["syscalls"])


@pytest.mark.parametrize(
    ("text", "name", "near"),
    [
        ("python", "docker.io/library/python:latest", False),
        ("docker.io/a/b:1.2", "docker.io/a/b:1.2", False),
        ("localhost:5000/x", "localhost:5000/x:latest", True),
        ("127.0.0.1:5000/x/y:z", "127.0.0.1:5000/x/y:z", True),
        ("localhost.evil.example:5000/x", "localhost.evil.example:5000/x:latest", False),
        ("127.evil.example/x", "127.evil.example/x:latest", False),
        ("[::1]:5000/x", "[::1]:5000/x:latest", True),
        ("ghcr.io/a/b@sha256:" + "0" * 64, "ghcr.io/a/b@sha256:" + "0" * 64, False),
        ("ghcr.io/a/b:tag@sha256:" + "1" * 64, "ghcr.io/a/b@sha256:" + "1" * 64, False),
    ],
)
def test_a_reference_is_read_as_engines_read_it(text: str, name: str, near: bool) -> None:
    found = Reference.parse(text)
    assert (found.for_skopeo, found.is_near) == (f"docker://{name}", near)


def test_what_a_set_up_wrote_lies_above_our_own_layer_and_that_above_the_image() -> None:
    assert stacked("ysystem", ["bottom", "top", "ssnapshot"]) == ["ssnapshot", "ysystem", "top", "bottom"]


def test_two_set_ups_share_a_result_only_when_all_that_they_see_is_the_same() -> None:
    spec = EnvironmentSpec(image="x", setup=("make",))
    key = setup_key(spec, "sha256:1")
    assert key == setup_key(spec.model_copy(update={"image": "another name"}), "sha256:1")
    others = [
        setup_key(spec, "sha256:2"),
        setup_key(spec.model_copy(update={"setup": ("make", "install")}), "sha256:1"),
        setup_key(spec.model_copy(update={"env": {"A": "b"}}), "sha256:1"),
        setup_key(spec.model_copy(update={"workdir": "/w"}), "sha256:1"),
        setup_key(spec.model_copy(update={"network": Network.ALLOWLIST, "allowed_hosts": ("a",)}), "sha256:1"),
        setup_key(spec.model_copy(update={"network": Network.ALLOWLIST, "allowed_hosts": ("b",)}), "sha256:1"),
    ]
    assert len({key, *others}) == 7


@pytest.fixture
def records(tmp_path: Path) -> Records:
    found = Records(tmp_path)
    found.write(Record("a", {"megaflow": "mine"}, "x", "y", ("layer",)))
    return found


def test_a_record_that_cannot_be_read_now_is_not_taken_for_nobodys(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many_files(self: Path) -> bytes:
        raise OSError(24, "Too many open files", str(self))

    monkeypatch.setattr("app.host.environment_records._YOUNG_S", -1.0)
    monkeypatch.setattr(Path, "read_bytes", too_many_files)
    assert list(records.all()) == []
    with pytest.raises(OSError, match="Too many"):
        records.layers_in_use()


@pytest.mark.parametrize("hard", [1024, resource.RLIM_INFINITY])
def test_limits_of_a_process_are_never_above_those_here(hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda name: (hard, hard))
    found = {one["type"]: one["hard"] for one in configuration(plan())["process"]["rlimits"]}
    assert found == {"RLIMIT_NOFILE": 1024 if hard == 1024 else 1 << 20, "RLIMIT_CORE": 0}
