"""What the environments' contract suite runs on: one `Ground` for each implementation.

To try your own, append yours from a plugin and name it:

    # my_ground.py
    from tests.contract.environment_grounds import GROUNDS, Ground
    GROUNDS[:] = [Ground("mine", "my-kind", my_provider, my_spec)]

    pytest -p my_ground tests/contract/test_environment_contract.py tests/contract/test_environment_sessions.py
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from app.environments import provider_for
from app.environments.base import EnvironmentProvider, Tags
from app.models.spec import Build, Bundle, EnvironmentKind, EnvironmentSpec
from app.settings import Settings


@dataclass(frozen=True)
class Ground:
    """One implementation and how to make it."""

    name: str
    kind: str  # what `describe()` says
    provider: Callable[[Settings], EnvironmentProvider]
    spec: Callable[[pytest.FixtureRequest], EnvironmentSpec]
    """A small environment with sh, python3 and coreutils, the working folder /testbed and GIVEN="by the task"."""
    isolates: bool = True
    """Its limits of memory and processes hold, and its processes do not see the host's."""
    marks: tuple[pytest.MarkDecorator, ...] = (pytest.mark.docker,)

    def param(self) -> object:
        return pytest.param(self, id=self.name, marks=self.marks)


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def tags_of(installation: str) -> Tags:
    return Tags(installation, uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), time.time() + 600)


CONTEXT = tar_of({"setup.sh": b'set -e\ncd "$WORKDIR"\necho prepared > ready.txt\n'})


def of_kind(kind: EnvironmentKind) -> Callable[[Settings], EnvironmentProvider]:
    return lambda settings: provider_for(kind, settings, lambda bundle: CONTEXT)


def engine_made(settings: Settings) -> EnvironmentProvider:
    """Containers of an engine, also where this host could make them by itself."""
    return of_kind(EnvironmentKind.DOCKER)(settings.model_copy(update={"container_runtime": "docker"}))


def by_way(*names: str) -> Callable[[Settings], EnvironmentProvider]:
    """Containers that are entered by these ways alone."""

    def provider(settings: Settings) -> EnvironmentProvider:
        from app.environments import ways
        from app.environments.docker import DockerProvider

        kinds = tuple(getattr(ways, name) for name in names)
        return DockerProvider(settings, fetch_bundle=lambda bundle: b"", ways=kinds)

    return provider


def base_image(request: pytest.FixtureRequest) -> EnvironmentSpec:
    return EnvironmentSpec(image=request.getfixturevalue("base_image_tag"), env={"GIVEN": "by the task"})


def prepared_folder(request: pytest.FixtureRequest) -> EnvironmentSpec:
    bundle = Bundle(sha256=hashlib.sha256(CONTEXT).hexdigest(), size_bytes=len(CONTEXT))
    return EnvironmentSpec(kind=EnvironmentKind.LOCAL, build=Build(context=bundle), env={"GIVEN": "by the task"})


GROUNDS = [
    Ground("docker", "docker", engine_made, base_image),
    Ground("oci", "oci", of_kind(EnvironmentKind.OCI), base_image),
    Ground("docker-helper-copied", "docker", by_way("CopiedHelper"), base_image),
    Ground("docker-no-helper", "docker", by_way("NoHelper", "NoHelperNorInit"), base_image),
    Ground("local", "local", of_kind(EnvironmentKind.LOCAL), prepared_folder, isolates=False, marks=()),
]
