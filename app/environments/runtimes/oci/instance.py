"""Files, limits and processes of one OCI environment: start, stop, destroy."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from app.environments.isolation.users import Users, pool
from app.environments.runtimes.oci.runtime import EnvironmentFolder, Launch, Runtime, runtime_of
from app.environments.runtimes.oci.specification import ConfigOptions, configuration
from app.environments.runtimes.oci.system_layer import HELPER, stacked, system_layer
from app.environments.session.connection import listen_in
from app.environments.tools import Tool
from app.errors import EnvironmentFailed, ImageUnfit
from app.host import kernel, layer_files, mount_namespace, trees
from app.host.cgroups import Cgroup
from app.host.disk import DiskUsage, disk_named
from app.host.environment_records import Records
from app.images.layer_store import ImageStore, StoredImage
from app.models.shell import DecideFile
from app.models.spec import Resources

_END_S = 20.0
"""Seconds to wait for an end; the kernel may take long over a process in the middle of disk work."""
_START_S = 60.0
"""Maximum seconds of a start, even if the task allows more: it takes milliseconds."""


_NEEDED = "bin/sh"
"""Required in every image: it runs commands."""


@dataclass(frozen=True)
class StartOptions:
    """Options for the start of an environment."""

    image: StoredImage
    resources: Resources
    env: Mapping[str, str]
    workdir: str
    read_only: bool = False
    needs_shell: bool = True
    deadline: float = math.inf  # monotonic; a start may hang
    tools: tuple[Tool, ...] = ()  # folders of this host that it sees, read-only


@dataclass(frozen=True)
class OciHost:
    """Shared state of all environments of one home."""

    home: Path
    records: Records
    store: ImageStore
    runtime: Runtime
    system: str  # the layer above every image
    helper: Path = Path("/nonexistent")  # the session's; not needed to end an environment

    @classmethod
    def of(cls, home: Path, runtime: Runtime, helper: Path) -> OciHost:
        """Raises: DiskFull."""
        store = ImageStore(home)
        for place in (home / "environments", home / "images"):  # programs in them run as their owners, root too
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(0o700)
        return cls(home, Records(home), store, runtime, system_layer(store, helper), helper)

    @cached_property
    def stage(self) -> mount_namespace.MountStage:
        """Mount point of file systems: one place for all, since each start sees only its own."""
        return mount_namespace.MountStage.beside(self.home)


class OciInstance:
    """The environment of a record, which must exist already."""

    def __init__(self, site: OciHost, identity: str) -> None:
        self._site = site
        self.id = identity
        self.place = EnvironmentFolder(site.records.place(identity))
        self.cgroup = Cgroup(identity)
        self._users: Users | None = None

    @property
    def pid(self) -> int | None:
        """First process, by this host's numbers."""
        with suppress(OSError, ValueError):
            return int(self.place.pid.read_text())
        return None

    @property
    def started_by(self) -> str:
        """The runtime and its version."""
        return self._site.runtime.version

    @property
    def lives(self) -> bool:
        """Whether its first process runs; when that ends, everything ends."""
        first = self.pid
        return first is not None and first in self.cgroup.processes()

    def processes(self) -> list[int]:
        """Returns its processes without the session's helper, by this host's numbers."""
        first = self.pid
        helper = None if first is None else _program(first)
        return [pid for pid in self.cgroup.processes() if _program(pid) not in (helper, None)]

    def start(self, wish: StartOptions) -> None:
        """Starts it with an empty layer of its own. Raises: EnvironmentFailed, ImageUnfit: no shell in it; DiskFull."""
        try:
            with disk_named(f"start environment {self.id[:12]}"):
                self._start(wish)
        except (OSError, ValueError) as error:
            raise EnvironmentFailed(f"environment {self.id[:12]} could not be started: {error}") from error

    def _start(self, wish: StartOptions) -> None:
        site, place = self._site, self.place
        self._users = users = pool().acquire(site.helper)
        self._raise_if_covered(wish)
        timeout_s = min(_START_S, wish.deadline - time.monotonic())
        with listen_in(place.folder, place.address.name) as listening:  # reachable from outside, no path inside
            place.upper.mkdir(exist_ok=True)  # a restart keeps its files
            place.work.mkdir()
            self._configure(wish, users.first)
            self.cgroup.make(wish.resources)
            mount_namespace.apart(
                lambda: self._born(wish, users, listening, timeout_s), needs=site.home, stage=site.stage
            )

    def _configure(self, wish: StartOptions, first_user: int) -> None:
        annotations, rules = self._site.runtime.seccomp()
        plan = ConfigOptions(
            root=self._site.stage.root,
            env={**wish.image.env, **wish.env},
            cgroup_mounts=self.cgroup.mounts(),
            annotations=annotations,
            seccomp=rules,
            read_only=wish.read_only,
            users=first_user,
        )
        self.place.configuration.write_text(json.dumps(configuration(plan)))

    def _born(self, wish: StartOptions, users: Users, listening: socket.socket, timeout_s: float) -> None:
        site, place, stage = self._site, self.place, self._site.stage
        layers = [site.store.layers / name for name in stacked(site.system, wish.image.layers)]
        kernel.mount_for(users.namespace, str(layers[0].parent), str(stage.layers))
        kernel.mount_for(users.namespace, str(place.folder), str(stage.own))
        mapped = [stage.layers / layer.name for layer in layers]
        _mount_overlay(mapped, stage.own / place.upper.name, stage.own / place.work.name, stage.root)
        handle = os.open(stage.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if wish.needs_shell:
                _refuse_without_shell(wish.image.id, handle)
            kernel.make_folders_inside(handle, wish.workdir, owner=users.first)
            for tool in wish.tools:
                self._show(tool, handle, users)
        finally:
            os.close(handle)
        with self.cgroup.joined() as prefix:
            launch = Launch(self.id, place, stage.state, stage.nothing)
            site.runtime.start(launch, listening, prefix, timeout_s=timeout_s)

    def _show(self, tool: Tool, root: int, users: Users) -> None:
        kernel.make_folders_inside(root, tool.target, owner=users.first)
        place = kernel.open_inside(root, tool.target, os.O_PATH | os.O_DIRECTORY)
        try:
            kernel.show(str(tool.folder), place, users.namespace)
        finally:
            os.close(place)

    def _raise_if_covered(self, wish: StartOptions) -> None:
        stage = self._site.stage.place
        for tool in wish.tools:
            if tool.folder.is_relative_to(stage):
                raise EnvironmentFailed(
                    f"expected the tool {tool.name!r} outside of {stage}, which is covered where environments are "
                    f"made, found {tool.folder}; move the folder of tools, or use `docker`."
                )

    def stop(self) -> None:
        """Kills everything, keeps the files. Safe to call twice. Raises: EnvironmentFailed: a process did not end."""
        first = self.pid
        if not self.cgroup.end(timeout_s=_END_S):
            raise EnvironmentFailed(f"environment {self.id[:12]} would not die within {_END_S:.0f} s.")
        if first is not None:
            with suppress(ChildProcessError):  # our child only where no other process adopts orphans
                os.waitpid(first, os.WNOHANG)
        if self._users is not None:
            pool().release(self._users)
            self._users = None

    def wipe(self) -> int:
        """Removes all files of a stopped environment; returns how many it had written."""
        count = trees.remove(self.place.upper)
        self.clear()
        return count

    def clear(self) -> None:
        """Removes what the start of a stopped environment made, and keeps the files that it has written."""
        place = self.place
        trees.remove(place.work)
        for file in (place.configuration, place.log, place.pid, place.address):
            with suppress(FileNotFoundError):
                os.unlink(file)

    def put_back(
        self, layers: Sequence[str], decide: DecideFile, since_ns: int
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Calls `layer_files.put_back` for a stopped environment, with the layers of its image, bottom first."""
        lower = [self._site.store.layers / name for name in stacked(self._site.system, layers)]
        with suppress(FileNotFoundError):
            os.unlink(self.place.upper / HELPER)  # our first process: removes a file that was put over it
        return layer_files.put_back(self.place.upper, lower, decide, since_ns=since_ns)

    def end(self) -> None:
        """Ends it and removes all, the record last. Safe to call twice. Raises: EnvironmentFailed: sweeper retries."""
        self.stop()
        try:
            self.wipe()
            self._site.records.remove(self.id)
        except OSError as error:
            if self.place.folder.exists():
                raise EnvironmentFailed(f"the files of environment {self.id[:12]} would not go: {error}") from error


def usage_of(identity: str, folder: Path) -> DiskUsage:
    """Returns the disk usage of an environment beyond its image, including the files it was given. Raises: OSError."""
    return DiskUsage.added([DiskUsage.of(folder), DiskUsage.held(Cgroup(identity).processes(), folder)])


def end(home: Path, identity: str) -> None:
    """Ends an environment by its id alone, from any process. Raises: EnvironmentFailed: something remains."""
    runtime = runtime_of() or Runtime(Path("/nonexistent"))
    OciInstance(OciHost(home, Records(home), ImageStore(home), runtime, ""), identity).end()


def _program(pid: int) -> tuple[int, int] | None:
    try:
        status = os.stat(f"/proc/{pid}/exe")
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _refuse_without_shell(image_id: str, root: int) -> None:
    try:
        os.close(kernel.open_inside(root, _NEEDED, os.O_PATH))
    except (FileNotFoundError, NotADirectoryError):
        raise ImageUnfit(
            f"image {image_id} has no /{_NEEDED}, which every command needs; use an image with a shell."
        ) from None


_OPTIONS_LIMIT_BYTES = 4095
"""Maximum length of mount options: the kernel takes one page."""


def _mount_overlay(layers: Sequence[Path], upper: Path, work: Path, root: Path) -> None:
    """Mounts at `root`: writes go to `upper`; `layers`, topmost first, stay unchanged.

    Changes the calling thread's working folder, so that 127 layers fit into the kernel's page of options. Device files
    that an image may contain do not work.

    Raises: OSError.
    """
    os.chdir(layers[0].parent)
    data = options(layers, upper, work)
    if len(data) > _OPTIONS_LIMIT_BYTES:
        raise OSError(errno.E2BIG, f"{len(layers)} layers are more than one mount can name", str(root))
    kernel.mount("overlay", str(root), "overlay", kernel.MS_NODEV, data)


def options(layers: Sequence[Path], upper: Path, work: Path) -> str:
    """Returns mount options, relative to the layers' folder; `volatile` (Linux 5.10) avoids syncs to disk."""
    base = layers[0].parent
    lower = ":".join(os.path.relpath(layer, base) for layer in layers)
    return f"lowerdir={lower},upperdir={os.path.relpath(upper, base)},workdir={os.path.relpath(work, base)},volatile"
