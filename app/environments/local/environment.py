"""One folder of this host in which commands run as this user.

Absolute paths given to `put`, `get`, `put_tree` and `cwd` are taken below the environment's folder. Commands see the
host as it is, and learn from WORKDIR, TESTS_DIR, LOGS_DIR and SOLUTION_DIR where their folders are.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from app.environments import archives
from app.environments.base import CommandResult, Forward, ResetProof, Serve, Snapshot, Stats, Tags, Times
from app.environments.disk import disk_named
from app.environments.forwarding import forward_here
from app.environments.local.carrier import Carrier
from app.environments.local.folder import ENVIRONMENT, end, variables_of
from app.environments.local.snapshots import Snapshots
from app.environments.local.stream import LocalInteractive
from app.environments.processes import COMMAND, HostView, Tree, kill_tree
from app.environments.remembering import RememberingShell
from app.errors import EnvironmentFailed
from app.models.shell import Interactive, OutputLogs, StatefulShell
from app.models.spec import EnvironmentSpec

_COMMAND_LIMIT_BYTES = 100_000


class LocalEnvironment:
    """One folder, `root`, with everything in it."""

    def __init__(self, folder: Path, spec: EnvironmentSpec, times: Times | None = None) -> None:
        """folder: `local/ID` of a home."""
        self._folder = folder
        self._snapshots = Snapshots(folder.parents[1])
        self._spec = spec
        self.root = folder / "root"
        self._gone = threading.Event()
        self._forwards: list[Forward] = []
        self._forwards_lock = threading.Lock()
        self._logs: OutputLogs | None = None
        self.times = times or Times()

    @property
    def id(self) -> str:
        return self._folder.name

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "local",
            "id": self.id,
            "image": self._spec.label,
            "origin": "fresh",
            "isolation": "no isolation: a folder and processes of this host",
            **self.times.describe(),
        }

    def keep_logs(self, logs: OutputLogs | None) -> bool:
        self._logs = logs
        return True

    # --- Commands -------------------------------------------------------------------------------------------------

    def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        stdin: bytes | None = None,
    ) -> CommandResult:
        begun = time.monotonic()
        self._raise_if_gone()
        mark = uuid.uuid4().hex
        variables = self._variables(env, mark)
        folder = self._below(cwd or self._spec.workdir)
        with self._script(command) as argv:
            try:
                process = subprocess.Popen(  # noqa: S603 - running what the task says is the purpose
                    argv,
                    cwd=folder,
                    env=variables,
                    stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except (FileNotFoundError, NotADirectoryError) as error:
                self._raise_if_gone()
                return CommandResult(126, b"", f"{error}\n".encode(), False, False, time.monotonic() - begun)
            except OSError as error:
                raise EnvironmentFailed(f"no command can be started in {self.root}: {error}.") from error
            tree = Tree(mark)
            carrier = Carrier(process, stdin, lambda: kill_tree(HostView(), tree), self._gone, self._logs, command)
            code = carrier.finish(begun + timeout_s)
        self._raise_if_gone()
        return CommandResult(
            exit_code=code,
            stdout=carrier.stdout.content(),
            stderr=carrier.stderr.content(),
            timed_out=carrier.timed_out,
            truncated=carrier.stdout.truncated or carrier.stderr.truncated,
            duration_s=time.monotonic() - begun,
            logs=carrier.stdout.log_names + carrier.stderr.log_names,
        )

    def _variables(self, env: Mapping[str, str] | None, mark: str) -> dict[str, str]:
        return {**variables_of(self.root, self._spec), **(env or {}), COMMAND: mark, ENVIRONMENT: self.id}

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> StatefulShell:
        self._raise_if_gone()
        return RememberingShell(self.run, str(self._folder), cwd=cwd, env=env)

    def stream(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        tty: bool = False,
        rows: int = 24,
        columns: int = 80,
    ) -> Interactive:
        self._raise_if_gone()
        mark = uuid.uuid4().hex
        folder, variables = self._below(cwd or self._spec.workdir), self._variables(env, mark)
        return LocalInteractive(list(argv), folder, variables, mark, size=(rows, columns) if tty else None)

    @contextmanager
    def _script(self, command: str) -> Iterator[list[str]]:
        if len(command.encode()) < _COMMAND_LIMIT_BYTES:
            yield ["/bin/sh", "-c", command]
            return
        file = self._folder / f"command-{uuid.uuid4().hex}"
        file.write_text(command)
        try:
            yield ["/bin/sh", str(file)]
        finally:
            file.unlink(missing_ok=True)

    # --- Files ----------------------------------------------------------------------------------------------------

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        target = self._below(path)
        with self._files(f"write {path}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=target.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                os.chmod(name, mode)
                os.replace(name, target)
            except BaseException:
                os.unlink(name)
                raise

    def get(self, path: str) -> bytes:
        target = self._below(path)
        with self._files(f"read {path}"):
            if not target.is_file():
                raise FileNotFoundError(f"no file {path} in environment {self.id}.")
            return target.read_bytes()

    def put_tree(self, archive: bytes, path: str) -> None:
        with self._files(f"unpack into {path}"):
            archives.unpack(archive, self._below(path))

    def get_tree(self, path: str) -> bytes:
        target = self._below(path)
        with self._files(f"read {path}"):
            if not target.is_dir():
                raise FileNotFoundError(f"no folder {path} in environment {self.id}.")
            return archives.of_tree(target)

    # --- Life -----------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Only the processes can be told from the host's others."""
        self._raise_if_gone()
        table = HostView(variable=ENVIRONMENT).scan()
        return Stats(len(Tree(self.id).living(table)), None, None, None, None)

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

    def reset(self) -> ResetProof:
        """Never clean: commands may have written anywhere on the host, and a new folder costs little."""
        return ResetProof(clean=False, left=("without isolation nothing can be proven",))

    def destroy(self) -> None:
        first = not self._gone.is_set()
        self._gone.set()
        with self.times.measure("teardown") if first else nullcontext():
            with self._forwards_lock:
                ended, self._forwards = self._forwards, []
            for forward in ended:
                forward.close()
            end(self._folder)

    def _below(self, path: str) -> Path:
        """Where an absolute path of the task lies; one that is below the root already is taken as it is."""
        clean = archives.absolute(path)
        if Path(clean).is_relative_to(self.root):
            return Path(clean)
        return self.root / clean.lstrip("/")

    @contextmanager
    def _files(self, doing: str) -> Iterator[None]:
        self._raise_if_gone()
        try:
            with disk_named(f"cannot {doing}"):
                yield
        except FileNotFoundError:
            self._raise_if_gone()
            raise
        except OSError as error:
            self._raise_if_gone()
            raise EnvironmentFailed(f"cannot {doing} in {self.root}: {error}.") from error

    def _raise_if_gone(self) -> None:
        if self._gone.is_set() or not self.root.is_dir():
            raise EnvironmentFailed(f"environment {self.id} was destroyed.")
