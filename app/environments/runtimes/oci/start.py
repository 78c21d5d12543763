"""Starts an OCI environment from a thread with its own mounts and limits."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.environments.isolation.users import Users
from app.environments.runtimes.oci.runtime import EnvironmentFolder, Launch, Runtime
from app.environments.runtimes.oci.specification import ConfigOptions, configuration
from app.environments.tools import Tool
from app.host import kernel, mount_namespace
from app.host.cgroups import Cgroup
from app.host.mount_namespace import MountStage
from app.images.layer_store import StoredImage
from app.models.spec import Resources

NEEDED = "bin/sh"
"""In every image: what runs commands."""


class ProgramMissing(Exception):
    """The image has not what every environment needs."""


@dataclass(frozen=True)
class StartOptions:
    """How an environment is to be started."""

    image: StoredImage
    resources: Resources
    env: Mapping[str, str]
    workdir: str
    read_only: bool = False
    needs_shell: bool = True
    deadline: float = math.inf  # monotonic; a start may hang
    tools: tuple[Tool, ...] = ()  # what it sees of this host, read-only


@dataclass(frozen=True)
class StartRequest:
    """One environment on its way: what it is to be, and where its parts are."""

    name: str
    wish: StartOptions
    place: EnvironmentFolder
    layers: Sequence[Path]  # topmost first, in one folder
    cgroup: Cgroup
    users: Users | None  # None: those of this host

    @property
    def env(self) -> dict[str, str]:
        """The image's, then the task's."""
        return {**self.wish.image.env, **self.wish.env}


@dataclass(frozen=True)
class Starter:
    """Starts environments in folders of `home`."""

    runtime: Runtime
    home: Path
    stage: MountStage

    def start(self, birth: StartRequest, listening: socket.socket, *, timeout_s: float) -> None:
        """Start an environment; its first process inherits `listening`. Returns when that runs.

        Raises: OSError; ProgramMissing; EnvironmentFailed.
        """
        birth.place.upper.mkdir(exist_ok=True)  # started again, it keeps its files
        birth.place.work.mkdir()
        self._configure(birth)
        birth.cgroup.make(birth.wish.resources)
        mount_namespace.apart(lambda: self._born(birth, listening, timeout_s), needs=self.home, stage=self.stage)

    def _configure(self, birth: StartRequest) -> None:
        annotations, rules = self.runtime.seccomp()
        plan = ConfigOptions(
            root=self.stage.root,
            env=birth.env,
            cgroup_mounts=birth.cgroup.mounts(),
            annotations=annotations,
            seccomp=rules,
            read_only=birth.wish.read_only,
            users=birth.users.first if birth.users else None,
        )
        birth.place.configuration.write_text(json.dumps(configuration(plan)))

    def _born(self, birth: StartRequest, listening: socket.socket, timeout_s: float) -> None:
        stage, users, wish = self.stage, birth.users, birth.wish
        if users is None:
            _mount_overlay(birth.layers, birth.place.upper, birth.place.work, stage.root)
        else:
            kernel.mount_for(users.namespace, str(birth.layers[0].parent), str(stage.layers))
            kernel.mount_for(users.namespace, str(birth.place.folder), str(stage.own))
            mapped = [stage.layers / layer.name for layer in birth.layers]
            _mount_overlay(mapped, stage.own / birth.place.upper.name, stage.own / birth.place.work.name, stage.root)
        handle = os.open(stage.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if wish.needs_shell:
                _raise_without(NEEDED, handle)
            owner = users.first if users else 0
            kernel.make_folders_inside(handle, wish.workdir, owner=owner)
            for tool in wish.tools:
                self._show(tool, handle, owner, users.namespace if users else None)
        finally:
            os.close(handle)
        with birth.cgroup.joined() as prefix:
            launch = Launch(birth.name, birth.place, stage.state, stage.nothing)
            self.runtime.start(launch, listening, prefix, timeout_s=timeout_s)

    def _show(self, tool: Tool, root: int, owner: int, users: int | None) -> None:
        kernel.make_folders_inside(root, tool.target, owner=owner)
        place = kernel.open_inside(root, tool.target, os.O_PATH | os.O_DIRECTORY)
        try:
            kernel.show(str(tool.folder), place, users, by=str(self.stage.tool))
        finally:
            os.close(place)


def _raise_without(path: str, root: int) -> None:
    try:
        os.close(kernel.open_inside(root, path, os.O_PATH))
    except (FileNotFoundError, NotADirectoryError):
        raise ProgramMissing(path) from None


_OPTIONS_LIMIT_BYTES = 4095
"""The kernel takes one page of mount options."""


def _mount_overlay(layers: Sequence[Path], upper: Path, work: Path, root: Path) -> None:
    """Mount at `root`: what is written goes to `upper`; `layers`, topmost first, stay as they are.

    Changes the calling thread's working folder, so that 127 layers fit into the kernel's page of options. Devices that
    an image may bring do not work.

    Raises: OSError.
    """
    os.chdir(layers[0].parent)
    told = options(layers, upper, work)
    if len(told) > _OPTIONS_LIMIT_BYTES:
        raise OSError(errno.E2BIG, f"{len(layers)} layers are more than one mount can name", str(root))
    kernel.mount("overlay", str(root), "overlay", kernel.MS_NODEV, told)


def options(layers: Sequence[Path], upper: Path, work: Path) -> str:
    """What `mount` tells the kernel, for a working folder that is the layers'.

    `volatile` spares syncs to disk: an environment does not outlive its host's power. Known since kernel 5.10.
    """
    base = layers[0].parent
    lower = ":".join(os.path.relpath(layer, base) for layer in layers)
    return f"lowerdir={lower},upperdir={os.path.relpath(upper, base)},workdir={os.path.relpath(work, base)},volatile"
