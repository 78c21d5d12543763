"""Environments without isolation: one folder of this host in which commands run as this user.

Absolute paths given to `put`, `get`, `put_tree` and `cwd` are relative to the environment's folder. Commands see the
host as it is, and find their folders in WORKDIR, TESTS_DIR, LOGS_DIR and SOLUTION_DIR.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import structlog

from app.environments.contract import (
    Forward,
    ResetProof,
    Serve,
    Tags,
    Times,
)
from app.environments.networks.forwarding import forward_here
from app.environments.prebuilt import binary
from app.environments.runtimes.local.processes import (
    ENVIRONMENT,
    OWNER,
    HostSession,
    copy_tree,
    remove_environment,
)
from app.environments.runtimes.session_environment import SessionEnvironment, ended_on_error
from app.environments.runtimes.setup import HostProvider, carry_out
from app.environments.tools import tools_of
from app.errors import EnvironmentFailed, ImageBuildFailed, ImageUnavailable, SpecInvalid
from app.host import archives
from app.host.disk import disk_named
from app.host.slots import turn
from app.images.build_sources import fetch_sources
from app.images.pull_source import PullSource, tell
from app.models.instance import MARK
from app.models.spec import Build, EnvironmentSpec, Reuse

log = structlog.get_logger()

_FOLDERS = {"TESTS_DIR": "tests", "LOGS_DIR": "logs", "SOLUTION_DIR": "solution"}


class LocalEnvironment(SessionEnvironment):
    """A folder, `root`, with everything in it."""

    def __init__(self, folder: Path, spec: EnvironmentSpec, times: Times | None = None) -> None:
        """folder: `local/ID` of a home."""
        super().__init__(spec, times or Times())
        self._folder = folder
        self.root = folder / "root"
        self._opened: HostSession | None = None
        self._forwards_lock = threading.Lock()

    @property
    def id(self) -> str:
        return self._folder.name

    def start(self, program: Path) -> None:
        """Opens its session by this helper; the folder exists. Raises: EnvironmentFailed."""
        self._session = self._opened = HostSession(
            program,
            self._folder,
            {**_variables(self.root, self._spec), ENVIRONMENT: self.id},
            cwd=self._spec.workdir,
            within=self._below,
        )

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "local",
            "id": self.id,
            "image": self._spec.label,
            "origin": "fresh",
            "isolation": "no isolation: a folder and processes of this host",
            **self.times.describe(),
        }

    def forward(self, port: int, serve: Serve) -> Forward:
        """Forwards a port of this host's own loopback: every process of this host can reach it."""
        with self._forwards_lock:
            self._raise_if_gone()
            port_forward = forward_here(port, serve)
            self._forwards.add(port_forward)
            return port_forward

    def _reset_files(self) -> ResetProof:
        """Is never clean: commands may have written anywhere on the host, and a new folder costs little."""
        return ResetProof(clean=False, left=("without isolation nothing can be proven",))

    def _destroy(self) -> None:
        with self._teardown():
            with self._forwards_lock:
                self._close_ports()
            if self._opened is not None:
                self._opened.close()
            remove_environment(self._folder)

    def _below(self, path: str) -> Path:
        """Returns where an absolute path of the task lies; a path already below the root is unchanged."""
        clean = archives.absolute(path)
        if Path(clean).is_relative_to(self.root):
            return Path(clean)
        return self.root / clean.lstrip("/")

    def _how_it_ended(self) -> str:
        return ""

    def _raise_if_gone(self) -> None:
        super()._raise_if_gone()
        if not self.root.is_dir():
            raise EnvironmentFailed(f"environment {self.id} was destroyed.")


