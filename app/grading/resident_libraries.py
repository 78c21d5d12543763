"""Calls the grading libraries of datasets, each a resident process in its own environment.

A process starts when it is first needed and serves one request after the other. With several processes of a library,
requests are spread over them. A process has none of our variables, no home and no network, and its memory and time are
limited: a log is hostile. A process over its time is killed, and only its request fails; the next request starts
another.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakSet

import structlog

from app.errors import AgentUnavailable, GradingFailed, UnknownName, UnknownToLibrary
from app.grading.libraries import LIBRARIES, RESIDENT, LibraryFiles
from app.models.spec import JudgeName

log = structlog.get_logger(__name__)

EnsureLibrary = Callable[[str, Path], Path]
"""Returns the interpreter of an environment by name and lock file; installs it if missing.

Raises: AgentUnavailable: it cannot be installed.
"""

_START_S = 120.0  # the largest imports two thousand modules
_REQUEST_S = 300.0  # enough on a busy host; _CPU_S limits the effect of a log
_CPU_S = 30.0
_MEMORY_BYTES = 4 << 30
_MOST_REQUEST_BYTES = 256 << 20  # a log of 32 MiB in which every character is escaped, and the row
_MOST_REPLY_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "LANG": "C.UTF-8", "PYTHON_DOTENV_DISABLED": "1"}


class _LibraryGone(Exception):
    """Error: the process ended or did not answer in time. The message says which."""


class GradingLibraries:
    """Libraries of one MegaFlow process. Thread-safe, also after a fork: a child starts its own."""

    def __init__(
        self,
        ensure: EnsureLibrary,
        *,
        request_s: float = _REQUEST_S,
        cpu_s: float = _CPU_S,
        memory_bytes: int = _MEMORY_BYTES,
        most_processes: int = 1,
    ) -> None:
        """request_s: for one request, without waiting for others. cpu_s: its processor time. memory_bytes: of one
        process. most_processes: of each library, for callers that judge many logs in several threads.
        """
        self._ensure = ensure
        self._bounds = (request_s, cpu_s, memory_bytes)
        self._most = most_processes
        self._lock = threading.Lock()
        self._processes: dict[JudgeName, list[_LibraryProcess]] = {}
        _FORKED.add(self)

    def describe(self, judge: JudgeName, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the library's description of a row: `environment` (lines before everything), `install`, `build` (once
        the hidden tests are in place), `test_command` and `parser`, all of them text; some have more.

        Raises: UnknownName: it does not know the row; GradingFailed: it cannot run or answer.
        """
        answer, _ = self._ask(judge, {"verb": "describe", "row": dict(row)})
        if not isinstance(answer, dict):
            raise GradingFailed(f"expected {judge.value} to describe a row; found {answer!r:.200}")
        return answer

    def judge(
        self, judge: JudgeName, goal: Mapping[str, Any], log_text: str, exit_code: int | None
    ) -> tuple[dict[str, Any], str]:
        """Returns its verdict on a log, `{"resolved": …, "statuses": {test: …}}`, and its name with its version.

        Raises: GradingFailed: it cannot run, or could not judge this log within its time and memory.
        """
        request = {"verb": "judge", "goal": dict(goal), "log": log_text, "exit_code": exit_code}
        try:
            answer, version = self._ask(judge, request)
        except UnknownName as error:
            raise GradingFailed(f"expected the task to be judged by {judge.value}; found that {error}") from error
        if not isinstance(answer, dict):
            raise GradingFailed(f"expected a verdict of {judge.value}; found {answer!r:.200}")
        return answer, version

    def close(self) -> None:
        """Ends the processes. May be called twice; a later request starts them again."""
        with self._lock:
            processes, self._processes = list(chain.from_iterable(self._processes.values())), {}
        for process in processes:
            process.close()

    def forget(self) -> None:
        """Drops the processes in a child after a fork: they are the parent's, and its threads may hold their locks."""
        self._lock = threading.Lock()
        processes, self._processes = list(chain.from_iterable(self._processes.values())), {}
        for process in processes:
            process.forget()

    def _ask(self, judge: JudgeName, request: dict[str, Any]) -> tuple[Any, str]:
        """Returns the answer, and the library's version."""
        try:
            with self._process(judge) as process:
                reply = process.ask(request)
        except _LibraryGone as error:
            raise GradingFailed(
                f"expected the grading library {judge.value} to answer; {error}; the log is kept as the test report"
            ) from error
        except AgentUnavailable as error:
            raise GradingFailed(f"expected the grading library {judge.value} on this host; found: {error}") from error
        if "answer" in reply:
            return reply["answer"], process.version
        message = str(reply.get("error"))
        if reply.get("unknown"):
            raise UnknownToLibrary(message, str(reply.get("column", "")))
        raise GradingFailed(f"expected the grading library {judge.value} to answer; found that it failed: {message}")

    @contextmanager
    def _process(self, judge: JudgeName) -> Iterator[_LibraryProcess]:
        """Yields the process with the fewest requests; starts another, if allowed, when all have requests."""
        if judge not in LIBRARIES:
            raise GradingFailed(f"expected one of the judges {', '.join(LIBRARIES)}; found {judge.value!r}")
        with self._lock:
            processes = self._processes.setdefault(judge, [])
            process = min(processes, key=lambda one: one.requests, default=None)
            if process is None or (process.requests and len(processes) < self._most):
                process = _LibraryProcess(LIBRARIES[judge], self._ensure, *self._bounds)
                processes.append(process)
            process.requests += 1
        try:
            yield process
        finally:
            with self._lock:
                process.requests -= 1


