"""Environments without isolation: a folder of this host and marked processes, for machines without an engine.

Absolute paths given to `put`, `get`, `put_tree` and `cwd` are taken below the environment's folder. Commands see the
host as it is, and learn from WORKDIR, TESTS_DIR, LOGS_DIR and SOLUTION_DIR where their folders are.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import structlog

from app.environments import archives
from app.environments.base import CommandResult, ResetProof, Stats, Tags, Times
from app.environments.capture import Capture
from app.environments.disk import disk_named, no_space
from app.environments.host_slots import Gate, HostGate, turn
from app.environments.local_stream import LocalInteractive
from app.environments.processes import COMMAND, HostView, Tree, kill_tree
from app.environments.remembering import RememberingShell
from app.environments.sources import fetch_sources
from app.errors import DiskFull, EnvironmentFailed, ImageBuildFailed, ImageUnavailable
from app.models.instance import MARK
from app.models.shell import Interactive, StatefulShell
from app.models.spec import Build, Bundle, EnvironmentSpec
from app.settings import Settings

log = structlog.get_logger()

ENVIRONMENT = "_MF_ENVIRONMENT"
"""Variable that marks every process of one environment."""
OWNER = "owner.json"
"""File beside the folder of an environment that says whose it is."""
_AFTER_END_S = 0.5
_AFTER_KILL_S = 5.0
_LOOK_S = 0.02
"""Between two looks whether the process has ended: a stream that stays open, or is closed early, does not tell."""
_COMMAND_LIMIT_BYTES = 100_000
_FOLDERS = {"TESTS_DIR": "tests", "LOGS_DIR": "logs", "SOLUTION_DIR": "solution"}


class LocalEnvironment:
    """One folder, `root`, with everything in it."""

    def __init__(self, folder: Path, spec: EnvironmentSpec) -> None:
        self._folder = folder
        self._spec = spec
        self.root = folder / "root"
        self._gone = threading.Event()
        self.times = Times()

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
            carrier = Carrier(process, stdin, lambda: kill_tree(HostView(), Tree(mark, alone=False)), self._gone)
            code = carrier.finish(begun + timeout_s)
        self._raise_if_gone()
        return CommandResult(
            exit_code=code,
            stdout=carrier.stdout.content(),
            stderr=carrier.stderr.content(),
            timed_out=carrier.timed_out,
            truncated=carrier.stdout.truncated or carrier.stderr.truncated,
            duration_s=time.monotonic() - begun,
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
        return Stats(len(Tree(self.id, alone=False).living(table, None)), None, None, None, None)

    def reset(self) -> ResetProof:
        """Never clean: commands may have written anywhere on the host, and a new folder costs little."""
        return ResetProof(clean=False, left=("without isolation nothing can be proven",))

    def destroy(self) -> None:
        first = not self._gone.is_set()
        self._gone.set()
        with self.times.measure("teardown") if first else nullcontext():
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


@dataclass
class Carrier:
    """Streams, deadline and end of one process."""

    process: subprocess.Popen[bytes]
    stdin: bytes | None
    kill: Callable[[], object]
    gone: threading.Event

    def __post_init__(self) -> None:
        self.stdout, self.stderr = Capture(), Capture()
        self.timed_out = False
        self._unsent = memoryview(self.stdin or b"")
        self._pipes = [pipe for pipe in (self.process.stdin, self.process.stdout, self.process.stderr) if pipe]

    def finish(self, deadline: float) -> int | None:
        """The exit code (128 + signal when one ended it), or None when `deadline` (monotonic) did."""
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        with selectors.DefaultSelector() as selector:
            for pipe in self._pipes:
                selector.register(pipe, selectors.EVENT_WRITE if pipe is self.process.stdin else selectors.EVENT_READ)
            self._carry(selector, deadline)
            self._leave([entry.fileobj for entry in selector.get_map().values()])
        try:
            code = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired as error:
            raise EnvironmentFailed(f"process {self.process.pid} was killed and does not end.") from error
        return None if self.timed_out else code if code >= 0 else 128 - code

    def _carry(self, selector: selectors.BaseSelector, deadline: float) -> None:
        until, ended = deadline, False
        while True:
            now = time.monotonic()
            if not ended and self.process.poll() is not None:
                ended, until = True, now + _AFTER_END_S
            if self.gone.is_set():
                self.kill()
                return
            if now >= until and not ended and not self.timed_out:
                self.timed_out, until = True, now + _AFTER_KILL_S
                self.kill()
            elif now >= until or (ended and not _reading(selector)):
                return
            for entry, _ in selector.select(_LOOK_S) if selector.get_map() else _nap():
                self._move(selector, entry.fileobj)

    def _move(self, selector: selectors.BaseSelector, pipe: Any) -> None:
        if not (self._send(pipe) if pipe is self.process.stdin else self._receive(pipe)):
            selector.unregister(pipe)
            pipe.close()

    def _send(self, pipe: Any) -> bool:
        try:
            self._unsent = self._unsent[os.write(pipe.fileno(), self._unsent[: 1 << 16]) :]
        except BlockingIOError:
            return True
        except OSError:  # it reads no more: its affair
            return False
        return bool(self._unsent)

    def _receive(self, pipe: Any) -> bool:
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        (self.stdout if pipe is self.process.stdout else self.stderr).feed(data)
        return bool(data)

    def _leave(self, pipes: list[Any]) -> None:
        """A background process may go on writing: read on and forget, else it would die of a broken pipe."""
        for pipe in pipes:
            if pipe is self.process.stdin or self.gone.is_set():
                pipe.close()
            else:
                threading.Thread(target=_drain, args=(pipe,), daemon=True).start()


class LocalProvider:
    """Makes folders under `home`/local; `gate` bounds how many at a time (None: on this host alone)."""

    def __init__(
        self, settings: Settings, *, fetch_bundle: Callable[[Bundle], bytes], gate: Gate | None = None
    ) -> None:
        self._settings = settings
        self._fetch_bundle = fetch_bundle
        self._cache = settings.home / "cache"
        self._gate = gate or HostGate(settings.home / "run" / "slots")

    def prepare_image(self, spec: EnvironmentSpec, *, timeout_s: float) -> str:
        """The prepared tree of a build context: its `setup.sh` ran once, in a folder that is copied from then on."""
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
                    self._prepare(spec, spec.build, tree, deadline)
        except TimeoutError as error:
            raise ImageUnavailable(f"{spec.label} was not prepared in time by another process: {error}.") from error
        return f"local:{tree.name}"

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> LocalEnvironment:
        deadline = time.monotonic() + timeout_s
        folder = self._settings.home / "local" / uuid.uuid4().hex[:16]
        environment = LocalEnvironment(folder, spec)
        measure = environment.times.measure
        with measure("image"):
            self.prepare_image(spec, timeout_s=timeout_s)
        limit, capacity = f"environment_starts:{socket.gethostname()}", self._settings.environment_starts
        try:
            place = self._gate.hold(limit, capacity, timeout_s=deadline - time.monotonic())
            with disk_named("make an environment"), place, measure("create"):
                folder.mkdir(parents=True)
                owner = {"megaflow": tags.installation, "labels": tags.labels(), "pid": os.getpid()}
                (folder / OWNER).write_text(json.dumps(owner))
                copy(self._tree(spec), environment.root, deadline)
            with measure("set_up"):
                self._set_up(environment, spec, deadline)
        except TimeoutError as error:
            environment.destroy()
            raise EnvironmentFailed(f"no environment could be made within {timeout_s:.0f} s: {error}.") from error
        except BaseException:
            environment.destroy()
            raise
        log.info("environment.created", environment=environment.id, image=spec.label, kind="local")
        return environment

    def sweep(self, *, installation: str, keep: Mapping[str, bool] | None = None) -> list[str]:
        removed = []
        for owner in (self._settings.home / "local").glob(f"*/{OWNER}"):
            name = owner.parent.name
            if json.loads(owner.read_text())["megaflow"] == installation and not (keep or {}).get(name, False):
                end(owner.parent)
                removed.append(name)
        return removed

    def _tree(self, spec: EnvironmentSpec) -> Path:
        digest = spec.build.context.sha256 if spec.build else ""
        name = hashlib.sha256(f"{digest}\0{spec.workdir}".encode()).hexdigest()[:24]
        return self._cache / "local" / name

    def _prepare(self, spec: EnvironmentSpec, build: Build, tree: Path, deadline: float) -> None:
        tree.parent.mkdir(parents=True, exist_ok=True)
        with (
            disk_named(f"prepare {spec.label}"),
            tempfile.TemporaryDirectory(dir=tree.parent, prefix="making-") as name,
        ):
            context, root = Path(name) / "context", Path(name) / "root"
            archives.unpack(self._fetch_bundle(build.context), context)
            if not (context / "setup.sh").is_file():
                found = ", ".join(sorted(path.name for path in context.iterdir())) or "nothing"
                raise ImageUnavailable(
                    f"expected a setup.sh in the build context of {spec.label}, found {found}: a local environment "
                    "cannot follow a Dockerfile. Install a container engine (`megaflow doctor` says how)."
                )
            fetch_sources(context, cache=self._cache / "sources")
            lay_out(root, spec)
            _run_recipe(spec, context, root, deadline)
            os.replace(root, tree)

    def _set_up(self, environment: LocalEnvironment, spec: EnvironmentSpec, deadline: float) -> None:
        for command in spec.setup:
            result = environment.run(command, timeout_s=max(0.1, deadline - time.monotonic()))
            if not result.ok:
                raise EnvironmentFailed(f"set-up command {command!r}: exit {result.exit_code}: {result.text()[-2000:]}")


def variables_of(root: Path, spec: EnvironmentSpec) -> dict[str, str]:
    """The whole environment of a command: small, and nothing of the worker's own but the mark of its instance.

    By that mark, the launcher of a worker that was killed ends at once what it left running.
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


