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
    """Result of `up`."""

    engine: EngineReport
    programs: tuple[str, ...]
    """All programs that run now."""
    started: tuple[str, ...]
    """Programs started by this call; empty: the stack was running."""
    took_s: float
    restart_needed: bool = False
    """Whether the running stack has other settings than these."""


@dataclass(frozen=True)
class DownReport:
    """Result of `down`: what it ended and removed."""

    programs: tuple[str, ...] = ()
    stragglers: tuple[str, ...] = ()
    """MegaFlow's processes that no longer ran under supervisord: `pid name`."""
    removed: Removed = field(default_factory=Removed)
    engine_stopped: bool = False
    engine_kept_for: int = 0
    """Number of others' running containers; because of them, the engine that we started was left running."""


def up(
    settings: Settings,
    report: Report,
    *,
    may_install: bool = True,
    base: bool = True,
    dockerd: Dockerd = DOCKERD,
    table: Table = programs,
) -> StackReport:
    """Starts the stack, or starts missing programs of a running one; safe to repeat.

    The stack also starts without an engine: see `StackReport.engine`. `base`: also build the base image. If the running
    stack has other settings or lacks a program of `table`, nothing is started and `restart_needed` is set.

    Raises: SettingsInvalid, InstallationFailed, DatabaseUnavailable, BrokerUnavailable: with the fix in the message.
        StackNotRunning: another `up` or `down` holds this home's lock.
    """
    started_at = time.monotonic()
    prepare(settings)
    with exclusively(settings):
        container_engine = _ensure_engine(settings, report, may_install=may_install, base=base, dockerd=dockerd)
        selected = table(settings)
        with _stopped_on_failure(settings, report, table, container_engine):
            if not supervisor.is_running(settings):
                _start_supervisor(settings, report, table)
                selected = table(settings)  # again: preparing the servers decides where their data is
            differs = _fingerprint_file(settings).read_text() != _fingerprint(settings, selected)
            started = [] if differs else _start_missing(settings, selected, report)
        if not started and not differs:
            report(f"the stack in {settings.home} is running already")
        return StackReport(
            engine=container_engine,
            programs=tuple(program.name for program in selected),
            started=tuple(started),
            took_s=time.monotonic() - started_at,
            restart_needed=differs,
        )


def down(settings: Settings, report: Report, *, purge: bool = False, table: Table = programs) -> DownReport:
    """Ends the stack and removes all of it except its data; safe to repeat, and after a crash.

    `purge` also deletes the data: the embedded servers', artifacts, logs, and files left by attempts. Installed
    programs (`tools`) and files made by hand (`recordings`) stay and are listed in the report.

    Raises: StackNotRunning: another `up` or `down` holds this home's lock.
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
            remaining = ", ".join(sorted(path.name for path in settings.home.iterdir() if path != run_folder(settings)))
            note = f"; {remaining} stays: installed programs, and files made by hand, cost time to make again"
            report(f"deleted the data in {settings.home}{note if remaining else ''}")
    return DownReport(tuple(stopped), tuple(stragglers), removed, engine_stopped, strangers)


@contextmanager
def _stopped_on_failure(
    settings: Settings, report: Report, table: Table, container_engine: EngineReport
) -> Iterator[None]:
    """Stops the programs started in the block when the block fails, and the engine if this `up` started it."""
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
    engine_report = engine.ensure_engine(settings, may_install=may_install, dockerd=dockerd, report=report)
    if not engine_report.available:
        report(f"no Docker engine: {engine_report.why}; try: {engine_report.fix}")
    elif base:
        try:
            base_image.ensure_base_image(settings, report=report)
        except (EngineUnavailable, ImageBuildFailed, ImageUnavailable) as error:
            # Datasets that bring their own images need no base.
            report(f"no base image: {error}")
    tools.ensure_tools(settings, may_install=may_install, report=report)
    return engine_report


def _start_supervisor(settings: Settings, report: Report, table: Table) -> None:
    # A killed supervisord leaves its servers running; they still use the data.
    if orphans := leftovers.end_processes(settings):
        report(f"ended {len(orphans)} processes of a stack that had crashed")
    if not settings.joined:
        ports.refuse_in_use(settings)
        flower.prepare(settings)
    if settings.embeds_postgres:
        postgres.prepare(settings)
    if settings.embeds_redis:
        redis.prepare(settings)
    selected = table(settings)
    _fingerprint_file(settings).write_text(
        _fingerprint(settings, selected)
    )  # before the start: a running stack always has one
    supervisor.start(settings, selected)


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
    """Waits until a control worker dispatches, while its process lives: a busy machine may need minutes.

    Raises: InstallationFailed: the process ended (with the end of its log), or it did not dispatch within 15 minutes.
    """
    started_at = reported_at = time.monotonic()
    database = Database(settings.database(), pooled=False)
    while not dispatcher_leads(database):
        (state,) = (state for state in supervisor.states(settings) if state.name == "control")
        waited_s = time.monotonic() - started_at
        if state.has_ended or waited_s > _DISPATCHER_MOST_S:
            log_file = logs_folder(settings) / "control.log"
            raise InstallationFailed(
                f"the control worker does not dispatch after {waited_s:.0f} s; it is {state.state}"
                f" ({state.description}). The end of {log_file}:\n{tail(log_file)}"
            )
        if time.monotonic() - reported_at > _REPORT_EVERY_S:
            reported_at = time.monotonic()
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


def _stop_supervised(settings: Settings, report: Report, table: Table) -> tuple[list[str], list[str]]:
    if not supervisor.is_running(settings):
        report(f"no stack runs in {settings.home}")
        _end_elsewhere(settings, report)
        return [], []
    known = {state.name for state in supervisor.states(settings)}
    selected = table(settings)
    running = [program for program in selected if program.name in known]
    # Programs started with other settings, such as more gateways: they may still need the servers while they end.
    others = sorted(known - {program.name for program in selected})
    running += [Program(name, StartStage.MODELS, (), stop_wait_s=_OTHERS_STOP_S) for name in others]
    stopped: list[str] = []
    stragglers: list[str] = []
    for stage in reversed(StartStage):
        names = supervisor.stop_programs(settings, [program for program in running if program.stage is stage])
        if names:
            report(f"stopped {', '.join(names)}")
        stopped += names
        if stage is StartStage.HOSTS:
            # Before the servers stop: instances that outlived the launcher would treat it as a fault.
            _end_elsewhere(settings, report)
            stragglers = leftovers.end_processes(settings, sparing=supervisor.family(settings))
    supervisor.shutdown(settings)
    return stopped, stragglers


def _remove_from_engine(settings: Settings) -> leftovers.Removed:
    """Removes this stack's objects from the engine, except those of other hosts, which may share the engine."""
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
        elif path.name != "lock":  # we hold this lock
            path.unlink(missing_ok=True)
    name_file(settings.home).unlink(missing_ok=True)
