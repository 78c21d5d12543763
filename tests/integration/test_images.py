"""Task images on a real engine: built once, pulled from a real registry, refused with a reason."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.environments.runtimes.local.environment import LocalProvider
from app.errors import DiskFull, ImageBuildFailed, ImageUnavailable, SpecInvalid
from app.host.engine import Engine
from app.images.metadata import ImageMetadata
from app.images.pull_source import PullSource, noted
from app.images.task_images import Images
from app.models.spec import Build, Bundle, EnvironmentKind, EnvironmentSpec
from app.settings import Settings
from megaflow.contract.environments.fixture import tar_of
from tests.services import small_disk

pytestmark = pytest.mark.docker


class Contexts:
    """Build contexts as the artifact store would give them, and how often each was asked for."""

    def __init__(self) -> None:
        self.fetched = 0
        self._tars: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def spec(self, dockerfile: str | None, timeout_s: float = 120.0, **files: str) -> EnvironmentSpec:
        """A context that no other test has; `files` by name, with `__` for a dot."""
        content = {name.replace("__", "."): text for name, text in files.items()} | {"nonce": uuid.uuid4().hex}
        if dockerfile is not None:
            content["Dockerfile"] = dockerfile
        archive = tar_of({name: text.encode() for name, text in content.items()})
        bundle = Bundle(sha256=hashlib.sha256(archive).hexdigest(), size_bytes=len(archive))
        self._tars[bundle.sha256] = archive
        return EnvironmentSpec(build=Build(context=bundle, timeout_s=timeout_s))

    def fetch(self, bundle: Bundle) -> bytes:
        with self._lock:
            self.fetched += 1
        return self._tars[bundle.sha256]


@pytest.fixture
def contexts() -> Contexts:
    return Contexts()


@pytest.fixture
def settings(tmp_path: Path, base_image_tag: str) -> Settings:
    return Settings(home=tmp_path / "home", installation=f"test-{uuid.uuid4().hex[:8]}", base_image=base_image_tag)


@pytest.fixture
def images(settings: Settings, engine: Engine, contexts: Contexts) -> Images:
    return Images(settings, fetch_bundle=contexts.fetch)


FROM_BASE = "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\n"


def test_a_context_becomes_a_labelled_image_once(
    images: Images, contexts: Contexts, engine: Engine, settings: Settings
) -> None:
    spec = contexts.spec(FROM_BASE + "COPY greeting.txt /\nRUN cat /greeting.txt\n", greeting__txt="well met")
    with noted() as first:
        found = images.ensure(spec, timeout_s=120)
    with noted() as second:
        assert images.ensure(spec, timeout_s=120) == found
    assert contexts.fetched == 1
    assert (first.longest, second.longest) == (PullSource.BUILD, PullSource.HERE)
    about = engine.api.inspect_image(found)
    wanted = {"megaflow": settings.installation, "megaflow.image": "task"}
    assert about["Config"]["Labels"].items() >= wanted.items()
    assert about["RepoTags"][0].startswith("megaflow/task:")
    [log] = (settings.home / "logs" / "builds").iterdir()
    assert "well met" in log.read_text()


def test_many_threads_and_processes_build_it_once(
    settings: Settings, engine: Engine, contexts: Contexts, tmp_path: Path
) -> None:
    spec = contexts.spec(FROM_BASE + "RUN sleep 1\n")
    assert spec.build is not None
    (tmp_path / "context.tar").write_bytes(contexts.fetch(spec.build.context))
    program = """
import sys
from pathlib import Path
from app.images.task_images import Images
from app.models.spec import EnvironmentSpec
from app.settings import Settings
folder, settings, spec = Path(sys.argv[1]), Settings.model_validate_json(sys.argv[2]), sys.argv[3]
def fetch(bundle):
    with (folder / "fetched").open("a") as file:
        file.write("x")
    return (folder / "context.tar").read_bytes()