def lay_out(root: Path, spec: EnvironmentSpec) -> None:
    """Make the folders that a task may expect."""
    for name in (*_FOLDERS.values(), "root", "tmp", spec.workdir.lstrip("/")):
        (root / name).mkdir(parents=True, exist_ok=True)


def copy(tree: Path, root: Path, deadline: float) -> None:
    """Copy a prepared tree with modes, times and links.

    Raises: DiskFull, EnvironmentFailed.
    """
    left_s = max(0.1, deadline - time.monotonic())
    try:
        # The system's own copy: faster than ours, and it may share blocks.
        argv = ["/bin/cp", "-a", str(tree), str(root)]
        subprocess.run(argv, check=True, capture_output=True, timeout=left_s)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailed(f"copying {tree} took longer than the environment's time.") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode("utf-8", "replace").strip()
        if no_space(reason):
            raise DiskFull(f"no space for an environment: {reason}; free some under MEGAFLOW_HOME.") from error
        raise EnvironmentFailed(f"{tree} could not be copied: {reason}") from error


def end(folder: Path) -> None:
    """Kill everything marked with the folder's environment and remove it."""
    kill_tree(HostView(variable=ENVIRONMENT), Tree(folder.name, alone=False))
    for _ in range(5):  # a dying process may still have written
        shutil.rmtree(folder, onerror=_make_writable)
        if not folder.exists():
            return
        time.sleep(0.05)


