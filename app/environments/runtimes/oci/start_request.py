"""What an environment is started from, whoever starts it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.environments.isolation.users import Users
from app.environments.tools import Tool
from app.host.cgroups import Cgroup
from app.images.layer_store import StoredImage
from app.models.spec import Resources

NEEDED = "bin/sh"
"""In every image: what runs commands."""


class Lacking(Exception):
    """The image has not what every environment needs."""


@dataclass(frozen=True)
class Wish:
    """How an environment is to be started."""

    image: StoredImage
    resources: Resources
    env: Mapping[str, str]
    workdir: str
    read_only: bool = False
    needs_shell: bool = True
    deadline: float = math.inf  # monotonic; of whoever starts it, which may hang for as long as it likes
    tools: tuple[Tool, ...] = ()  # what it sees of this host, read-only


@dataclass(frozen=True)
class Place:
    """What is where in an environment's own folder."""

    folder: Path

    @property
    def upper(self) -> Path:
        """What was written, as overlayfs keeps it."""
        return self.folder / "upper"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def address(self) -> Path:
        """Where its helper listens."""
        return self.folder / "s"

    @property
    def pid(self) -> Path:
        """The file for the number of the first process."""
        return self.folder / "pid"

    @property
    def configuration(self) -> Path:
        """What a runtime reads."""
        return self.folder / "config.json"

    @property
    def log(self) -> Path:
        """What a runtime says."""
        return self.folder / "runtime.log"


@dataclass(frozen=True)
class Birth:
    """One environment on its way: what it is to be, and where its parts are."""

    name: str
    wish: Wish
    place: Place
    layers: Sequence[Path]  # topmost first, in one folder
    cgroup: Cgroup
    users: Users | None  # None: those of this host

    @property
    def env(self) -> dict[str, str]:
        """The image's, then the task's."""
        return {**self.wish.image.env, **self.wish.env}
