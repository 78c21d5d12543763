"""Starts and stops one machine's stack: `up` and `down`."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from app.errors import (
    DatabaseUnavailable,
    EngineUnavailable,
    ImageBuildFailed,
    ImageUnavailable,
    InstallationFailed,
    MegaFlowError,
)
from app.ledger import hosts, instances, schema
from app.ledger.database import Database, dispatcher_leads
from app.settings import Settings
from app.settings_checks import name_file
from app.stack import base_image, engine, flower, leftovers, ports, postgres, redis, supervisor, tools
from app.stack.engine import DOCKERD, Dockerd, EngineReport
from app.stack.home import exclusively, logs_folder, prepare, run_folder, tail
from app.stack.leftovers import Removed
from app.stack.programs import Program, StartStage, programs

log = structlog.get_logger(__name__)

_DISPATCHER_MOST_S = 900.0
_REPORT_EVERY_S = 10.0
_OTHERS_STOP_S = 30

Report = Callable[[str], None]
Table = Callable[[Settings], tuple[Program, ...]]


@dataclass(frozen=True)
class StackReport:
    """What `up` found and did."""

    engine: EngineReport
    programs: tuple[str, ...]
    """Everything that runs now."""
    started: tuple[str, ...]
    """Of these, what was started just now; none: the stack was running."""
    took_s: float
    restart_needed: bool = False
    """The stack runs with other settings than these."""


@dataclass(frozen=True)
class DownReport:
    """What `down` ended and removed."""

    programs: tuple[str, ...] = ()
    stragglers: tuple[str, ...] = ()
    """MegaFlow's processes that were no longer under supervisord: `pid name`."""
    removed: Removed = field(default_factory=Removed)
    engine_stopped: bool = False
    engine_kept_for: int = 0
    """Running containers of others, because of which an engine that we started was left running."""


def up(
    settings: Settings,
    report: Report,
    *,
    may_install: bool = True,
    base: bool = True,
    dockerd: Dockerd = DOCKERD,
    table: Table = programs,
) -> StackReport:
    """Bring the stack up, or complete the one that runs; safe to repeat.

    Without an engine the stack comes up all the same: see `StackReport.engine`.  `base` also makes the base image.
    Where the stack runs with other settings, or without a program of `table`, nothing is started: `restart_needed`.

    Raises: SettingsInvalid, InstallationFailed, DatabaseUnavailable, BrokerUnavailable: with the fix in the message.
        StackNotRunning: another `up` or `down` holds this home.
    """
    begun = time.monotonic()
    prepare(settings)
    with exclusively(settings):
        container_engine = _ensure_engine(settings, report, may_install=may_install, base=base, dockerd=dockerd)
        wanted = table(settings)
        with _stopped_on_failure(settings, report, table, container_engine):
            if not supervisor.is_running(settings):
                _start_supervisor(settings, report, table)
                wanted = table(settings)  # preparing the servers decides where their data is
            differs = _fingerprint_file(settings).read_text() != _fingerprint(settings, wanted)
            started = [] if differs else _start_missing(settings, wanted, report)
        if not started and not differs:
            report(f"the stack in {settings.home} is running already")
        return StackReport(
            engine=container_engine,
            programs=tuple(program.name for program in wanted),
            started=tuple(started),
            took_s=time.monotonic() - begun,
            restart_needed=differs,
        )


