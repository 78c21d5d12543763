"""Plans a task's project: which images it builds or pulls, and which files are copied in."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.compose_file.build_context import packed
from app.compose_file.file import Project, read_project
from app.compose_file.model import Service, ServiceBuild
from app.compose_file.mounts import MountKind
from app.errors import SpecInvalid
from app.host import archives
from app.models.spec import Build, Bundle, EnvironmentSpec, Resources, Reuse

_MOST_COPIES, _MOST_COPIED_BYTES = 256, 256 << 20


@dataclass(frozen=True, slots=True)
class CopiedFiles:
    """Bundle files for one path in a container: as a tar to extract at the root, and as that path's tree or file."""

    target: str
    at_root: bytes
    tree: bytes = b""  # a tar relative to the target
    file: bytes | None = None
    mode: int = 0o755


@dataclass(frozen=True, slots=True)
class ComposePlan:
    """A project with its images and copies, by service. `contexts`: the build contexts as separate bundles."""

    project: Project
    images: dict[str, EnvironmentSpec]
    copies: dict[str, tuple[CopiedFiles, ...]]
    contexts: dict[str, bytes]  # by sha256

    @property
    def main(self) -> Service:
        return self.project.services[self.project.main]


def planned(spec: EnvironmentSpec, fetch_bundle: Callable[[Bundle], bytes], scratch: Path) -> ComposePlan:
    """Plans an environment's project. scratch: folder for temporary files. Raises: SpecInvalid; as `fetch_bundle`."""
    if spec.compose is None:
        raise SpecInvalid(f"expected an environment with a compose file; found {spec.label}")
    if spec.reuse is Reuse.SHARED_READONLY:
        raise SpecInvalid(
            "expected `reuse` 'fresh' or 'recycled' with several containers, found 'shared-readonly': what one task"
            " does to the other services would be there for all."
        )
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        archives.unpack(fetch_bundle(spec.compose.context), folder)
        project = read_project(folder, spec.compose.file, spec.compose.service)
        contexts: dict[str, bytes] = {}
        images = {one.name: _image(one, spec, folder, contexts) for one in project.services.values()}
        _refuse_many(project, folder)
        copies = {one.name: tuple(_copies(one, folder)) for one in project.services.values()}
        return ComposePlan(project, images, copies, contexts)


def resources_of(service: Service, most: Resources) -> Resources:
    """Returns a service's resources: the file's, at most the task's. `kill_at` is the same multiple as the task's."""
    limits = service.limits
    own = most.model_copy(
        update={
            "cpus": min(limits.cpus or most.cpus, most.cpus),
            "memory_bytes": max(16 << 20, min(limits.memory_bytes or most.memory_bytes, most.memory_bytes)),
            "pids": max(16, min(limits.pids or most.pids, most.pids)),
        }
    )
    kill_at = own.times(most.most.cpus / most.cpus, most.most.memory_bytes / most.memory_bytes)
    return own.model_copy(update={"kill_at": kill_at})


def context_of(folder: Path, build: ServiceBuild) -> bytes:
    """Packs the build's folder as a normalised tar with the adapted Dockerfile. Raises: SpecInvalid: no such stage."""
    root = folder / build.context
    changed = build.adapted_dockerfile(folder).encode()
    dockerfile = (root / build.dockerfile).resolve()
    return packed(root, {dockerfile: changed} if build.args or build.target else {})


def _image(service: Service, spec: EnvironmentSpec, folder: Path, contexts: dict[str, bytes]) -> EnvironmentSpec:
    build = None
    if service.build is not None:
        context = context_of(folder, service.build)
        bundle = Bundle(sha256=hashlib.sha256(context).hexdigest(), size_bytes=len(context))
        contexts[bundle.sha256] = context
        build = Build(context=bundle, dockerfile=service.build.dockerfile)
    image = service.image if build is None else None
    return spec.model_copy(update={"compose": None, "build": build, "image": image, "setup": ()})


def _refuse_many(project: Project, folder: Path) -> None:
    """Limits the copies, which are packed in memory. Raises: SpecInvalid: too many mounts, or bytes together."""
    mounts = [
        one.source for service in project.services.values() for one in service.mounts if one.kind is MountKind.COPY
    ]
    sizes = {source: _size(folder / source) for source in set(mounts)}
    total = sum(sizes[source] for source in mounts)
    if len(mounts) > _MOST_COPIES or total > _MOST_COPIED_BYTES:
        raise SpecInvalid(
            f"expected at most {_MOST_COPIES} mounts of the context with {_MOST_COPIED_BYTES >> 20} MiB together;"
            f" found {len(mounts)} with {total >> 20} MiB; bring the files into the images"
        )


def _size(source: Path) -> int:
    files = source.rglob("*") if source.is_dir() else (source,)
    return sum(one.lstat().st_size for one in files)


def _copies(service: Service, folder: Path) -> list[CopiedFiles]:
    copies = []
    for one in service.mounts:
        source = folder / one.source
        if one.kind is MountKind.FOLDER:
            copies.append(
                CopiedFiles(one.target, archives.of_folder(one.target), tree=archives.of_files({}, mode=0o755))
            )
        elif one.kind is MountKind.COPY and source.is_file():
            mode = 0o755 if source.stat().st_mode & 0o100 else 0o644
            copies.append(
                CopiedFiles(one.target, packed(source, below=one.target), file=source.read_bytes(), mode=mode)
            )
        elif one.kind is MountKind.COPY:
            copies.append(CopiedFiles(one.target, packed(source, below=one.target), tree=packed(source)))
    return copies
