"""Builds on a real engine and a real registry: on bases that only a mirror has, with logins, within limits, logged."""

from __future__ import annotations

import io
import json
import os
import time
import uuid
from typing import Any

import pytest

from app.errors import DiskFull, ImageBuildFailed, ImageUnavailable
from app.host import disk_watch
from app.host.engine import Engine, engine_of
from app.images import references
from app.images.build import Builder
from app.images.build_limits import BuildLimits, BuildWatch
from app.images.build_logs import BuildLogs
from app.images.engine_registry import Registries
from app.images.image_index import disk_of
from app.images.logins import logins_of
from app.images.task_images import Images
from app.models.spec import Resources
from app.settings import Settings
from megaflow.contract.environments.fixture import tar_of
from tests.integration import test_image_registry, test_images
from tests.integration.test_images import FROM_BASE, Contexts

pytestmark = pytest.mark.docker

settings = test_images.settings
contexts = test_images.contexts
images = test_images.images
pushed = test_images.pushed
closed = test_image_registry.closed

FAR = "nowhere.invalid"
"""A registry that no engine reaches."""
MIB = 1 << 20


def said(settings: Settings) -> str:
    return BuildLogs(settings).files()[0].read_text()


@pytest.fixture
def mirrored(registry: str, settings: Settings, contexts: Contexts) -> Images:
    return Images(settings.model_copy(update={"image_mirror": registry}), fetch_bundle=contexts.fetch)


def test_bases_come_from_the_mirror_under_the_names_that_the_recipe_uses(
    mirrored: Images, pushed: tuple[str, str], settings: Settings, engine: Engine, contexts: Contexts
) -> None:
    name = f"{FAR}/{pushed[0]}"
    recipe = (
        f"ARG PLACE={FAR}\nARG BASE_IMAGE\n"
        f"FROM --platform=linux/amd64 \\\n  # what else\n  ${{PLACE}}/{pushed[0]}:v1 AS first\n"
        "FROM ${BASE_IMAGE}\n"
        "COPY --from=first /nonce /one\n"
        f"COPY --from={name}:v1 /nonce /two\n"
        "COPY . /context\n"
        "RUN cmp /one /two\n"
        'RUN echo "context: $(ls -A /context | xargs)."\n'
    )
    spec = contexts.spec(recipe)
    assert spec.build is not None
    found = mirrored.ensure(spec, timeout_s=120)
    base_id = mirrored.find(settings.base_image) or ""
    assert engine.api.inspect_image(found)["RepoTags"] == [references.built_here(spec.build, base_id)]
    assert "context: Dockerfile nonce." in said(settings)
    assert f"{name}:v1 is {pushed[1]} here" in said(settings)
    assert mirrored.find(f"{name}:v1") is None
    far = contexts.spec(recipe)
    engine.api.remove_image(pushed[1], force=True)
    with pytest.raises(ImageUnavailable, match=f"{FAR}/"):
        Images(settings, fetch_bundle=contexts.fetch).ensure(far, timeout_s=60)


def build(
    settings: Settings, recipe: str, limits: BuildLimits, *, logins: Any = None, timeout_s: float = 100.0
) -> None:
    """Only the engine's part of a build: nothing is pulled before. The image goes with the test's others."""
    engine = engine_of(settings)
    context = io.BytesIO(tar_of({"Dockerfile": recipe.encode()}))
    tag = f"megaflow/task:{uuid.uuid4().hex[:24]}"
    params = {
        "t": tag,
        "dockerfile": "Dockerfile",
        "rm": "1",
        "forcerm": "1",
        "labels": {"megaflow": settings.installation},
        "buildargs": {"BASE_IMAGE": settings.base_image},
    }
    with BuildLogs(settings).begun(tag) as log:
        Builder(engine, log, limits, settings.home / "turns", logins or {}).build(
            tag, params, context, time.monotonic() + timeout_s
        )


PLENTY = BuildLimits.of(Resources())


def test_a_build_is_sent_the_logins_of_pulls(
    closed: str,
    settings: Settings,
    engine: Engine,
    images: Images,
    contexts: Contexts,
    capfd: pytest.CaptureFixture[str],
) -> None:
    word = test_image_registry._WORD
    auth = Settings(registry_auth=json.dumps({closed: f"me:{word}"})).registry_auth
    login = settings.model_copy(update={"registry_auth": auth})
    name = f"{closed}/some/base-{uuid.uuid4().hex[:8]}"
    made = images.ensure(contexts.spec("FROM scratch\nCOPY nonce /nonce\n"), timeout_s=60)
    engine.api.tag(made, name, "1")
    Registries(engine, login).push(f"{name}:1", time.monotonic() + 30)
    engine.api.remove_image(made, force=True)
    recipe = f"FROM {name}:1\nLABEL x={uuid.uuid4().hex}\n"
    with pytest.raises(ImageBuildFailed, match="basic auth"):
        build(settings, recipe, PLENTY, logins=logins_of(settings))
    build(login, recipe, PLENTY, logins=logins_of(login))
    engine.api.remove_image(f"{name}:1")
    assert word not in said(settings) + "".join(capfd.readouterr())