def down(settings: Settings, report: Report, *, purge: bool = False, table: Table = programs) -> DownReport:
    """End the stack and leave nothing of it but its data; safe to repeat, and after a crash.

    `purge` deletes the data as well: the embedded servers', the artifacts, the logs, what attempts left. What was
    installed (`tools`) and made by hand (`recordings`) stays, and is named.

    Raises: StackNotRunning: another `up` or `down` holds this home.
    """
    prepare(settings)
    with exclusively(settings):
        stopped, stragglers = _stop_supervised(settings, report, table)
        stragglers += leftovers.end_processes(settings)
        if stragglers:
            report(f"ended {len(stragglers)} left-over processes: {', '.join(stragglers)}")
        removed = _remove_from_engine(settings)
        if removed.anything:
            report(f"removed {removed.containers} containers, {removed.networks} networks, {removed.volumes} volumes")
        if removed.others:
            report(
                f"left what {removed.others} instances have in the engine: without the ledger it may be another host's;"
                " remove it by label when no other host uses this engine (docs/howto/cluster.md)"
            )
        for name in removed.stuck:
            report(
                f"the engine counts a container in the network {name} that is gone; restart it, then remove the network"
            )
        if environments := leftovers.end_environments(settings):
            report(f"ended {environments} environments that stood without an engine")
        engine_stopped, strangers = _stop_engine(settings, report)
        if purge:  # under the lock: no other `up` starts servers on this data meanwhile
            _purge(settings)
            kept = ", ".join(sorted(path.name for path in settings.home.iterdir() if path != run_folder(settings)))
            stays = f"; {kept} stays: installed programs, and files made by hand, cost time to make again"
            report(f"deleted the data in {settings.home}{stays if kept else ''}")
    return DownReport(tuple(stopped), tuple(stragglers), removed, engine_stopped, strangers)


# --- Up ------------------------------------------------------------------------------------------------------------


@contextmanager
def _stopped_on_failure(
    settings: Settings, report: Report, table: Table, container_engine: EngineReport
) -> Iterator[None]:
    """For the block, which starts programs: when it fails, stop what this `up` started."""
    was_running = supervisor.is_running(settings)
    try:
        yield
    except BaseException:
        if not was_running and supervisor.is_running(settings):
            report("the stack did not come up; stopping what was started")
            _stop_supervised(settings, report, table)
        if not was_running and container_engine.started:
            engine.stop_engine(settings)
        raise


def _ensure_engine(
    settings: Settings, report: Report, *, may_install: bool, base: bool, dockerd: Dockerd
) -> EngineReport:
    found = engine.ensure_engine(settings, may_install=may_install, dockerd=dockerd, report=report)
    if not found.available:
        report(f"no Docker engine: {found.why}; try: {found.fix}")
    elif base:
        try:
            base_image.ensure_base_image(settings, report=report)
        except (EngineUnavailable, ImageBuildFailed, ImageUnavailable) as error:
            # Datasets that bring their own images need no base.
            report(f"no base image: {error}")
    tools.ensure_tools(settings, may_install=may_install, report=report)
    return found


def _start_supervisor(settings: Settings, report: Report, table: Table) -> None:
    # A stack whose supervisord was killed left its servers behind; they hold the data.
    if orphans := leftovers.end_processes(settings):
        report(f"ended {len(orphans)} processes of a stack that had crashed")
    if not settings.joined:
        ports.refuse_in_use(settings)
        flower.prepare(settings)
    if settings.embeds_postgres:
        postgres.prepare(settings)
    if settings.embeds_redis:
        redis.prepare(settings)
    wanted = table(settings)
    _fingerprint_file(settings).write_text(_fingerprint(settings, wanted))  # first: a stack that runs has one
    supervisor.start(settings, wanted)


def _start_missing(settings: Settings, wanted: tuple[Program, ...], report: Report) -> list[str]:
    missing = {state.name for state in supervisor.states(settings) if not state.runs}
    started: list[str] = []
    for stage in StartStage:
        names = [program.name for program in wanted if program.stage is stage and program.name in missing]
        if names:
            report(f"starting {', '.join(names)}")
            supervisor.start_programs(settings, names)
        if stage is StartStage.SERVERS and not settings.joined:
            _make_servers_ready(settings)
        started += names
    supervisor.wait_until_running(settings, started)
    if "control" in started:
        _wait_for_dispatcher(settings, report)
    return started


def _wait_for_dispatcher(settings: Settings, report: Report) -> None:
    """Wait until a control worker dispatches, while its process lives: a busy machine may take minutes.

    Raises: InstallationFailed: the process ended, with the end of its log; or it does nothing for a quarter of an hour.
    """
    begun = told = time.monotonic()
    database = Database(settings.database(), pooled=False)
    while not dispatcher_leads(database):
        (state,) = (state for state in supervisor.states(settings) if state.name == "control")
        waited_s = time.monotonic() - begun
        if state.has_ended or waited_s > _DISPATCHER_MOST_S:
            log_file = logs_folder(settings) / "control.log"
            raise InstallationFailed(
                f"the control worker does not dispatch after {waited_s:.0f} s; it is {state.state}"
                f" ({state.description}). The end of {log_file}:\n{tail(log_file)}"
            )
        if time.monotonic() - told > _REPORT_EVERY_S:
            told = time.monotonic()
            report(f"waiting for the control worker to dispatch: {waited_s:.0f} s, it is {state.state}")
        time.sleep(0.1)


