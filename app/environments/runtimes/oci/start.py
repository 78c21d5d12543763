"""Starting an environment by an OCI runtime: in a thread whose mounts and limits are the environment's."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from app.environments.runtimes.oci import overlay
from app.environments.runtimes.oci.runtime import Launch, Runtime
from app.environments.runtimes.oci.specification import Plan, configuration
from app.environments.runtimes.oci.start_request import NEEDED, Birth, Lacking
from app.environments.tools import Tool
from app.host import kernel, mount_namespace
from app.host.mount_namespace import MountStage


@dataclass(frozen=True)
class ByRuntime:
    """Starts environments in folders of `home`."""

    runtime: Runtime
    home: Path
    stage: MountStage

    def start(self, birth: Birth, listening: socket.socket, *, timeout_s: float) -> None:
        """Start an environment; its first process inherits `listening`. Returns when that runs.

        Raises: OSError; Lacking; EnvironmentFailed.
        """
        birth.place.upper.mkdir()
        birth.place.work.mkdir()
        self._configure(birth)
        birth.cgroup.make(birth.wish.resources, self.runtime.devices)
        mount_namespace.apart(lambda: self._born(birth, listening, timeout_s), needs=self.home, stage=self.stage)

    def _configure(self, birth: Birth) -> None:
        annotations, rules = self.runtime.seccomp()
        plan = Plan(
            root=self.stage.root,
            env=birth.env,
            cgroup_mounts=birth.cgroup.mounts(),
            annotations=annotations,
            seccomp=rules,
            cgroup=self.runtime.cgroup(birth.name),
            read_only=birth.wish.read_only,
            users=birth.users.first if birth.users else None,
        )
        birth.place.configuration.write_text(json.dumps(configuration(plan)))

    def _born(self, birth: Birth, listening: socket.socket, timeout_s: float) -> None:
        stage, users, wish = self.stage, birth.users, birth.wish
        if users is None:
            overlay.mount(birth.layers, birth.place.upper, birth.place.work, stage.root)
        else:
            kernel.mount_for(users.namespace, str(birth.layers[0].parent), str(stage.layers))
            kernel.mount_for(users.namespace, str(birth.place.folder), str(stage.own))
            mapped = [stage.layers / layer.name for layer in birth.layers]
            overlay.mount(mapped, stage.own / birth.place.upper.name, stage.own / birth.place.work.name, stage.root)
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
        """Mount a tool, so that the runtime finds it as a part of the file system. Raises: OSError."""
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
        raise Lacking(path) from None