print(Images(settings, fetch_bundle=fetch).ensure(EnvironmentSpec.model_validate_json(spec), timeout_s=100))
"""
    argv = [sys.executable, "-c", program, str(tmp_path), settings.model_dump_json(), spec.model_dump_json()]
    with ThreadPoolExecutor(4) as threads:
        runs = list(threads.map(lambda _: subprocess.run(argv, capture_output=True, text=True), range(4)))
    assert [run.returncode for run in runs] == [0] * 4, runs[0].stderr
    assert len({run.stdout.split()[-1] for run in runs}) == 1
    assert (tmp_path / "fetched").read_text() == "x"


def test_no_more_builds_at_once_than_allowed(settings: Settings, engine: Engine, contexts: Contexts) -> None:
    images = Images(settings.model_copy(update={"image_builds": 1}), fetch_bundle=contexts.fetch)
    specs = [contexts.spec(f"{FROM_BASE}RUN sleep 1.0{number}\n") for number in range(2)]
    begun = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda spec: images.ensure(spec, timeout_s=100), specs))
    assert time.monotonic() - begun >= 2


def test_a_build_that_hangs_is_stopped_in_time(
    images: Images, contexts: Contexts, engine: Engine, settings: Settings
) -> None:
    spec = contexts.spec(FROM_BASE + "RUN sleep 7766\n", timeout_s=4)
    begun = time.monotonic()
    with pytest.raises(ImageBuildFailed, match="longer than"):
        images.ensure(spec, timeout_s=120)
    assert time.monotonic() - begun < 15
    for _ in range(50):
        if not [c for c in engine.api.containers() if "7766" in c["Command"]]:
            return
        time.sleep(0.2)
    pytest.fail("the step still runs")


def test_a_context_with_sources_is_built_without_a_network(images: Images, contexts: Contexts) -> None:
    recipe = FROM_BASE + 'RUN test "$(ls /sys/class/net)" = lo\n'
    images.ensure(contexts.spec(recipe, sources__txt="# nothing to fetch\n"), timeout_s=120)


@pytest.mark.parametrize(
    ("dockerfile", "expected"),
    [
        ("FROM 127.0.0.1:1/not/there:1\n", r"127\.0\.0\.1:1/not/there:1"),
        ("FROM scratch AS one\nFROM 127.0.0.1:1/two AS two\nFROM one\n", r"127\.0\.0\.1:1/two"),
    ],
)
def test_a_base_that_cannot_be_had_is_no_fault_of_the_recipe(
    images: Images, contexts: Contexts, dockerfile: str, expected: str
) -> None:
    with pytest.raises(ImageUnavailable, match=expected):
        images.ensure(contexts.spec(dockerfile), timeout_s=60)


def test_a_missing_base_image_names_the_mend(settings: Settings, engine: Engine, contexts: Contexts) -> None:
    bare = Images(settings.model_copy(update={"base_image": "megaflow/base:nowhere"}), fetch_bundle=contexts.fetch)
    with pytest.raises(ImageUnavailable, match=r"megaflow/base:nowhere.*megaflow up"):
        bare.ensure(contexts.spec(FROM_BASE), timeout_s=60)


def test_a_context_that_leads_outside_is_refused(settings: Settings, engine: Engine) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../../../escaped"))
    bundle = Bundle(sha256="0" * 64, size_bytes=1)
    images = Images(settings, fetch_bundle=lambda _: buffer.getvalue())
    with pytest.raises(SpecInvalid, match="outside"):
        images.ensure(EnvironmentSpec(build=Build(context=bundle)), timeout_s=60)


@pytest.fixture
def pushed(registry: str, images: Images, contexts: Contexts, engine: Engine) -> Iterator[tuple[str, str]]:
    """A small image that only the registry has: its path there, and its id."""
    found = images.ensure(contexts.spec("FROM scratch\nCOPY nonce /nonce\n"), timeout_s=60)
    path = f"some/image-{uuid.uuid4().hex[:8]}"
    engine.api.tag(found, f"{registry}/{path}", "v1")
    for step in engine.api.push(f"{registry}/{path}", "v1", stream=True, decode=True):
        assert "error" not in step, step
    engine.api.remove_image(found, force=True)
    yield path, found
    for image in engine.api.images(all=True):
        if image["Id"] == found:
            engine.api.remove_image(found, force=True)


def test_an_image_is_pulled_once_however_many_ask(
    registry: str, pushed: tuple[str, str], images: Images, engine: Engine
) -> None:
    path, image_id = pushed
    spec = EnvironmentSpec(image=f"{registry}/{path}:v1")
    with ThreadPoolExecutor(6) as threads:
        assert set(threads.map(lambda _: images.ensure(spec, timeout_s=60), range(6))) == {image_id}


def test_a_mirror_is_asked_first(
    registry: str, pushed: tuple[str, str], settings: Settings, engine: Engine, contexts: Contexts
) -> None:
    path, image_id = pushed
    mirrored = Images(settings.model_copy(update={"image_mirror": registry}), fetch_bundle=contexts.fetch)
    for reference in (f"{path}:v1", f"docker.io/{path}:v1", f"127.0.0.1:1/{path}:v1"):
        assert mirrored.ensure(EnvironmentSpec(image=reference), timeout_s=60) == image_id
        engine.api.remove_image(image_id, force=True)
    hub = mirrored._mirrored("python:3.11")
    assert hub == [f"{registry}/library/python:3.11"]


def test_a_full_disk_is_called_a_full_disk(tmp_path: Path, settings: Settings, contexts: Contexts) -> None:
    tight = settings.model_copy(update={"home": tmp_path / "small"})
    images, local = (made(tight, fetch_bundle=contexts.fetch) for made in (Images, LocalProvider))
    spec = contexts.spec(FROM_BASE, big="x" * 300_000, setup__sh="true")
    with small_disk(tight.home, "256k"):
        with pytest.raises(DiskFull, match="free some"):
            images.ensure(spec, timeout_s=60)
        with pytest.raises(DiskFull, match="free some"):
            local.prepare_image(spec.model_copy(update={"kind": EnvironmentKind.LOCAL}), timeout_s=60)


def age(settings: Settings) -> None:
    """Two minutes pass."""
    then = time.time() - 120
    for file in (*ImageMetadata(settings)._folder.glob("*.json"), *settings.home.glob("images/oci/*/*.json")):
        os.utime(file, (then, then))


def test_a_local_recipe_that_fails_or_hangs_is_told(settings: Settings, contexts: Contexts) -> None:
    local = LocalProvider(settings, fetch_bundle=contexts.fetch)
    with pytest.raises(ImageBuildFailed, match=r"(?s)left with 6.*out of flour"):
        local.prepare_image(contexts.spec(None, setup__sh="echo out of flour; exit 6"), timeout_s=10)
    with pytest.raises(ImageBuildFailed, match="longer than its time"):
        local.prepare_image(contexts.spec(None, setup__sh="sleep 60", timeout_s=1), timeout_s=10)
