"""Configures, starts and controls supervisord over a Unix socket."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xmlrpc.client import Fault, ServerProxy

from supervisor.xmlrpc import SupervisorTransport

from app.errors import InstallationFailed, StackNotRunning
from app.models.provider_keys import provider_keys
from app.settings import Settings
from app.stack import processes
from app.stack.home import check_socket_path, logs_folder, process_environment, run_folder, tail
from app.stack.programs import Program

_LOG_BYTES = 10 << 20
_LOG_BACKUPS = 3
_START_S = 60.0
_RUNNING_S = 120.0
_SHUTDOWN_S = 60.0
_POLL_S = 0.05
_SETTLED_S = 1  # a program that lives this long counts as started
_RETRIES = 10
_TRIED_S = 8.0  # give up a start when the program keeps ending for this long
_ALREADY_STARTED = 60  # supervisor.xmlrpc.Faults
_NOT_RUNNING = 70


@dataclass(frozen=True)
class ProgramState:
    """State of one program, as supervisord reports it."""

    name: str
    state: str
    """RUNNING, STARTING, BACKOFF, STOPPING, STOPPED, EXITED, FATAL or UNKNOWN."""
    pid: int
    """0 when it has no process."""
    description: str
    """Uptime, or the reason why the program does not run."""

    @property
    def runs(self) -> bool:
        return self.state == "RUNNING"

    @property
    def has_ended(self) -> bool:
        return self.state in {"STOPPED", "EXITED", "FATAL"}


def socket_file(settings: Settings) -> Path:
    return run_folder(settings) / "supervisor.sock"


def configuration_file(settings: Settings) -> Path:
    return run_folder(settings) / "supervisord.conf"


def configuration(settings: Settings, programs: Iterable[Program]) -> str:
    """Returns the text of supervisord.conf. It holds no secret: settings reach the programs through the environment.

    No program starts automatically: `app.stack.lifecycle` controls the order.
    """
    return "\n".join([_sections(settings), *(_section(program) for program in programs)])


def start(settings: Settings, programs: Sequence[Program]) -> None:
    """Writes the configuration and starts supervisord as a daemon. Its programs inherit these settings.

    Keys of model providers are passed over standard input, and reach only programs with `Program.keys`.

    Raises: InstallationFailed: it did not come up; the message holds the end of its log.
    """
    check_socket_path(socket_file(settings))
    configuration_file(settings).write_text(configuration(settings, programs))
    socket_file(settings).unlink(missing_ok=True)
    arguments = [sys.executable, "-m", "app.stack.supervised", "-c", str(configuration_file(settings))]
    keys = provider_keys(os.environ, {settings.model_api_key_env})
    payload = json.dumps({"keys": keys, "programs": [program.name for program in programs if program.keys]})
    result = subprocess.run(  # noqa: S603 (this interpreter)
        arguments, env=process_environment(settings), cwd=settings.home, capture_output=True, text=True, input=payload
    )
    if result.returncode != 0 or not _until(lambda: is_running(settings), _START_S):
        output = result.stderr.strip() or tail(logs_folder(settings) / "supervisord.log")
        raise InstallationFailed(f"supervisord did not start; it said: {output or 'nothing'}")


def is_running(settings: Settings) -> bool:
    """Whether our supervisord answers."""
    try:
        with _connected(settings) as rpc:
            return bool(rpc.getState()["statename"] == "RUNNING")
    except StackNotRunning:
        return False


def states(settings: Settings) -> tuple[ProgramState, ...]:
    """Returns the state of each program.

    Raises: StackNotRunning: supervisord does not answer.
    """
    with _connected(settings) as rpc:
        rows: list[dict[str, Any]] = rpc.getAllProcessInfo()
    return tuple(ProgramState(one["name"], one["statename"], one["pid"], one["description"]) for one in rows)


def start_programs(settings: Settings, names: Iterable[str]) -> None:
    """Starts these programs without waiting. A running one is left alone."""
    with _connected(settings) as rpc:
        for name in names:
            _tolerating(_ALREADY_STARTED, partial(rpc.startProcess, name, False))


def wait_until_running(settings: Settings, names: Iterable[str]) -> None:
    """Waits until all run and have lived for a second.

    Raises: InstallationFailed: one did not; the message holds the end of its log.
    """
    expected = set(names)
    ended_at: dict[str, float] = {}  # of programs that ended too soon and are being restarted

    def settled() -> bool:
        now = time.monotonic()
        current = [state for state in states(settings) if state.name in expected]
        for state in current:
            if state.state == "BACKOFF":
                ended_at.setdefault(state.name, now)
            elif state.runs:
                ended_at.pop(state.name, None)
        given_up = any(state.state == "FATAL" for state in current) or any(
            now - at > _TRIED_S for at in ended_at.values()
        )
        return given_up or all(state.runs for state in current)

    _until(settled, _RUNNING_S)
    for state in states(settings):
        if state.name in expected and not state.runs:
            log = logs_folder(settings) / f"{state.name}.log"
            raise InstallationFailed(
                f"{state.name} does not run: {state.state} ({state.description}). The end of {log}:\n{tail(log)}"
            )


def stop_programs(settings: Settings, programs: Iterable[Program]) -> list[str]:
    """Stops these programs at the same time and waits until each has ended; returns the names of those that ran."""
    table = {program.name: program for program in programs}
    with _connected(settings) as rpc:
        ran = [state.name for state in states(settings) if state.name in table and not state.has_ended]
        for name in ran:
            _tolerating(_NOT_RUNNING, partial(rpc.stopProcess, name, False))
    patience_s = max((table[name].stop_wait_s for name in ran), default=0) + 5.0
    _until(lambda: all(state.has_ended for state in states(settings) if state.name in ran), patience_s)
    return ran


def shutdown(settings: Settings) -> None:
    """Ends supervisord and all programs that still run under it, and waits for its end."""
    with _connected(settings) as rpc:
        own = processes.family(rpc.getPID())[:1]
        rpc.shutdown()
    processes.wait_for_end(own, _SHUTDOWN_S)


def family(settings: Settings) -> set[int]:
    """Returns the process ids of supervisord and all its descendants."""
    with _connected(settings) as rpc:
        return {process.pid for process in processes.family(rpc.getPID())}


def _sections(settings: Settings) -> str:
    # Paths relative to the home, supervisord's working folder: supervisord expands some paths once, others twice.
    supervisord: dict[str, object] = {
        "logfile": "logs/supervisord.log",
        "logfile_maxbytes": _LOG_BYTES,
        "logfile_backups": _LOG_BACKUPS,
        "pidfile": "run/supervisord.pid",
        "childlogdir": "logs",
        "identifier": f"megaflow-{settings.installation}",
    }
    if os.geteuid() == 0:
        supervisord["user"] = "root"  # explicit, else supervisord warns at each start
    factory = {"supervisor.rpcinterface_factory": "supervisor.rpcinterface:make_main_rpcinterface"}
    return "\n".join(
        [
            "; Written by `megaflow up`; changes are lost.",
            _ini("unix_http_server", {"file": "run/supervisor.sock", "chmod": "0700"}),
            _ini("supervisord", supervisord),
            _ini("rpcinterface:supervisor", factory),
        ]
    )


def _section(program: Program) -> str:
    values: dict[str, object] = {
        "command": shlex.join(program.command),
        "autostart": "false",
        "autorestart": program.restart,
        "startsecs": _SETTLED_S,
        "startretries": _RETRIES,
        "stopsignal": program.stop_signal,
        "stopwaitsecs": program.stop_wait_s,
        # The program ends its own children in order; the group is killed only after `stopwaitsecs`.
        "stopasgroup": "false",
        "killasgroup": "true",
        "redirect_stderr": "true",
        "stdout_logfile": f"logs/{program.name}.log",
        "stdout_logfile_maxbytes": _LOG_BYTES,
        "stdout_logfile_backups": _LOG_BACKUPS,
    }
    if program.user is not None:
        values |= {"user": program.user, "directory": "/"}
    return _ini(f"program:{program.name}", values)


def _ini(section: str, values: dict[str, Any]) -> str:
    lines = (f"{name}={str(value).replace('%', '%%')}" for name, value in values.items())
    return "\n".join([f"[{section}]", *lines, ""])


@contextmanager
def _connected(settings: Settings) -> Iterator[Any]:
    transport = SupervisorTransport(None, None, f"unix://{socket_file(settings)}")
    try:
        yield ServerProxy("http://127.0.0.1", transport=transport).supervisor
    except (OSError, http.client.HTTPException) as error:
        raise StackNotRunning(f"no stack runs in {settings.home}; start it with `megaflow up`") from error
    finally:
        transport.close()


def _tolerating(fault: int, call: Callable[[], object]) -> None:
    try:
        call()
    except Fault as error:
        if error.faultCode != fault:
            raise


def _until(true: Callable[[], bool], timeout_s: float) -> bool:
    give_up = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > give_up:
            return False
        time.sleep(_POLL_S)
    return True
