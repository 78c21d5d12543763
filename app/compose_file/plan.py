"""A task's project, read from its bundle: what is to be made of which images, with which files copied in."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.compose_file.file import read_project
from app.compose_file.model import MountKind, Project, Service
from app.compose_file.recipes import context_of, packed, packed_nothing
from app.errors import SpecInvalid
from app.host import archives
from app.models.spec import Build, Bundle, Compose, EnvironmentSpec, Resources, Reuse


@dataclass(frozen=True, slots=True)
class Copied:
    """Files of the bundle for one place in a container: as a tar of its root, and as what lies there by itself."""

    target: str
    at_root: bytes
    tree: bytes = b""  # a tar relative to the target
    file: bytes | None = None
    mode: int = 0o755


@dataclass(frozen=True, slots=True)
class Plan:
    """A project with its images and copies, by service. `contexts` are the build contexts as bundles of their own."""

    project: Project
    images: dict[str, EnvironmentSpec]
    copies: dict[str, tuple[Copied, ...]]
    contexts: dict[str, bytes]  # by sha256

    @property
    def main(self) -> Service:
        return self.project.services[self.project.main]


def planned(spec: EnvironmentSpec, fetch_bundle: Callable[[Bundle], bytes], scratch: Path) -> Plan:
    """scratch: a folder for passing files. Raises: SpecInvalid, and what `fetch_bundle` raises."""
    asked = asked_of(spec)
    if spec.reuse is Reuse.SHARED_READONLY:
        raise SpecInvalid(
            "expected `reuse` 'fresh' or 'recycled' with several containers, found 'shared-readonly': what one task"
            " does to the other services would be there for all."
        )
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        archives.unpack(fetch_bundle(asked.context), folder)
        project = read_project(folder, asked.file, asked.service)
        contexts: dict[str, bytes] = {}
        images = {one.name: _image(one, spec, folder, contexts) for one in project.services.values()}
        copies = {one.name: tuple(_copies(one, folder)) for one in project.services.values()}
        return Plan(project, images, copies, contexts)


def asked_of(spec: EnvironmentSpec) -> Compose:
    """Raises: SpecInvalid: not a task of several containers."""
    if spec.compose is None:
        raise SpecInvalid(f"expected an environment with a compose file; found {spec.label}")
    return spec.compose


def identity_of(spec: EnvironmentSpec, image_ids: dict[str, str]) -> str:
    """What two environments share when one may stand for the other: the file and all images."""
    parts = [asked_of(spec).model_dump_json(), *(f"{name}={found}" for name, found in sorted(image_ids.items()))]
    return f"compose:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}"


def bounded(service: Service, most: Resources) -> Resources:
    """What the file gives a service, at most what the task has."""
    asked = service.bounds
    return most.model_copy(
        update={
            "cpus": min(asked.cpus or most.cpus, most.cpus),
            "memory_bytes": max(16 << 20, min(asked.memory_bytes or most.memory_bytes, most.memory_bytes)),
            "pids": max(16, min(asked.pids or most.pids, most.pids)),
        }
    )


def _image(service: Service, spec: EnvironmentSpec, folder: Path, contexts: dict[str, bytes]) -> EnvironmentSpec:
    """The task's environment with this service's image alone."""
    build = None
    if service.recipe is not None:
        context = context_of(folder, service.recipe)
        bundle = Bundle(sha256=hashlib.sha256(context).hexdigest(), size_bytes=len(context))
        contexts[bundle.sha256] = context
        build = Build(context=bundle, dockerfile=service.recipe.dockerfile)
    image = service.image if build is None else None
    return spec.model_copy(update={"compose": None, "build": build, "image": image, "setup": ()})


def _copies(service: Service, folder: Path) -> list[Copied]:
    found = []
    for one in service.mounts:
        source = folder / one.source
        if one.kind is MountKind.FOLDER:
            found.append(Copied(one.target, archives.of_folder(one.target), tree=packed_nothing()))
        elif one.kind is MountKind.COPY and source.is_file():
            mode = 0o755 if source.stat().st_mode & 0o100 else 0o644
            found.append(Copied(one.target, packed(source, below=one.target), file=source.read_bytes(), mode=mode))
        elif one.kind is MountKind.COPY:
            found.append(Copied(one.target, packed(source, below=one.target), tree=packed(source)))
    return found
