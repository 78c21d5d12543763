"""Agent frameworks that run inside: folders of this host, mounted read-only.

A provider gets a function that finds a tool's folder by name (`Find`). The agents decide what is installed where.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from app.errors import AgentUnavailable, EnvironmentFailed, SpecInvalid
from app.host.disk import disk_named
from app.models.spec import TOOLS_INSIDE, EnvironmentKind, EnvironmentSpec

Find = Callable[[str], Path]
"""Returns the folder of a tool on this host, complete and unchanging. Raises: AgentUnavailable."""


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


@contextmanager
def archived(tool: Tool, folder: str = "/") -> Iterator[BinaryIO]:
    """Yields a file with a tar of the tool, at its path below `folder` inside: bundles are too large for memory.

    Raises: EnvironmentFailed: the tool cannot be read; DiskFull.
    """
    place = PurePosixPath(tool.target).relative_to(folder)
    with tempfile.TemporaryFile() as packed:
        try:
            with disk_named(f"pack the tool {tool.name!r}"), tarfile.open(fileobj=packed, mode="w") as tar:
                for name in [*reversed(place.parents)][1:]:
                    parent = tarfile.TarInfo(str(name))
                    parent.type, parent.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(parent)
                tar.add(tool.folder, str(place), filter=_as_roots)
        except (OSError, tarfile.TarError) as error:
            raise EnvironmentFailed(f"the tool {tool.name!r} cannot be read: {error}.") from error
        packed.seek(0)
        yield packed


def _as_roots(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode &= ~0o222  # root inside can still write where there is no mount
    return member
