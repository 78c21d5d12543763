"""One folder of this host in which commands run as this user.

Absolute paths given to `put`, `get`, `put_tree` and `cwd` are taken below the environment's folder. Commands see the
host as it is, and learn from WORKDIR, TESTS_DIR, LOGS_DIR and SOLUTION_DIR where their folders are.
"""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from app.environments.contract import Forward, ResetProof, Serve, Snapshot, Tags, Times
from app.environments.networks.forwarding import forward_here
from app.environments.runtimes.local.folder import ENVIRONMENT, end, variables_of
from app.environments.runtimes.local.processes import living
from app.environments.runtimes.local.session import HostSession
from app.environments.runtimes.local.snapshots import Snapshots
from app.environments.runtimes.session_environment import SessionEnvironment
from app.errors import EnvironmentFailed
from app.host import archives
from app.models.spec import EnvironmentSpec


class LocalEnvironment(SessionEnvironment):
    """One folder, `root`, with everything in it."""

    def __init__(self, folder: Path, spec: EnvironmentSpec, times: Times | None = None) -> None:
        """folder: `local/ID` of a home."""
        super().__init__(spec)
        self._folder = folder
        self._snapshots = Snapshots(folder.parents[1])
        self.root = folder / "root"
        self._opened: HostSession | None = None
        self._forwards: list[Forward] = []
        self._forwards_lock = threading.Lock()
        self.times = times or Times()

    @property
    def id(self) -> str:
        return self._folder.name

    def start(self, program: Path) -> None:
        """Open its session by this helper; the folder is there. Raises: EnvironmentFailed."""
        self._session = self._opened = HostSession(
            program,
            self._folder,
            {**variables_of(self.root, self._spec), ENVIRONMENT: self.id},
            cwd=self._spec.workdir,
            within=self._below,
            count=lambda: sum(not _runs(pid, program) for pid in living(ENVIRONMENT, self.id)),
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
        """A port of this host's own loopback: whoever is on this host can reach it, as everything in here."""
        with self._forwards_lock:
            self._raise_if_gone()
            self._forwards.append(forward_here(port, serve))
            return self._forwards[-1]

    def snapshot(self, tags: Tags) -> Snapshot:
        """A copy of the folder; what commands wrote elsewhere on the host is not in it."""
        self._raise_if_gone()
        try:
            found = self._snapshots.take(self.root, tags)
        except EnvironmentFailed:
            self._raise_if_gone()
            raise
        if self._gone.is_set():  # what was copied last may have been going
            self._snapshots.remove(found.id)
            self._raise_if_gone()
        return found

    def _reset(self) -> ResetProof:
        """Never clean: commands may have written anywhere on the host, and a new folder costs little."""
        return ResetProof(clean=False, left=("without isolation nothing can be proven",))

    def _destroy(self) -> None:
        first = not self._gone.is_set()
        self._gone.set()
        with self.times.measure("teardown") if first else nullcontext():
            with self._forwards_lock:
                ended, self._forwards = self._forwards, []
            for forward in ended:
                forward.close()
            if self._opened is not None:
                self._opened.close()
            end(self._folder)

    def _below(self, path: str) -> Path:
        """Where an absolute path of the task lies; one that is below the root already is taken as it is."""
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


def _runs(pid: int, program: Path) -> bool:
    """Whether it is a process of the session's own."""
    try:
        return os.path.samefile(f"/proc/{pid}/exe", program)
    except OSError:  # it has just ended
        return True