def _run_recipe(spec: EnvironmentSpec, context: Path, root: Path, deadline: float) -> None:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(  # noqa: S603 - running the context's recipe is the purpose
        ["/bin/sh", str(context / "setup.sh")],
        cwd=context,
        env={**variables_of(root, spec), COMMAND: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    carrier = Carrier(process, None, lambda: kill_tree(HostView(), Tree(mark, alone=False)), threading.Event())
    code = carrier.finish(deadline)
    if code != 0:
        how = "took longer than its time" if code is None else f"left with {code}"
        tail = carrier.stdout.content()[-3000:].decode("utf-8", "replace")
        raise ImageBuildFailed(f"setup.sh of {spec.label} {how}; its output ends:\n{tail}")


def _reading(selector: selectors.BaseSelector) -> bool:
    return any(entry.events & selectors.EVENT_READ for entry in selector.get_map().values())


def _nap() -> tuple[()]:
    time.sleep(_LOOK_S)
    return ()


def _drain(pipe: IO[bytes]) -> None:
    with pipe, suppress(OSError):
        os.set_blocking(pipe.fileno(), True)
        while os.read(pipe.fileno(), 1 << 16):
            pass


def _make_writable(function: Callable[[str], object], path: str, _: object) -> None:
    with suppress(OSError):
        os.chmod(os.path.dirname(path), 0o700)
        os.chmod(path, 0o700)
        function(path)