class LocalProvider(HostProvider):
    """Makes folders under `home`/local."""

    def tool_versions(self, spec: EnvironmentSpec) -> dict[str, str]:
        """Returns nothing: commands see tools where they are."""
        return {}

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        """Prepares the tree of a build context: its `setup.sh` runs once, in a folder that is copied from then on."""
        _refuse_shared(spec)
        if spec.build is None:
            raise ImageUnavailable(
                f"expected a build context with a setup.sh, found the image {spec.image}: a local environment cannot "
                "run images. Install a container engine (`megaflow doctor` says how), or use a task with a setup.sh."
            )
        deadline = time.monotonic() + min(timeout_s, spec.build.timeout_s)
        tree = self._tree(spec)
        try:
            with turn(self._settings.home / "run" / "slots" / f"local-{tree.name}", timeout_s=timeout_s):
                if not tree.is_dir():
                    tell(PullSource.BUILD)
                    self._prepare(spec, spec.build, tree, deadline)
        except TimeoutError as error:
            raise ImageUnavailable(f"{spec.label} was not prepared in time by another process: {error}.") from error
        return f"local:{tree.name}"

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> LocalEnvironment:
        """Creates a copy of the prepared tree and runs the set-up commands in it."""
        tools_of(spec, self._find)  # commands see them where they are
        deadline, times = time.monotonic() + timeout_s, Times()
        with times.measure("image"):
            self.prepare_image(spec, timeout_s=timeout_s)
        folder = self._settings.home / "local" / uuid.uuid4().hex[:16]
        environment = LocalEnvironment(folder, spec, times)
        place, measure = self.start_slot(self._settings.host(), deadline - time.monotonic()), times.measure
        with ended_on_error(environment), disk_named("make an environment"), place, measure("create"):
            folder.mkdir(parents=True)
            owner = {"megaflow": tags.installation, "labels": tags.labels(), "pid": os.getpid()}
            (folder / OWNER).write_text(json.dumps(owner))
            copy_tree(self._tree(spec), environment.root, deadline)
            environment.start(binary(self._settings.home))
        with ended_on_error(environment), measure("set_up"):
            carry_out(spec.setup, environment, deadline)
        log.info("environment.created", environment=environment.id, image=spec.label, kind="local")
        return environment

    def _tree(self, spec: EnvironmentSpec) -> Path:
        digest = spec.build.context.sha256 if spec.build else ""
        name = hashlib.sha256(f"{digest}\0{spec.workdir}".encode()).hexdigest()[:24]
        return self._settings.home / "cache" / "local" / name

    def _prepare(self, spec: EnvironmentSpec, build: Build, tree: Path, deadline: float) -> None:
        tree.parent.mkdir(parents=True, exist_ok=True)
        with (
            disk_named(f"prepare {spec.label}"),
            tempfile.TemporaryDirectory(dir=tree.parent, prefix="making-") as name,
        ):
            context, root = Path(name) / "context", Path(name) / "root"
            archives.unpack(self._fetch_bundle(build.context), context)
            if not (context / "setup.sh").is_file():
                names = ", ".join(sorted(path.name for path in context.iterdir())) or "nothing"
                raise ImageUnavailable(
                    f"expected a setup.sh in the build context of {spec.label}, found {names}: a local environment "
                    "cannot follow a Dockerfile. Install a container engine (`megaflow doctor` says how)."
                )
            fetch_sources(context, cache=self._settings.home / "cache" / "sources")
            _make_folders(root, spec)
            _run_recipe(spec, context, root, binary(self._settings.home), deadline)
            os.replace(root, tree)


def _refuse_shared(spec: EnvironmentSpec) -> None:
    if spec.reuse is Reuse.SHARED_READONLY:
        raise SpecInvalid(
            "expected `reuse` fresh or recycled, found shared-readonly: a local environment is a folder that its"
            " commands may write to, and so cannot be shared. Use the kind `docker`, or `reuse: fresh`."
        )


def _run_recipe(spec: EnvironmentSpec, context: Path, root: Path, program: Path, deadline: float) -> None:
    session = HostSession(program, context.parent, _variables(root, spec), cwd=str(context))
    try:
        left_s = max(0.1, deadline - time.monotonic())
        result = session.run(["/bin/sh", str(context / "setup.sh")], timeout_s=left_s)
    finally:
        session.close()
    if not result.ok:
        how = "took longer than its time" if result.timed_out else f"left with {result.exit_code}"
        raise ImageBuildFailed(f"setup.sh of {spec.label} {how}; its output ends:\n{result.text()[-3000:]}")


def _variables(root: Path, spec: EnvironmentSpec) -> dict[str, str]:
    """Returns the whole environment of a command: small, without the worker's variables except its instance's mark.

    By that mark, the launcher of a killed worker ends at once what the worker left running.
    """
    marks = {MARK: os.environ[MARK]} if MARK in os.environ else {}
    folders = {name: str(root / folder) for name, folder in _FOLDERS.items()}
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(root / "root"),
        "TMPDIR": str(root / "tmp"),
        "LANG": "C.UTF-8",
        "WORKDIR": str(root / spec.workdir.lstrip("/")),
        **folders,
        "MEGAFLOW_ROOT": str(root),
        **spec.env,
        **marks,
    }


def _make_folders(root: Path, spec: EnvironmentSpec) -> None:
    for name in (*_FOLDERS.values(), "root", "tmp", spec.workdir.lstrip("/")):
        (root / name).mkdir(parents=True, exist_ok=True)
