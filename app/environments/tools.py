"""Agent frameworks that run inside: folders of this host, mounted read-only.

A provider gets a function that finds a tool's folder by name (`Find`). The agents decide what is installed where.
"""

from __future__ import annotations

import io
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from app.errors import AgentUnavailable, EnvironmentFailed, SpecInvalid
from app.models.spec import TOOLS_INSIDE, EnvironmentKind, EnvironmentSpec

Find = Callable[[str], Path]
"""Returns the folder of a tool on this host, complete and unchanging. Raises: AgentUnavailable."""
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Tool:
    """A folder that an environment is to see."""

    name: str
    folder: Path  # resolved: no symbolic links

    @property
    def target(self) -> str:
        return f"{TOOLS_INSIDE}/{self.name}"


def tool_inside(kind: EnvironmentKind, name: str, folder: Path) -> str:
    """Returns the path of a tool inside an environment of that kind. folder: the tool's folder on this host."""
    if kind is EnvironmentKind.LOCAL:
        return str(folder)
    return f"{TOOLS_INSIDE}/{name}"


def tools_of(spec: EnvironmentSpec, find: Find | None) -> tuple[Tool, ...]:
    """Finds the spec's tools on this host. Raises: AgentUnavailable: one is not here; SpecInvalid: no tool's name."""
    folders = []
    for name in dict.fromkeys(spec.tools):
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise SpecInvalid(f"expected the name of a tool, found {name!r}.")
        if find is None:
            raise AgentUnavailable(f"expected the tool {name!r} for {spec.label}, found that none can be had here.")
        folder = find(name).resolve()
        if not folder.is_dir():
            raise AgentUnavailable(f"expected the tool {name!r} in {folder}, found no such folder; install it again.")
        folders.append(Tool(name, folder))
    return tuple(folders)


def versions(tools: tuple[Tool, ...]) -> dict[str, str]:
    """Returns each tool's folder name by its name: another folder is another version."""
    return {tool.name: tool.folder.name for tool in tools}


def archived(tool: Tool, folder: str = "/") -> Iterator[bytes]:
    """Yields a tar of the tool, at its path below `folder` inside, in pieces: bundles are too large for memory."""
    place = str(PurePosixPath(tool.target).relative_to(folder))
    reading, writing = os.pipe()
    failures: list[Exception] = []

    def write() -> None:
        try:
            with open(writing, "wb") as sink, tarfile.open(fileobj=sink, mode="w|") as tar:
                for name in ("/".join(part) for part in _parents(place)):
                    parent = tarfile.TarInfo(name)
                    parent.type, parent.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(parent, io.BytesIO())
                tar.add(tool.folder, place, filter=_as_roots)
        except (OSError, tarfile.TarError) as error:
            failures.append(error)

    thread = threading.Thread(target=write, name="tool-archive", daemon=True)
    thread.start()
    with open(reading, "rb") as source:
        while piece := source.read(_PIECE):
            yield piece
    thread.join()
    if failures:
        raise EnvironmentFailed(f"the tool {tool.name!r} cannot be read: {failures[0]}.") from failures[0]


def _parents(target: str) -> Iterator[list[str]]:
    parts = target.strip("/").split("/")
    yield from (parts[:depth] for depth in range(1, len(parts)))


def _as_roots(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode &= ~0o222  # root inside can still write where there is no mount
    return member
