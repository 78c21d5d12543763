"""One environment's files, limits and processes: started, stopped, ended. Talking to it is the session's affair."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import structlog

from app.environments.disk import disk_named
from app.environments.oci import kernel, namespace, overlay, trees
from app.environments.oci.cgroups import Cgroup
from app.environments.oci.records import Records
from app.environments.oci.runtime import Launch, Runtime, runtime_of
from app.environments.oci.specification import Plan, configuration
from app.environments.oci.store import ImageStore, StoredImage
from app.environments.oci.system_layer import stacked, system_layer
from app.environments.oci.users import Users, pool
from app.environments.tools import Tool
from app.errors import EnvironmentFailed, ImageUnavailable
from app.models.spec import Resources

log = structlog.get_logger()

_END_S = 20.0
"""The kernel may take long over a process in the middle of a disk's work."""
_START_S = 60.0
"""The longest that a runtime may take, whatever else the task allows: it takes milliseconds."""
_BACKLOG = 128


@dataclass(frozen=True)
class Site:
    """What all environments of one home share."""

    home: Path
    records: Records
    store: ImageStore
    runtime: Runtime
    system: str  # the layer above every image
    users_apart: bool = True  # users inside are nobody out here
    helper: Path = Path("/nonexistent")  # the session's; not needed to end an environment

    @classmethod
    def of(cls, home: Path, runtime: Runtime, helper: Path, *, users_apart: bool) -> Site:
        """Raises: DiskFull."""
        store = ImageStore(home)
        for place in (home / "environments", home / "images"):  # programs in them run as their owners, root too
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(0o700)
        return cls(home, Records(home), store, runtime, system_layer(store, helper), users_apart, helper)

    @cached_property
    def stage(self) -> namespace.Stage:
        """Where file systems are mounted: one place for all, since each start sees only its own."""
        return namespace.Stage.beside(self.home)


@dataclass(frozen=True)
class Wish:
    """How an environment is to be started."""

    image: StoredImage
    resources: Resources
    env: Mapping[str, str]
    workdir: str
    read_only: bool = False
    needs_shell: bool = True  # what runs commands
    deadline: float = math.inf  # monotonic; of the runtime, which may hang for as long as it likes
    tools: tuple[Tool, ...] = ()  # what it sees of this host, read-only


