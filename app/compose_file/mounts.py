"""Reads the mounts of a service: project volumes, copies of bundle files, memory. Nothing of the host is mounted."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import ValidationInfo

from app.compose_file.refusals import FileContext, refused
from app.compose_file.values import flag, size, text
from app.compose_file.variables import HARNESS

_COPY = "write it as `./path:/target:ro` with a path of the context: it becomes a copy"
_ENGINE_ONLY = ("/dev", "/proc", "/sys")
_MODES = {"rw", "ro", "z", "Z", "cached", "delegated", "consistent", "nocopy"}
_MAX_TMPFS_BYTES = 1 << 30
_LONG = {"type", "source", "src", "target", "destination", "dst", "read_only", "readonly", "consistency"}
_OPTIONS = {"bind": {"create_host_path", "selinux"}, "volume": {"nocopy"}, "tmpfs": {"size", "mode"}}


class MountKind(StrEnum):
    NAMED = "named"  # a volume of the project
    ANONYMOUS = "anonymous"  # a volume of the container
    COPY = "copy"  # a path of the bundle, copied in
    FOLDER = "folder"  # created empty, where a harness mounts a folder of its host
    TMPFS = "tmpfs"


@dataclass(frozen=True, slots=True)
class ServiceMount:
    """A mount of a container at `target`."""

    kind: MountKind
    target: str
    source: str = ""  # a volume's name, or a path in the bundle
    read_only: bool = False
    size_bytes: int | None = None  # of a tmpfs


def tmpfs_of(value: Any) -> ServiceMount:
    """Reads an entry of `tmpfs`: `/path` or `/path:size=64m`."""
    target, _, options = (text(value) or "").partition(":")
    sizes = [part.partition("=")[2] for part in options.split(",") if part.startswith("size=")]
    return _tmpfs(target, size(sizes[-1]) if sizes else None)


def mount_of(value: Any, info: ValidationInfo) -> ServiceMount:
    """Reads an entry of `volumes`, in the short or the long notation."""
    if isinstance(value, dict):
        return _long(value, info)
    short = text(value) or ""
    parts = short.split(":")
    if len(parts) == 1:
        return _volume("", parts[0], False, info)
    source, target, modes = parts[0], parts[1], set(parts[2].split(",")) if len(parts) == 3 else set()
    if len(parts) > 3 or not modes <= _MODES:
        raise refused("SOURCE:TARGET or SOURCE:TARGET:ro", short)
    bind = source.startswith((".", "/", "~")) or "/" in source or "\\" in source
    return _bind(source, target, "ro" in modes, short, info) if bind else _volume(source, target, "ro" in modes, info)


def _long(value: dict[str, Any], info: ValidationInfo) -> ServiceMount:
    kind = str(value.get("type", "volume"))
    options = value.get(kind) or {}
    if not isinstance(options, dict):
        raise refused("a map", options)
    unknown = (value.keys() - _LONG - {kind}) | (options.keys() - _OPTIONS.get(kind, set()))
    if kind not in _OPTIONS or unknown:
        description = f"{kind} with {', '.join(sorted(unknown))}" if unknown else kind
        raise refused("a mount of the type volume, bind or tmpfs with its usual keys", description)
    source = text(value.get("source", value.get("src"))) or ""
    target = text(value.get("target", value.get("destination", value.get("dst")))) or ""
    read_only = flag(value.get("read_only", value.get("readonly")))
    if kind == "tmpfs":
        return _tmpfs(target, size(options.get("size")))
    return _bind(source, target, read_only, value, info) if kind == "bind" else _volume(source, target, read_only, info)


def _volume(source: str, target: str, read_only: bool, info: ValidationInfo) -> ServiceMount:
    target = _inside(target)
    if source and source not in FileContext.of(info).volumes:
        raise refused("a volume that the file's `volumes` name", source, "add it there")
    return ServiceMount(MountKind.NAMED if source else MountKind.ANONYMOUS, target, source, read_only)


def _bind(source: str, target: str, read_only: bool, found: object, info: ValidationInfo) -> ServiceMount:
    """Reads a bind mount: a path of the context becomes a copy, a harness's folder an empty one. Refuses host paths."""
    target, context = _inside(target), FileContext.of(info)
    if posixpath.normpath(source).startswith(f"{HARNESS}/"):
        context.note("volumes", f"{target} is a folder of its own instead of one of the harness's")
        return ServiceMount(MountKind.FOLDER, target)
    path = (context.folder / source).resolve()
    if source.startswith(("/", "~")) or "\\" in source or not path.is_relative_to(context.folder):
        raise refused("nothing of the host", found, _COPY)
    if not read_only:
        raise refused("a read-only mount, as it becomes a copy", found, _COPY)
    if not path.exists():
        raise refused("a path that the context has", found, _COPY)
    return ServiceMount(MountKind.COPY, target, str(path.relative_to(context.folder)), True)


def _tmpfs(target: str, limit: int | None) -> ServiceMount:
    size_bytes = min(limit or _MAX_TMPFS_BYTES, _MAX_TMPFS_BYTES)
    return ServiceMount(MountKind.TMPFS, _inside(target), size_bytes=size_bytes)


def _inside(target: str) -> str:
    clean = posixpath.normpath(target) if target.startswith("/") else ""
    inside = clean.startswith(tuple(f"{one}/" for one in _ENGINE_ONLY)) and clean != "/dev/shm"
    if not clean or clean in ("/", *_ENGINE_ONLY) or inside or clean.startswith("//"):
        raise refused("an absolute path inside, not of the system's own", target)
    return clean
