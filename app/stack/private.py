"""Starts a temporary stack: servers, control workers, a host for simulated instances. It is removed at its end.

For capacity planning, benchmarks and fault injection: every process can be killed, stopped and restarted by name, and
its resource usage can be read. There is no supervisor: a process that ended is not restarted.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from app.errors import InstallationFailed, InstanceFailed, UnknownName
from app.instances.simulated import SimulatedProvider
from app.ledger import schema
from app.ledger.database import Database, dispatcher_leads
from app.models.simulation import Simulation
from app.settings import Settings
from app.stack import postgres, redis
from app.stack.home import logs_folder, prepare, process_environment, tail
from app.stack.processes import family, wait_for_end
from app.stack.programs import Program, StartStage

POSTGRES, REDIS, SIMULATION = "postgres", "redis", "simulation"

_READY_S = 60.0
_POLL_S = 0.05
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Resources used so far by a process and its descendants. Shared memory is counted once."""

    cpu_s: float
    memory_bytes: int
    processes: int


class PrivateStack:
    """Processes of one stack, by name: `postgres`, `redis`, `simulation`, `control-1` …, and those added by `start`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._programs: dict[str, Program] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        # PR_SET_PDEATHSIG ends a child when the thread that created it ends: keep that thread alive.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="starter")

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running programs, by name."""
        return {name: process.pid for name, process in self._running.items() if process.poll() is None}

    def log_file(self, name: str) -> Path:
        return logs_folder(self.settings) / f"{name}.log"

    def start(self, program: Program) -> None:
        """Starts a program and, for the servers and the simulation's host, waits until it answers.

        Raises: InstallationFailed, DatabaseUnavailable, BrokerUnavailable: it did not answer.
        """
        self.spawn(program)
        self.wait_until_ready(program.name)

    def spawn(self, program: Program) -> None:
        """Starts a program without waiting for it."""
        self._starter.submit(self._spawn, program).result()

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a program without waiting for the effect. Raises: UnknownName."""
        self._process(name).send_signal(number)

    def stop(self, name: str) -> int:
        """Ends a program, with SIGKILL after `stop_wait_s`, and returns its exit code. Raises: UnknownName."""
        process = self._process(name)
        below = family(process.pid)
        self._tell_to_stop(name)
        try:
            process.wait(self._programs[name].stop_wait_s)
        except subprocess.TimeoutExpired:
            process.kill()
        code = process.wait()
        for process_left in wait_for_end(below, 5.0):
            process_left.kill()
        return code

    def restart(self, name: str) -> None:
        """Stops a program, if it runs, and starts it again. Raises: as `start`, UnknownName."""
        self.stop(name)
        self.start(self._programs[name])

    def usage(self) -> dict[str, ProcessUsage]:
        """Returns the resources that each running program has used since its start."""
        return {name: _usage(pid) for name, pid in self.pids.items()}

    def provider(self) -> SimulatedProvider:
        """Returns a client of the simulation's host: it reads the counts and changes the simulated behaviour."""
        return SimulatedProvider(self.settings)

    def close(self) -> None:
        """Ends all programs, the servers last."""
        self._starter.submit(lambda: None).result()  # wait for a start in progress
        for name in list(self._running):
            if self._programs[name].stage is not StartStage.SERVERS:
                self._tell_to_stop(name)  # all at once: each may take some time to stop
        for name in sorted(self._running, key=lambda name: self._programs[name].stage, reverse=True):
            self.stop(name)
        self._starter.shutdown()

    def _tell_to_stop(self, name: str) -> None:
        process = self._process(name)
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(getattr(signal, f"SIG{self._programs[name].stop_signal}"))

    def _process(self, name: str) -> subprocess.Popen[bytes]:
        if name not in self._running:
            raise UnknownName.of("program of the private stack", name, list(self._running))
        return self._running[name]

    def _spawn(self, program: Program) -> None:
        """Runs in the starter's thread. No signal interrupts it, so every started process is recorded."""
        stop_signal = int(getattr(signal, f"SIG{program.stop_signal}"))
        with self.log_file(program.name).open("ab") as output:
            process = subprocess.Popen(  # noqa: S603 (our own programs)
                program.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=process_environment(self.settings, keys=program.keys),
                cwd="/" if program.user else self.settings.home,
                user=program.user,
                group=program.user,
                extra_groups=None if program.user is None else [],
                start_new_session=True,
                preexec_fn=lambda: _LIBC.prctl(_DIE_WITH_PARENT, stop_signal),
            )
        self._programs[program.name] = program
        self._running[program.name] = process

    def wait_until_ready(self, name: str) -> None:
        """Waits until the program answers. Raises: as `start`."""
        match name:
            case "postgres":
                postgres.wait_until_ready(self.settings)
            case "redis":
                redis.wait_until_ready(self.settings)
            case "simulation":
                self.wait_for(name, self._simulation_answers)

    def _simulation_answers(self) -> bool:
        try:
            return self.provider().counts() is not None
        except InstanceFailed:
            return False

    def wait_for(self, name: str, ready: Callable[[], bool]) -> None:
        """Waits until `ready` returns true. Raises: InstallationFailed: the program ended, or it took too long."""
        give_up = time.monotonic() + _READY_S
        while not ready():
            code = self._process(name).poll()
            if code is not None or time.monotonic() > give_up:
                state = "still runs" if code is None else f"ended with exit code {code}"
                raise InstallationFailed(f"{name} is not ready and {state}; it said:\n{tail(self.log_file(name))}")
            time.sleep(_POLL_S)


