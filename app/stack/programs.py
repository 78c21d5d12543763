"""Defines the programs of one machine's stack as data: change this table to change what `megaflow up` starts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import app
from app.settings import Settings
from app.stack import flower, postgres, redis
from app.stack.home import run_folder

DEMO_SCRIPTS = Path(app.__file__).parent / "datasets" / "demo" / "replay"
"""Replay scripts of the demo's dataset."""


class StartStage(IntEnum):
    """Stages of a start: each stage starts when the one before is ready. They stop in the opposite order."""

    SERVERS = 0
    """PostgreSQL and Redis. Migrations run when both are ready."""
    MODELS = 1
    """Services that agents use. They stop after the agents, so that calls of stopping attempts are still recorded."""
    HOSTS = 2
    """Parents of instances: instances end when the launcher ends."""
    WORK = 3
    """Programs that schedule work, and the web pages."""


@dataclass(frozen=True)
class Program:
    """Program that runs under supervisord."""

    name: str
    stage: StartStage
    command: tuple[str, ...]
    user: str | None = None
    """None: the user of supervisord."""
    stop_signal: str = "TERM"
    stop_wait_s: int = 10
    """Seconds until SIGKILL is sent to its whole process group."""
    restart: str = "true"
    """Restart policy of supervisord; `unexpected`: restart except after exit code 0."""
    keys: bool = False
    """Whether it gets the keys of model providers from the environment of `megaflow up`."""


def programs(settings: Settings) -> tuple[Program, ...]:
    """Returns the programs for these settings, in starting order."""
    if settings.joined:
        return _of_a_host(settings)
    table: list[Program] = []
    if settings.embeds_postgres:
        # SIGINT is PostgreSQL's fast shutdown: SIGTERM would wait for every client to disconnect.
        table.append(
            Program("postgres", StartStage.SERVERS, postgres.command(settings), postgres.owner(), "INT", stop_wait_s=30)
        )
    if settings.embeds_redis:
        table.append(Program("redis", StartStage.SERVERS, redis.command(settings), stop_wait_s=30))
    if settings.replay_url is None:
        table.append(Program("model", StartStage.MODELS, _replay(settings)))
    for number, port in enumerate(settings.gateway_ports(), 1):
        name = "gateway" if number == 1 else f"gateway-{number}"
        table.append(Program(name, StartStage.MODELS, _gateway(settings, port), stop_wait_s=25, keys=True))
    flower_option = f"--conf={flower.configuration_file(settings)}"
    table += [
        Program("launcher", StartStage.HOSTS, (sys.executable, "-m", "app.workers.launcher"), stop_wait_s=30),
        Program("control", StartStage.WORK, (sys.executable, "-m", "app.control.worker"), stop_wait_s=15),
        Program("beat", StartStage.WORK, _beat(settings)),
        Program("web", StartStage.WORK, (sys.executable, "-m", "app.web")),
        Program("flower", StartStage.WORK, (sys.executable, "-m", "app.stack.flower_server", flower_option)),
    ]
    return tuple(table)


def _of_a_host(settings: Settings) -> tuple[Program, ...]:
    """Returns the programs of a joined host: a pool and a grader. Their instances register themselves."""
    command = (sys.executable, "-m", "megaflow", "worker")
    chosen = ("--class", settings.host_class)
    return (
        Program("pool", StartStage.HOSTS, (*command, "persistent", *chosen), stop_wait_s=30, restart="unexpected"),
        Program("grader", StartStage.HOSTS, (*command, "grading", *chosen), stop_wait_s=30, restart="unexpected"),
    )


def _beat(settings: Settings) -> tuple[str, ...]:
    # No pid file: supervisord tracks the process, and a stale file would keep beat from starting after a crash.
    options = ("--pidfile=", f"--schedule={run_folder(settings) / 'beat-schedule'}", f"--loglevel={settings.log_level}")
    return (sys.executable, "-m", "celery", "-A", "app.celery_app", "beat", *options)


def _replay(settings: Settings) -> tuple[str, ...]:
    address = ("--host", settings.bind, "--port", str(settings.replay_port))
    folders = (str(folder) for folder in (DEMO_SCRIPTS, *settings.replay_scripts))
    recordings = ("--recordings", str(settings.recordings))
    return (sys.executable, "-m", "app.model_service.replay", *address, *recordings, "--scripts", *folders)


def _gateway(settings: Settings, port: int) -> tuple[str, ...]:
    address = ("--host", settings.bind, "--port", str(port))
    # Open calls get 5 s; then they are cut off and recorded, up to 10 s more. `stop_wait_s` allows for both.
    return (sys.executable, "-m", "app.model_service.gateway", *address, "--grace", "5")
