"""What tests of the kind `oci` stand on: a tiny image of this host's programs, and a provider with its own home."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.environments.runtimes.oci import OciEnvironment, OciProvider, available
from app.host.cgroups import Cgroup
from app.images.layer_store import ImageStore, image_of, layer_name
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from megaflow.contract.environments.fixture import sweep_all
from tests.integration.docker_fixture import tags_of
from tests.services import missing, short_folder

PROGRAMS = (
    *("sh", "bash", "cat", "ls", "sleep", "head", "tr", "id", "mkdir", "rm", "touch", "stat", "date", "mv", "ln", "dd"),
    *("readlink", "mknod", "mount", "unshare", "hostname", "find", "sort", "env", "chmod", "chown", "tail"),
)
MEBI = 1 << 20


def programs(folder: Path) -> int:
    """Fill `folder` with a system that has a shell: programs of this host and their libraries."""
    for name in ("bin", "tmp", "etc", "root"):
        (folder / name).mkdir()
    (folder / "tmp").chmod(0o1777)
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nsomebody:x:1234:1234::/tmp:/bin/sh\n")
    found = [Path(path) for name in PROGRAMS if (path := shutil.which(name)) is not None]
    listed = subprocess.run(["ldd", *map(str, found)], capture_output=True, text=True, check=True).stdout
    libraries = {word for word in listed.split() if word.startswith("/") and not word.endswith(":")}
    for path in found:
        shutil.copyfile(path, folder / "bin" / path.name)
        (folder / "bin" / path.name).chmod(0o755)
    for library in libraries:
        place = folder / library.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, place)
        place.chmod(0o755)
    return 1


@pytest.fixture(scope="session")
def oci_programs() -> Iterator[Path]:
    """The layer with programs, made once; shared by links."""
    with short_folder() as folder:
        (folder / "layer").mkdir()
        programs(folder / "layer")
        yield folder / "layer"


def add_image(store: ImageStore, layers: dict[str, Path], **config: object) -> str:
    """An image of folders, by their names, bottom first; its id."""
    image_id = _digest(repr((list(layers), config)))
    digests = {_digest(name): folder for name, folder in layers.items()}
    store.announce(image_of(image_id, list(digests), config))
    for digest, folder in digests.items():
        store.add_layer(layer_name(digest), lambda place, folder=folder: _copied(folder, place), timeout_s=10)
    return image_id


def _digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _copied(source: Path, target: Path) -> int:
    subprocess.run(["cp", "-a", f"{source}/.", target], check=True)
    return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())


@pytest.fixture(scope="session")
def oci_cache() -> Iterator[Path]:
    """The helper, shared by all homes."""
    with short_folder() as folder:
        yield folder


@pytest.fixture
def oci_settings(oci_cache: Path) -> Iterator[Settings]:
    """Settings of a home of this test's own, on a host that allows the kind."""
    with short_folder() as folder:
        (folder / "h").mkdir()
        (folder / "h" / "cache").symlink_to(oci_cache)
        settings = Settings(
            home=folder / "h", installation=f"test-{uuid.uuid4().hex[:8]}", docker_url="unix:///nowhere"
        )
        if (why := available(settings)) is not None:
            missing(f"environments without a daemon: {why}")
        yield settings


@pytest.fixture
def oci(oci_settings: Settings) -> Iterator[OciProvider]:
    made = OciProvider(oci_settings, fetch_bundle=lambda bundle: b"")
    yield made
    sweep_all(oci_settings)
    assert left_over(oci_settings.home) == []


@pytest.fixture
def tiny(oci: OciProvider, oci_programs: Path, oci_settings: Settings) -> EnvironmentSpec:
    """The tiny image as a task wants it."""
    image_id = add_image(oci.store, {"sha256:programs": oci_programs}, Env=["FROM_IMAGE=yes"])
    return EnvironmentSpec(image=image_id, env={"GIVEN": "by the task", _MARK: str(oci_settings.home)})


def left_over(home: Path) -> list[str]:
    """What of a home's environments is still there: folders, cgroups, what a runtime keeps."""
    found = [str(place) for parent in ("environments/oci", "run/oci") for place in (home / parent).glob("*")]
    names = {Path(place).name for place in found}
    groups = [str(place) for place in Path("/sys/fs/cgroup").glob("*/megaflow-*") if place.name[9:] in names]
    return [*found, *groups, *(str(folder) for name in names for folder in Cgroup(name).folders if folder.exists())]


def alive(home: Path) -> list[int]:
    """Processes of this host that belong to an environment of the image `tiny` in `home`: their variables say so."""
    mark = f"{_MARK}={home}".encode()
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:
            continue
    return found


_MARK = "TEST_HOME"


def create(oci: OciProvider, spec: EnvironmentSpec, settings: Settings) -> OciEnvironment:
    return oci.create(spec, tags_of(settings.installation), timeout_s=30)


@pytest.fixture
def own(oci: OciProvider, tiny: EnvironmentSpec, oci_settings: Settings) -> Iterator[OciEnvironment]:
    environment = create(oci, tiny, oci_settings)
    yield environment
    environment.destroy()