@dataclass(slots=True)
class _LibraryProcess:
    """Process of one library, if it runs. Serves one request at a time: a second caller waits."""

    files: LibraryFiles
    ensure: EnsureLibrary
    request_s: float
    cpu_s: float
    memory_bytes: int
    version: str = ""
    requests: int = 0
    """Number of running and waiting requests; counted by its owner."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _running: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises: _LibraryGone, AgentUnavailable, GradingFailed: the request is too large."""
        line = json.dumps(request, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        if len(line) > _MOST_REQUEST_BYTES:
            raise GradingFailed(f"expected at most {_MOST_REQUEST_BYTES:,} bytes to judge; found {len(line):,}")
        with self._lock:
            if self._running is not None and self._running.poll() is not None:
                self._end()  # killed since the last request
            running = self._running or self._started()
            return self._exchange(running, line, self.request_s)

    def close(self) -> None:
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Drops the process, which belongs to another and lives on."""
        if self._running is not None:
            self._running.returncode = 0  # otherwise Popen would wait for it
            for pipe in (self._running.stdin, self._running.stdout):
                if pipe is not None:
                    pipe.close()
            self._running = None

    def _started(self) -> subprocess.Popen[bytes]:
        """Raises: AgentUnavailable, _LibraryGone."""
        python = self.ensure(self.files.name, self.files.lock)
        bounds = [str(self.cpu_s), str(self.memory_bytes)]
        try:
            running = self._running = subprocess.Popen(  # noqa: S603  our own arguments and paths
                [str(python), "-I", "-X", "utf8", str(RESIDENT), str(self.files.script), *bounds],
                env=_ENVIRONMENT,
                cwd="/",
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise _LibraryGone(f"found that it cannot be started: {error}") from error
        for pipe in (running.stdin, running.stdout):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        hello = self._exchange(running, b"", _START_S)
        if "ready" not in hello:
            self._end()
            raise _LibraryGone(f"found that it cannot be imported: {hello.get('error')}")
        self.version = str(hello["ready"])
        log.info("grading.started_library", library=self.version, pid=running.pid)
        return running

    def _exchange(self, running: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> dict[str, Any]:
        """Sends a line and reads one; any error ends the process. Raises: _LibraryGone."""
        try:
            reply = json.loads(_exchanged(running, line, time.monotonic() + timeout_s))
            if not isinstance(reply, dict):
                raise _LibraryGone("found a reply that is none")
        except TimeoutError as error:
            self._end()
            raise _LibraryGone(f"found no answer within {timeout_s:g} s") from error
        except (OSError, EOFError, ValueError) as error:
            raise _LibraryGone(f"found that it ended ({self._end()})") from error
        except _LibraryGone:
            self._end()
            raise
        return reply

    def _end(self) -> str:
        """Kills it; returns how it had already ended, if it had."""
        running, self._running = self._running, None
        if running is None:
            return "not running"
        with suppress(subprocess.TimeoutExpired):
            running.wait(0.2)  # a process that is just ending gives its exit code
        ended = running.returncode
        if ended is None:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        for pipe in (running.stdin, running.stdout):
            if pipe is not None:
                pipe.close()
        if ended is not None and ended < 0:
            return f"killed by {signal.Signals(-ended).name}: over its processor time or short of memory?"
        return "killed" if ended is None else f"exit code {ended}"


def _exchanged(running: subprocess.Popen[bytes], line: bytes, until: float) -> bytes:
    """Writes and reads at the same time, as either pipe may be full.

    Raises: TimeoutError; EOFError: it ended; OSError; ValueError: the reply is too long.
    """
    assert running.stdin is not None
    assert running.stdout is not None
    unsent, received = memoryview(line), bytearray()
    into, out = running.stdin.fileno(), running.stdout.fileno()
    while not received.endswith(b"\n"):
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        poll = select.poll()  # not select.select, which supports only the first 1,024 descriptors
        poll.register(out, select.POLLIN)
        if unsent:
            poll.register(into, select.POLLOUT)
        ready = dict(poll.poll(left_s * 1000))
        if ready.get(into):
            unsent = unsent[os.write(into, unsent[:_PIECE_BYTES]) :]
        if ready.get(out):
            piece = os.read(out, _PIECE_BYTES)
            if not piece:
                raise EOFError
            received += piece
        if len(received) > _MOST_REPLY_BYTES:
            raise ValueError("too much")
    return bytes(received)


_FORKED: WeakSet[GradingLibraries] = WeakSet()


def _after_fork() -> None:
    for libraries in list(_FORKED):
        libraries.forget()


os.register_at_fork(after_in_child=_after_fork)
