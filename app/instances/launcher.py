"""The worker launcher: forks instances of the `process` provider and reports their ends.

It imports everything a worker needs once and forks: an instance costs milliseconds and shares its parent's memory. It
is single-threaded, so that forking is safe. It ends an instance at its deadline from outside; when it dies itself, the
kernel signals its instances to stop (they give their attempts back). Processes that a dead worker leaves behind are
adopted by it (subreaper) and killed by the mark in their environment.

    python -m app.instances.launcher
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

import psutil
import structlog

from app.errors import DatabaseUnavailable
from app.ledger import instances
from app.ledger.database import Database
from app.models.endings import RetryPolicy
from app.models.instance import InstanceRequest
from app.settings import Settings

log = structlog.get_logger()

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FORK_S = 0.05

HostInstance = Callable[[InstanceRequest], int]
"""Work of a forked child: hosts the instance and returns its exit code."""


def socket_path(settings: Settings) -> Path:
    """Returns the socket on which the worker launcher listens."""
    return settings.home / "run" / "launcher.sock"


@dataclass(slots=True)
class _Child:
    request: InstanceRequest
    pid: int
    ends_at: float | None  # monotonic seconds: it is killed then in any case
    told_to_stop: bool = False


class WorkerLauncher:
    """Serves one host. Not thread-safe, by design."""

    def __init__(self, settings: Settings, mark: str, host_instance: HostInstance) -> None:
        self._settings = settings
        self._mark = mark
        self._host_instance = host_instance
        self._database = Database(settings.database(), pooled=False)
        self._retry = RetryPolicy(settings.retry_base_s, settings.retry_cap_s)
        self._children: dict[UUID, _Child] = {}
        self._unreported: list[tuple[UUID, int, str]] = []
        self._selector = selectors.DefaultSelector()
        self._stopping = False

    def serve(self) -> None:
        """Serves until SIGTERM. Then stops every instance, and kills those that do not stop."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        listener = self._listen()
        woken, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        woken.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        signal.signal(signal.SIGINT, lambda *_: self._stop())
        self._selector.register(listener, selectors.EVENT_READ, self._answer)
        self._selector.register(woken, selectors.EVENT_READ, lambda s: s.recv(4096))
        self._own_fds = [listener, woken, wakeup]
        log.info("launcher.ready", socket=str(socket_path(self._settings)))
        while not (self._stopping and not self._children and not self._unreported):
            for key, _ in self._selector.select(timeout=0.5):
                with suppress(BlockingIOError):
                    key.data(key.fileobj)
            self._reap()
            self._enforce_deadlines()
            self._report()

    def _listen(self) -> socket.socket:
        path = socket_path(self._settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        unready = path.with_suffix(".new")  # it gets its own name when it listens
        unready.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(unready))
        unready.chmod(0o600)
        listener.listen(64)
        unready.replace(path)
        return listener

    def _answer(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(5)
            try:
                with connection.makefile("rb") as lines:
                    request = json.loads(lines.readline())
                reply = self._do(request, connection)
                connection.sendall(json.dumps(reply).encode() + b"\n")
            except (OSError, ValueError, KeyError) as error:
                log.warning("launcher.bad_request", error=str(error))

    def _do(self, asked: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        match asked["verb"]:
            case "launch":
                requests = [InstanceRequest.model_validate(item) for item in asked["requests"]]
                return {str(r.instance_id): str(self._fork(r, connection)) for r in requests if not self._stopping}
            case "terminate":
                self._terminate(UUID(asked["instance_id"]), float(asked["grace_s"]))
                return {}
            case "alive":
                return {str(i): str(child.pid) for i, child in self._children.items()}
            case other:
                raise ValueError(f"expected launch, terminate or alive, found {other!r}")

    def _fork(self, request: InstanceRequest, connection: socket.socket) -> int:
        known = self._children.get(request.instance_id)
        if known is not None:
            return known.pid
        launcher = os.getpid()
        # Blocked until the child has dropped the launcher's handlers: they would stop its siblings instead.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        try:
            pid = os.fork()
            if pid == 0:
                self._become(request, connection, launcher, before)
        finally:  # also when the host cannot start another process
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ends_at = time.monotonic() + request.lifetime_s if request.lifetime_s is not None else None
        self._children[request.instance_id] = _Child(request, pid, ends_at)
        log.info("launcher.launched", instance_id=str(request.instance_id), pid=pid, mode=request.mode.value)
        return pid

    def _become(
        self, request: InstanceRequest, connection: socket.socket, launcher: int, signals: set[int | signal.Signals]
    ) -> NoReturn:
        """Runs the child: drops everything of the launcher's, unblocks its signals, then works."""
        code = 70
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
            os.setsid()
            connection.close()
            self._selector.close()
            for own in self._own_fds:
                own.close()
            self._redirect(request)
            if os.getppid() == launcher:  # else it died before the kernel could signal its death
                code = self._host_instance(request)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            log.exception("instance.crashed")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _redirect(self, request: InstanceRequest) -> None:
        folder = self._settings.home / "logs" / "instances"
        folder.mkdir(parents=True, exist_ok=True)
        log_file = os.open(folder / f"{request.instance_id}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(log_file, 1)
        os.dup2(log_file, 2)
        os.close(log_file)
        os.close(nothing)

    def _terminate(self, instance_id: UUID, grace_s: float) -> None:
        child = self._children.get(instance_id)
        if child is None:
            return
        if grace_s > 0:
            self._signal(child, signal.SIGTERM)
            until = time.monotonic() + grace_s
            child.ends_at = min(child.ends_at or until, until)
        else:
            self._kill(child)

    def _signal(self, child: _Child, number: int) -> None:
        child.told_to_stop = True
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)

    def _kill(self, child: _Child) -> None:
        """Kills the worker with everything below it, in any session."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(child.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self._signal(child, signal.SIGKILL)

    def _stop(self) -> None:
        self._stopping = True
        for child in self._children.values():
            self._signal(child, signal.SIGTERM)
            child.ends_at = time.monotonic() + self._settings.drain_s + 10.0

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for child in list(self._children.values()):
            if child.ends_at is not None and now > child.ends_at:
                log.warning("launcher.deadline", instance_id=str(child.request.instance_id))
                self._kill(child)
                child.ends_at = now + 5.0

    def _reap(self) -> None:
        by_pid = {child.pid: child for child in self._children.values()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = by_pid.get(pid)
            if child is not None:
                self._gone(child, os.waitstatus_to_exitcode(status))

    def _gone(self, child: _Child, code: int) -> None:
        instance_id = child.request.instance_id
        del self._children[instance_id]
        why = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        log.info("launcher.exited", instance_id=str(instance_id), why=why)
        self._kill_adopted(str(instance_id))
        if code < 0:
            time.sleep(_FORK_S)  # a process just forked has no mark before it executes its command
            self._kill_adopted(str(instance_id))
        self._unreported.append((instance_id, code, why))

    def _kill_adopted(self, instance_id: str) -> None:
        """Kills processes that a dead worker left, with their children. The kernel made the launcher their parent.

        Looks at no others: reading the environment of a process that forks without end takes seconds.
        """
        living = {child.pid for child in self._children.values()}
        orphans = [process for process in psutil.Process().children() if process.pid not in living]
        while orphans:
            process = orphans.pop()
            with suppress(psutil.Error):
                if process.environ().get(self._mark) == instance_id:
                    orphans += process.children()
                    process.kill()

    def _report(self) -> None:
        while self._unreported:
            instance_id, code, why = self._unreported[0]
            try:
                instances.exited(self._database, instance_id, code, why, self._retry)
            except DatabaseUnavailable as error:
                log.warning("launcher.not_reported", error=str(error))
                if self._stopping and not self._children:
                    self._unreported.clear()  # the reconciler notices
                return
            self._unreported.pop(0)


def main(settings: Settings, mark: str, host_instance: HostInstance) -> None:
    """Serves until SIGTERM. Everything that instances need must have been imported by now."""
    gc.collect()
    gc.freeze()  # keeps the shared pages shared
    WorkerLauncher(settings, mark, host_instance).serve()