def _make_servers_ready(settings: Settings) -> None:
    if settings.embeds_postgres:
        postgres.wait_until_ready(settings)
    if settings.embeds_redis:
        redis.wait_until_ready(settings)
    schema.migrate(settings.database())


def _fingerprint_file(settings: Settings) -> Path:
    return run_folder(settings) / "fingerprint"


def _fingerprint(settings: Settings, wanted: tuple[Program, ...]) -> str:
    text = supervisor.configuration(settings, wanted) + repr(sorted(settings.variables().items()))
    return hashlib.sha256(text.encode()).hexdigest()


# --- Down ----------------------------------------------------------------------------------------------------------


def _stop_supervised(settings: Settings, report: Report, table: Table) -> tuple[list[str], list[str]]:
    if not supervisor.is_running(settings):
        report(f"no stack runs in {settings.home}")
        _end_elsewhere(settings, report)
        return [], []
    known = {state.name for state in supervisor.states(settings)}
    wanted = table(settings)
    running = [program for program in wanted if program.name in known]
    # What other settings started, such as more gateways: it may need the servers for its last words.
    others = sorted(known - {program.name for program in wanted})
    running += [Program(name, StartStage.MODELS, (), stop_wait_s=_OTHERS_STOP_S) for name in others]
    stopped: list[str] = []
    stragglers: list[str] = []
    for stage in reversed(StartStage):
        names = supervisor.stop_programs(settings, [program for program in running if program.stage is stage])
        if names:
            report(f"stopped {', '.join(names)}")
        stopped += names
        if stage is StartStage.HOSTS:
            # Before the servers go: instances that outlived the launcher would take their going for a fault.
            _end_elsewhere(settings, report)
            stragglers = leftovers.end_processes(settings, sparing=supervisor.family(settings))
    supervisor.shutdown(settings)
    return stopped, stragglers


def _remove_from_engine(settings: Settings) -> leftovers.Removed:
    """Spares what instances on other hosts have there: they may share a joined host's engine."""
    if not settings.joined:
        return leftovers.remove_from_engine(settings)
    try:
        database = Database(settings.database(), pooled=False)
        others = instances.live_ids(database) - set(hosts.standing(database, settings.host()))
    except DatabaseUnavailable:
        own = [folder.name for folder in (settings.home / "scratch").glob("*-*-*-*-*")]
        return leftovers.remove_from_engine(settings, only=own)
    return leftovers.remove_from_engine(settings, [str(one) for one in others])


def _end_elsewhere(settings: Settings, report: Report) -> None:
    try:
        if count := leftovers.end_instances(settings):
            report(f"ended {count} instances beyond this host")
    except MegaFlowError as error:
        report(f"instances beyond this host end in {settings.orphan_s:.0f} s: {error}")


def _stop_engine(settings: Settings, report: Report) -> tuple[bool, int]:
    if not engine.is_ours(settings):
        return False, 0
    if strangers := leftovers.strangers_in_engine(settings):
        report(f"the Docker engine that we started keeps running: {strangers} containers in it are not ours")
        return False, strangers
    report("stopping the Docker engine that we started")
    return engine.stop_engine(settings), 0


def _purge(settings: Settings) -> None:
    postgres.purge(settings)
    names = ("redis", "artifacts", "cache", "environments", "images", "local", "scratch")
    for folder in (*(settings.home / name for name in names), logs_folder(settings)):
        shutil.rmtree(folder, ignore_errors=True)
    for path in run_folder(settings).iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != "lock":  # it is held
            path.unlink(missing_ok=True)
    name_file(settings.home).unlink(missing_ok=True)
