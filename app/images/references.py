"""Parses and builds image names. No I/O."""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from app.models.spec import SEVERAL, Build, EnvironmentSpec

HUB = "docker.io"
_HUB_ALIASES = (HUB, "index.docker.io", "registry-1.docker.io")
TASK_REPOSITORY = "megaflow/task"
"""Repository of built images, on an engine and below a mirror."""


def short(*parts: str) -> str:
    """Returns a digest of these texts, fit for a tag or a file name."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def key_of(spec: EnvironmentSpec) -> str:
    """Returns what identifies a task's image on every host: the reference, the recipe's digest, or the project's.

    A project's key stands for the images of all its services, each of which has a key of its own, too.
    """
    if (several := spec.compose) is not None:
        return f"{SEVERAL}{short(several.context.sha256, several.file, several.service)}"
    if spec.build is None:
        return spec.image or ""
    return f"build:{short(spec.build.context.sha256, spec.build.dockerfile)}"


def registry_of(reference: str) -> str:
    """Returns the registry that an image is pulled from: `docker.io`, `ghcr.io`, `localhost:5000`."""
    return located(reference)[0]


def located(reference: str) -> tuple[str, str]:
    """Returns registry and path; a name without a registry is Docker Hub's."""
    host, slash, path = reference.partition("/")
    named = slash and ("." in host or ":" in host or host == "localhost")
    if not named:
        return HUB, reference
    return (HUB if host in _HUB_ALIASES else host), path


def in_mirror(mirror: str, reference: str) -> list[str]:
    """Returns the mirror's names of a public image, the likeliest first; empty when it cannot have it.

    The registry's host is replaced, and Docker Hub's bare names get their `library/`. A pinned digest is looked for by
    itself and by the tag that stands for it: a copy's manifest may have another digest than the original's.
    """
    if reference.startswith("sha256:"):
        return []
    host, path = located(reference)
    if host == HUB and "/" not in path:
        path = f"library/{path}"
    name = f"{mirror.rstrip('/')}/{path}"
    return [name, digest_tag(name)] if "@" in name else [name]


def manifest_of(path: str) -> tuple[str, str]:
    """Returns repository and tag, or digest, of a path in a registry."""
    name, at, digest = path.partition("@")
    folder, slash, last = name.rpartition("/")
    bare, _, tag = last.partition(":")
    return f"{folder}{slash}{bare}", digest if at else tag or "latest"


def digest_tag(reference: str) -> str:
    """Returns `repo@sha256:abc` as `repo:sha256-abc`, since a digest cannot be pushed; others unchanged."""
    if "@" not in reference:
        return reference
    repository, digest = manifest_of(reference)
    return f"{repository}:{digest.replace(':', '-')}"


def built_here(build: Build, base_id: str) -> str:
    """Returns the tag of a recipe's image on the engine that built it: another base makes another image."""
    return f"{TASK_REPOSITORY}:{short(build.context.sha256, build.dockerfile, base_id)}"


def built_for_all(mirror: str, build: Build, base_image: str) -> str:
    """Returns the tag of a recipe's image in a registry: by context, recipe and the base's name, alike on all hosts."""
    return f"{mirror.rstrip('/')}/{TASK_REPOSITORY}:{short(build.context.sha256, build.dockerfile, base_image)}"


@dataclass(frozen=True, slots=True)
class Reference:
    """Location of an image: registry, repository, and a tag or a digest."""

    host: str
    repository: str
    version: str

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parses usual names: `python:3.12`, `ghcr.io/a/b@sha256:…`, `localhost:5000/x`."""
        host, path = located(text)
        if host == HUB and "/" not in path:
            path = f"library/{path}"
        repository, version = manifest_of(path)
        return cls(host, repository, version)

    @property
    def for_skopeo(self) -> str:
        """The reference in the form that the program skopeo reads."""
        mark = "@" if self.version.startswith("sha256:") else ":"
        return f"docker://{self.host}/{self.repository}{mark}{self.version}"

    @property
    def is_near(self) -> bool:
        """Whether the registry is on this machine: such registries are used without encryption."""
        name = urlsplit(f"//{self.host}").hostname or ""
        try:
            return name == "localhost" or ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False
