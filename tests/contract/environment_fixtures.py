"""What the contract suite runs on here: one `Fixture` for each of our implementations."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path

import pytest

from app.environments import provider_for
from app.environments.contract import EnvironmentProvider
from app.errors import AgentUnavailable
from app.host.engine import engine_of
from app.models.spec import Build, Bundle, Compose, EnvironmentKind, EnvironmentSpec
from app.settings import Settings
from megaflow.contract.environments.fixture import Fixture, tags_of, tar_of

__all__ = [
    "CONTEXT",
    "FIXTURES",
    "Fixture",
    "base_image",
    "built_image",
    "by_transport",
    "composed",
    "engine_made",
    "of_kind",
    "prepared_folder",
    "several",
    "tags_of",
    "tar_of",
]

ENGINE = (pytest.mark.docker,)
PROJECT = """
services:
  main: {image: "MAIN", depends_on: [beside]}
  beside: {image: "BESIDE", command: [sleep, "9000"], volumes: ["kept:/kept"], pids_limit: 32}
volumes: {kept: }
"""
_PROJECTS: dict[str, bytes] = {}

CONTEXT = tar_of({"setup.sh": b'set -e\ncd "$WORKDIR"\necho prepared > ready.txt\n'})


def of_kind(kind: EnvironmentKind) -> Callable[[Settings], EnvironmentProvider]:
    return lambda settings: provider_for(kind, settings, lambda bundle: CONTEXT, tools=found_in(settings))


def found_in(settings: Settings) -> Callable[[str], Path]:
    """As the contract's suite wants tools to be found."""

    def find(name: str) -> Path:
        if not (folder := settings.home / "tools" / name).exists():
            raise AgentUnavailable(f"the tool {name!r} is not installed")
        return folder

    return find


def engine_made(settings: Settings) -> EnvironmentProvider:
    """Containers of an engine, also where this host could make them by itself."""
    return of_kind(EnvironmentKind.DOCKER)(settings.model_copy(update={"container_runtime": "docker"}))


def by_transport(*names: str) -> Callable[[Settings], EnvironmentProvider]:
    """Containers that are entered by these transports alone."""

    def provider(settings: Settings) -> EnvironmentProvider:
        from app.environments.runtimes.docker.provider import DockerProvider
        from app.environments.session import transports

        kinds = tuple(getattr(transports, name) for name in names)
        return DockerProvider(settings, fetch_bundle=lambda bundle: b"", transports=kinds, tools=found_in(settings))

    return provider


def composed(image: str, *, beside: str | None = None) -> Compose:
    """A project of two services, whose bundle providers of `several` in this process know."""
    text = PROJECT.replace("MAIN", image).replace("BESIDE", beside or image)
    archive = tar_of({"docker-compose.yaml": text.encode()})
    bundle = Bundle(sha256=hashlib.sha256(archive).hexdigest(), size_bytes=len(archive))
    _PROJECTS[bundle.sha256] = archive
    return Compose(context=bundle)


def several(settings: Settings) -> EnvironmentProvider:
    from app.environments.runtimes.compose.provider import ComposeProvider

    composed(settings.base_image)  # for another process than the one that made the spec
    return ComposeProvider(settings, fetch_bundle=lambda bundle: _PROJECTS[bundle.sha256], tools=found_in(settings))


def two_services(request: pytest.FixtureRequest) -> EnvironmentSpec:
    return EnvironmentSpec(compose=composed(request.getfixturevalue("base_image_tag")), env={"GIVEN": "by the task"})


def base_image(request: pytest.FixtureRequest) -> EnvironmentSpec:
    return EnvironmentSpec(image=request.getfixturevalue("base_image_tag"), env={"GIVEN": "by the task"})


def prepared_folder(request: pytest.FixtureRequest) -> EnvironmentSpec:
    bundle = Bundle(sha256=hashlib.sha256(CONTEXT).hexdigest(), size_bytes=len(CONTEXT))
    return EnvironmentSpec(kind=EnvironmentKind.LOCAL, build=Build(context=bundle), env={"GIVEN": "by the task"})


REAL_CLUSTER = "TEST_KUBECONFIG"
"""Names the kubeconfig of a real cluster for the fixture `kubernetes`; TEST_IMAGE an image that its
nodes can pull, with sh, coreutils, python3 and the folder /testbed. Else it is the tests' own API server."""
AT_END = ExitStack()
"""Closed when the session's tests are done."""


@lru_cache(maxsize=1)
def kubeconfig() -> Path:
    """Of the cluster; the tests' own lives as long as their session."""
    if named := os.environ.get(REAL_CLUSTER):
        return Path(named)
    from tests.kubernetes import FakeCluster

    folder = AT_END.enter_context(tempfile.TemporaryDirectory())
    return AT_END.enter_context(FakeCluster()).kubeconfig(Path(folder))


def in_cluster(settings: Settings) -> Settings:
    namespace = os.environ.get("TEST_NAMESPACE", "default")
    return settings.model_copy(update={"kubeconfig": kubeconfig(), "kubernetes_environments": namespace})


def pods(settings: Settings) -> EnvironmentProvider:
    return of_kind(EnvironmentKind.KUBERNETES)(in_cluster(settings))


def one_pod(request: pytest.FixtureRequest) -> EnvironmentSpec:
    image = os.environ.get("TEST_IMAGE") or request.getfixturevalue("base_image_tag")
    return EnvironmentSpec(kind=EnvironmentKind.KUBERNETES, image=image, env={"GIVEN": "by the task"})


@contextmanager
def built_image(recipe: str, files: Mapping[str, bytes] | None = None) -> Iterator[str]:
    """An image of the machine's engine for the length of the block; `files` may be copied into it."""
    engine, tag = engine_of(Settings()), f"megaflow-test/built:{uuid.uuid4().hex[:8]}"
    context = io.BytesIO(tar_of({"Dockerfile": recipe.encode(), **(files or {})}))
    told = list(engine.api.build(fileobj=context, custom_context=True, tag=tag, rm=True))
    assert b"Successfully built" in b"".join(told), told[-3:]
    yield tag
    engine.api.remove_image(tag, force=True)


FIXTURES = [
    Fixture("docker", "docker", engine_made, base_image, shows_tools=True, mounts_tools=True, marks=ENGINE),
    Fixture("oci", "oci", of_kind(EnvironmentKind.OCI), base_image, shows_tools=True, mounts_tools=True, marks=ENGINE),
    Fixture(
        "docker-helper-copied",
        "docker",
        by_transport("CopiedHelper"),
        base_image,
        shares=False,
        shows_tools=True,
        marks=(*ENGINE, pytest.mark.extra),
    ),
    Fixture(
        "compose",
        "compose",
        several,
        two_services,
        shares=False,
        own_commands=False,
        shows_tools=True,
        mounts_tools=True,
        marks=(*ENGINE, pytest.mark.extra),  # its main service is a container of the engine: see test_compose_*.py
    ),
    Fixture(
        "local",
        "local",
        of_kind(EnvironmentKind.LOCAL),
        prepared_folder,
        isolates=False,
        shows_tools=True,
    ),
    Fixture(
        "kubernetes",
        "kubernetes",
        pods,
        one_pod,
        shares=False,  # a pod has one owner
        bounds_processes=False,  # a pod names no limit of processes
        shows_tools=True,
        settings=in_cluster,
        marks=(*ENGINE, pytest.mark.extra),
    ),
]