class Body:
    """The environment of a record, which must have been written before."""

    def __init__(self, site: Site, identity: str) -> None:
        self._site = site
        self.id = identity
        self.folder = site.records.place(identity)
        self.cgroup = Cgroup(identity)
        self._users: Users | None = None

    @property
    def upper(self) -> Path:
        """What was written, as overlayfs keeps it."""
        return self.folder / "upper"

    @property
    def _work(self) -> Path:
        return self.folder / "work"

    @property
    def _configuration(self) -> Path:
        return self.folder / "config.json"

    @property
    def _launch(self) -> Launch:
        stage = self._site.stage
        return Launch(self.id, self.folder, stage.state, stage.nothing)

    @property
    def address(self) -> Path:
        """Where its helper listens."""
        return self.folder / "s"

    @property
    def pid(self) -> int | None:
        """Its first process by this host's numbers."""
        with suppress(OSError, ValueError):
            return int(self._launch.pid.read_text())
        return None

    @property
    def lives(self) -> bool:
        """Whether its first process runs: with it everything would have ended."""
        first = self.pid
        return first is not None and first in self.cgroup.processes()

    def processes(self) -> list[int]:
        """What runs in it but for the session's helper, by this host's numbers."""
        first = self.pid
        helper = None if first is None else _program(first)
        return [pid for pid in self.cgroup.processes() if _program(pid) not in (helper, None)]

    # --- Start ----------------------------------------------------------------------------------------------------

    def start(self, wish: Wish) -> None:
        """Start it with an empty layer of its own; connections are taken from now on.

        Raises: EnvironmentFailed, ImageUnavailable: it has no shell; DiskFull.
        """
        with disk_named(f"start environment {self.id[:12]}"):
            try:
                self._start(wish)
            except OSError as error:
                raise EnvironmentFailed(f"environment {self.id[:12]} could not be started: {error}") from error

    def _start(self, wish: Wish) -> None:
        self.upper.mkdir()
        self._work.mkdir()
        self._users = pool().take(self._site.helper) if self._site.users_apart else None
        self._write_configuration(wish)
        self.cgroup.make(wish.resources, self._site.runtime.devices)
        layers = [self._site.store.layers / name for name in stacked(self._site.system, wish.image.layers)]
        libraries = self._site.runtime.libraries
        with self._listening() as listening:
            namespace.apart(
                lambda: self._born(wish, layers, listening, libraries), needs=self._site.home, stage=self._site.stage
            )

    def _born(self, wish: Wish, layers: list[Path], listening: socket.socket, libraries: Path | None) -> None:
        """In a thread whose mounts and limits are the environment's."""
        stage, users = self._site.stage, self._users
        if users is None:
            overlay.mount(layers, self.upper, self._work, stage.root)
        else:
            kernel.mount_for(users.namespace, str(self._site.store.layers), str(stage.layers))
            kernel.mount_for(users.namespace, str(self.folder), str(stage.own))
            mapped = [stage.layers / layer.name for layer in layers]
            overlay.mount(mapped, stage.own / self.upper.name, stage.own / self._work.name, stage.root)
        handle = os.open(stage.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if wish.needs_shell:
                _raise_without_shell(handle, wish.image.id)
            owner = users.first if users else 0
            kernel.make_folders_inside(handle, wish.workdir, owner=owner)
            for tool in wish.tools:
                self._show(tool, handle, owner)
        finally:
            os.close(handle)
        with self.cgroup.joined() as prefix:
            left_s = min(_START_S, wish.deadline - time.monotonic())
            self._site.runtime.start(self._launch, listening, prefix, libraries=libraries, timeout_s=left_s)

    def _show(self, tool: Tool, root: int, owner: int) -> None:
        """Mount a tool, so that the runtime finds it as a part of the file system: nobody inside can undo that.

        Raises: OSError, EnvironmentFailed.
        """
        if tool.folder.is_relative_to(self._site.stage.place):
            raise EnvironmentFailed(
                f"expected the tool {tool.name!r} outside of {self._site.stage.place}, which is covered where "
                f"environments are made, found {tool.folder}; move the folder of tools, or use `docker`."
            )
        kernel.make_folders_inside(root, tool.target, owner=owner)
        place = kernel.open_inside(root, tool.target, os.O_PATH | os.O_DIRECTORY)
        try:
            kernel.show(
                str(tool.folder), place, self._users.namespace if self._users else None, by=str(self._site.stage.tool)
            )
        finally:
            os.close(place)

    def _listening(self) -> socket.socket:
        """The socket that the helper inherits: reachable by its name out here, nameless inside."""
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found.bind(f"/proc/self/fd/{folder}/{self.address.name}")  # a socket's name has 107 bytes at most
            os.chmod(self.address, 0o600)
            found.listen(_BACKLOG)
        except BaseException:
            found.close()
            raise
        finally:
            os.close(folder)
        return found

    def _write_configuration(self, wish: Wish) -> None:
        annotations, rules = self._site.runtime.seccomp()
        plan = Plan(
            root=self._site.stage.root,
            env={**wish.image.env, **wish.env},
            cgroup_mounts=self.cgroup.mounts(),
            annotations=annotations,
            seccomp=rules,
            cgroup=self._site.runtime.cgroup(self.id),
            read_only=wish.read_only,
            users=self._users.first if self._users else None,
        )
        self._configuration.write_text(json.dumps(configuration(plan)))

    # --- End ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Kill everything, leaving the files; done when nothing runs. Safe to call twice.

        Raises: EnvironmentFailed: something would not die.
        """
        first = self.pid
        if not self.cgroup.end(timeout_s=_END_S):
            raise EnvironmentFailed(f"environment {self.id[:12]} would not die within {_END_S:.0f} s.")
        if first is not None:
            with suppress(ChildProcessError):  # ours only where nobody else adopts orphans
                os.waitpid(first, os.WNOHANG)
        if self._users is not None:
            pool().give_back(self._users)
            self._users = None

    def wipe(self) -> int:
        """Remove all files of a stopped environment; how many it had written."""
        count = trees.remove(self.upper)
        trees.remove(self._work)
        for file in (self._configuration, self._launch.log, self._launch.pid, self.address):
            with suppress(FileNotFoundError):
                os.unlink(file)
        return count

    def end(self) -> None:
        """Stop and remove everything, the record last. Safe to call twice, from any process.

        Raises: EnvironmentFailed: something would not die, or go; its record stays for the sweeper.
        """
        self.stop()
        try:
            self.wipe()
            self._site.records.remove(self.id)
        except OSError as error:
            if self.folder.exists():
                raise EnvironmentFailed(f"the files of environment {self.id[:12]} would not go: {error}") from error


def end(home: Path, identity: str) -> None:
    """End an environment by its id alone, whichever process made it, also where none could be made now.

    Raises: EnvironmentFailed: something would not die, or go.
    """
    runtime = runtime_of(home) or Runtime("none", Path("/nonexistent"), home / "cache" / "oci")
    Body(Site(home, Records(home), ImageStore(home), runtime, ""), identity).end()


def _raise_without_shell(root: int, image_id: str) -> None:
    try:
        os.close(kernel.open_inside(root, "bin/sh", os.O_PATH))
    except (FileNotFoundError, NotADirectoryError):
        raise ImageUnavailable(
            f"image {image_id} has no /bin/sh, which every command needs; use an image with a shell."
        ) from None


def _program(pid: int) -> tuple[int, int] | None:
    """Which file a process runs; None when it has just ended."""
    try:
        found = os.stat(f"/proc/{pid}/exe")
    except OSError:
        return None
    return found.st_dev, found.st_ino