def test_a_step_has_bounds_for_cpu_and_core_dumps(images: Images, contexts: Contexts, settings: Settings) -> None:
    recipe = FROM_BASE + "RUN cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu.max; echo core $(ulimit -c)\n"
    spec = contexts.spec(recipe).model_copy(update={"resources": Resources(cpus=3.0)})
    images.ensure(spec, timeout_s=120)
    assert "300000" in said(settings)
    assert "core 0\n" in said(settings)


MANY = "i=0; while [ $i -lt 100 ]; do sleep 20 & i=$((i+1)); done; echo all"
FEW = BuildLimits(cpus=2.0, memory_bytes=2 << 30, pids=64, disk_bytes=1 << 30)


def test_a_step_that_starts_processes_without_end_gets_no_more_than_it_may(settings: Settings) -> None:
    build(settings, f"{FROM_BASE}RUN {MANY} {uuid.uuid4().hex}\n", PLENTY)
    assert "\nall" in said(settings)
    for before in ("", "RUN true\n"):  # the limit comes while the step starts
        with pytest.raises(ImageBuildFailed, match=r"(?is)code: [1-9].*fork"):
            build(settings, f"{FROM_BASE}{before}RUN sleep 2; {MANY} {uuid.uuid4().hex}\n", FEW)
        assert "\nall" not in said(settings)


def test_a_step_that_writes_too_much_is_ended(settings: Settings, engine: Engine) -> None:
    little = BuildLimits(cpus=2.0, memory_bytes=2 << 30, pids=512, disk_bytes=100 * MIB)
    begun = time.monotonic()
    recipe = f"{FROM_BASE}RUN dd if=/dev/zero of=/big bs=1M count=250 && sleep 7767\n"
    with pytest.raises(ImageBuildFailed, match=r"task:\w+: stopped: disk limit of 104857600 bytes reached"):
        build(settings, recipe, little)
    assert time.monotonic() - begun < 90
    assert "[megaflow] not built" in said(settings)
    wait_for_the_end_of(engine, "7767")


def test_a_build_ends_when_the_disk_is_nearly_full(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = disk_of(engine)
    if disk is None:
        pytest.skip("the engine's disk cannot be seen from here")
    found = os.statvfs(engine.about["DockerRootDir"])
    kept = (found.f_bavail - 300 * MIB // found.f_frsize) / found.f_blocks
    monkeypatch.setattr(disk_watch, "_no_bytes", lambda disk: disk.f_bavail < disk.f_blocks * kept)
    near = BuildLimits(cpus=2.0, memory_bytes=2 << 30, pids=512, disk_bytes=1 << 40)
    recipe = f"{FROM_BASE}RUN dd if=/dev/zero of=/big bs=1M count=700 && sleep 7768\n"
    with pytest.raises(DiskFull, match=r"build megaflow/task:\w+: stopped: the host's disk is nearly full"):
        build(settings, recipe, near)
    wait_for_the_end_of(engine, "7768")


def wait_for_the_end_of(engine: Engine, sleeping: str) -> None:
    for _ in range(50):
        if not [one for one in engine.api.containers() if sleeping in one["Command"]]:
            return
        time.sleep(0.2)
    pytest.fail("the step still runs")


def test_a_line_that_a_step_prints_bounds_no_container_of_others(settings: Settings, engine: Engine) -> None:
    watch = BuildWatch(engine, "build x", PLENTY, settings.home / "turns", lambda: None)
    kinds = {"ours": {"mem_limit": PLENTY.memory_bytes, "cpu_quota": PLENTY.parameters["cpuquota"]}, "theirs": {}}
    made = {}
    try:
        for name, limits in kinds.items():
            host = engine.api.create_host_config(**limits)
            made[name] = engine.api.create_container(settings.base_image, command=["true"], host_config=host)["Id"]
            watch.read_line("Step 1/2 : RUN true\n")
            watch.read_line(f" ---> Running in {made[name][:12]}\n")
        bounds = {name: engine.api.inspect_container(one)["HostConfig"]["PidsLimit"] for name, one in made.items()}
        assert bounds == {"ours": PLENTY.pids, "theirs": None}
    finally:
        for one in made.values():
            engine.remove(one)
