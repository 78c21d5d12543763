"""Configures, starts and asks supervisord over a Unix socket."""

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
_TRIED_S = 8.0  # a start is given up when a program has ended again and again for this long
_ALREADY_STARTED = 60  # supervisor.xmlrpc.Faults
_NOT_RUNNING = 70


@dataclass(frozen=True)
class ProgramState:
    """What supervisord says about one program."""

    name: str
    state: str
    """RUNNING, STARTING, BACKOFF, STOPPING, STOPPED, EXITED, FATAL or UNKNOWN."""
    pid: int
    """0 when it has no process."""
    description: str
    """Its uptime, or why it does not run."""

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
    """The text of supervisord.conf. It holds no secret: settings reach the programs through the environment.

    No program starts by itself: `app.stack.lifecycle` keeps the order.
    """
    return "\n".join([_sections(settings), *(_section(program) for program in programs)])


def start(settings: Settings, programs: Sequence[Program]) -> None:
    """Write the configuration and start supervisord as a daemon. Its programs inherit these settings.

    Keys of model providers reach the programs with `Program.keys` alone, over standard input.

    Raises: InstallationFailed: it did not come up; the message holds the end of its log.
    """
    check_socket_path(socket_file(settings))
    configuration_file(settings).write_text(configuration(settings, programs))
    socket_file(settings).unlink(missing_ok=True)
    arguments = [sys.executable, "-m", "app.stack.supervised", "-c", str(configuration_file(settings))]
    keys = provider_keys(os.environ, {settings.model_api_key_env})
    told = json.dumps({"keys": keys, "programs": [program.name for program in programs if program.keys]})
    done = subprocess.run(  # noqa: S603 (this interpreter)
        arguments, env=process_environment(settings), cwd=settings.home, capture_output=True, text=True, input=told
    )
    if done.returncode != 0 or not _until(lambda: is_running(settings), _START_S):
        found = done.stderr.strip() or tail(logs_folder(settings) / "supervisord.log")
        raise InstallationFailed(f"supervisord did not start; it said: {found or 'nothing'}")


def is_running(settings: Settings) -> bool:
    """Whether our supervisord answers."""
    try:
        with _connected(settings) as rpc:
            return bool(rpc.getState()["statename"] == "RUNNING")
    except StackNotRunning:
        return False


def states(settings: Settings) -> tuple[ProgramState, ...]:
    """Every program's state.

    Raises: StackNotRunning: supervisord does not answer.
    """
    with _connected(settings) as rpc:
        found: list[dict[str, Any]] = rpc.getAllProcessInfo()
    return tuple(ProgramState(one["name"], one["statename"], one["pid"], one["description"]) for one in found)


def start_programs(settings: Settings, names: Iterable[str]) -> None:
    """Ask for these to run, without waiting. One that runs already is left alone."""
    with _connected(settings) as rpc:
        for name in names:
            _tolerating(_ALREADY_STARTED, partial(rpc.startProcess, name, False))


def wait_until_running(settings: Settings, names: Iterable[str]) -> None:
    """Return when all run and have lived for a second.

    Raises: InstallationFailed: one did not; the message holds the end of its log.
    """
    wanted = set(names)
    ended_at: dict[str, float] = {}  # of those that ended too soon and are being started again

    def settled() -> bool:
        now = time.monotonic()
        found = [state for state in states(settings) if state.name in wanted]
        for state in found:
            if state.state == "BACKOFF":
                ended_at.setdefault(state.name, now)
            elif state.runs:
                ended_at.pop(state.name, None)
        given_up = any(state.state == "FATAL" for state in found) or any(
            now - at > _TRIED_S for at in ended_at.values()
        )
        return given_up or all(state.runs for state in found)

    _until(settled, _RUNNING_S)
    for state in states(settings):
        if state.name in wanted and not state.runs:
            log = logs_folder(settings) / f"{state.name}.log"
            raise InstallationFailed(
                f"{state.name} does not run: {state.state} ({state.description}). The end of {log}:\n{tail(log)}"
            )


def stop_programs(settings: Settings, programs: Iterable[Program]) -> list[str]:
    """Stop these together and wait until each is gone; returns the names of those that ran."""
    table = {program.name: program for program in programs}
    with _connected(settings) as rpc:
        ran = [state.name for state in states(settings) if state.name in table and not state.has_ended]
        for name in ran:
            _tolerating(_NOT_RUNNING, partial(rpc.stopProcess, name, False))
    patience_s = max((table[name].stop_wait_s for name in ran), default=0) + 5.0
    _until(lambda: all(state.has_ended for state in states(settings) if state.name in ran), patience_s)
    return ran


def shutdown(settings: Settings) -> None:
    """End supervisord, with whatever still runs under it, and wait until it is gone."""
    with _connected(settings) as rpc:
        own = processes.family(rpc.getPID())[:1]
        rpc.shutdown()
    processes.wait_for_end(own, _SHUTDOWN_S)


def family(settings: Settings) -> set[int]:
    """The process ids of supervisord and of everything below it."""
    with _connected(settings) as rpc:
        return {process.pid for process in processes.family(rpc.getPID())}


# --- The configuration ---------------------------------------------------------------------------------------------


def _sections(settings: Settings) -> str:
    # Relative to the home, in which supervisord starts: it expands some paths once, some twice.
    supervisord: dict[str, object] = {
        "logfile": "logs/supervisord.log",
        "logfile_maxbytes": _LOG_BYTES,
        "logfile_backups": _LOG_BACKUPS,
        "pidfile": "run/supervisord.pid",
        "childlogdir": "logs",
        "identifier": f"megaflow-{settings.installation}",
    }
    if os.geteuid() == 0:
        supervisord["user"] = "root"  # said aloud, or supervisord warns at each start
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
        # The program itself ends its children in good order; only what outlives its patience is killed as a group.
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


# --- The wire ------------------------------------------------------------------------------------------------------


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