@contextmanager
def private_stack(
    overrides: Mapping[str, object] | None = None,
    *,
    control_workers: int = 1,
    simulation: Simulation | None = None,
    durable: bool = True,
) -> Iterator[PrivateStack]:
    """Runs a stack with its own database, broker and home for the block, and removes all of it afterwards.

    overrides: settings. simulation: instances of both modes are simulated, with this behaviour. durable: with False
    PostgreSQL does not wait for the disk.

    Raises: InstallationFailed, DatabaseUnavailable, BrokerUnavailable: something did not start.
    """
    with _home() as home:
        settings = _settings(home, dict(overrides or {}), simulated=simulation is not None)
        stack = PrivateStack(settings)
        try:
            if simulation is not None:
                stack.spawn(_simulation(simulation))  # first: its imports take longest
            _start_servers(stack, durable=durable)
            if simulation is not None:
                stack.wait_until_ready(SIMULATION)
            _start_control(stack, control_workers)
            yield stack
        finally:
            stack.close()
            postgres.purge(settings)


@contextmanager
def _home() -> Iterator[Path]:
    """Creates a temporary folder with a short path that the embedded PostgreSQL's user may traverse."""
    folder = Path(tempfile.mkdtemp(prefix="mf-"))
    folder.chmod(0o711)
    try:
        yield folder / "h"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _settings(home: Path, overrides: dict[str, object], *, simulated: bool) -> Settings:
    values: dict[str, object] = {"installation": f"private-{uuid.uuid4().hex[:8]}", "log_level": "WARNING"}
    if simulated:
        values |= {"ephemeral_provider": "simulated", "persistent_provider": "simulated"}
    own: dict[str, object] = {"home": home, "database_url": None, "broker_url": None}
    settings = Settings(**(values | overrides | own))
    prepare(settings)
    return settings


def _start_servers(stack: PrivateStack, *, durable: bool) -> None:
    settings = stack.settings
    postgres.prepare(settings)
    redis.prepare(settings)
    not_durable = () if durable else ("-c", "fsync=off", "-c", "full_page_writes=off")
    command = (*postgres.command(settings), *not_durable)
    stack.start(Program(POSTGRES, StartStage.SERVERS, command, postgres.owner(), "INT", stop_wait_s=30))
    stack.start(Program(REDIS, StartStage.SERVERS, redis.command(settings), stop_wait_s=30))
    schema.migrate(settings.database())


def _simulation(simulation: Simulation) -> Program:
    argument = json.dumps(simulation.model_dump(mode="json"))
    command = (sys.executable, "-m", "app.simulation.host", argument)
    return Program(SIMULATION, StartStage.HOSTS, command, stop_wait_s=15)


def _start_control(stack: PrivateStack, count: int) -> None:
    for number in range(1, count + 1):
        stack.start(Program(f"control-{number}", StartStage.WORK, (sys.executable, "-m", "app.control.worker")))
    if count:
        database = Database(stack.settings.database(), pooled=False)
        stack.wait_for("control-1", lambda: dispatcher_leads(database))


def _usage(pid: int) -> ProcessUsage:
    usages = [used for used in map(_used, family(pid)) if used is not None]
    return ProcessUsage(sum(cpu for cpu, _ in usages), sum(memory for _, memory in usages), len(usages))


def _used(process: psutil.Process) -> tuple[float, int] | None:
    """Returns CPU seconds, including ended children, and the memory share (PSS); None: the process has ended."""
    try:
        times: Any = process.cpu_times()
        return times.user + times.system + times.children_user + times.children_system, process.memory_full_info().pss
    except psutil.Error:
        return None
