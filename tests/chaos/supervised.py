"""A case under the product's own `megaflow up`: supervisord keeps the programs, the embedded servers are among them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.errors import StackNotRunning
from app.settings import Settings
from app.stack import leftovers, postgres, redis, supervisor
from app.stack.programs import StartStage, programs


@dataclass
class Supervised:
    """The servers' part: they come back by themselves."""

    settings: Settings

    def url(self, database: str, folder: Path | None = None) -> str:
        return f"postgresql://postgres@/{database}?host={folder or self.settings.postgres_socket_dir}"

    def start_postgres(self) -> None:
        postgres.wait_until_ready(self.settings, timeout_s=60)

    def start_redis(self) -> None:
        redis.wait_until_ready(self.settings, timeout_s=60)


@dataclass
class SupervisedPrograms:
    """The programs' part."""

    settings: Settings
    faults_folder: Path

    def pids(self) -> dict[str, int]:
        """Process ids of what runs under supervisord, by name."""
        return {state.name: state.pid for state in supervisor.states(self.settings) if state.pid}

    def down(self) -> list[str]:
        """Programs that do not run, with their state."""
        return [f"{state.name} is {state.state}" for state in supervisor.states(self.settings) if not state.runs]

    def instances(self) -> list[psutil.Process]:
        """The workers that the launcher has made."""
        with suppress(psutil.Error, KeyError, StackNotRunning):
            return psutil.Process(self.pids()["launcher"]).children()
        return []

    def family(self) -> set[int]:
        """Supervisord and what still runs under it."""
        with suppress(StackNotRunning):
            return supervisor.family(self.settings)
        return set()

    def stop_all(self) -> list[str]:
        """Stop everything but the servers, as `megaflow down` does; what outlived that."""
        table = programs(self.settings)
        for stage in (StartStage.WORK, StartStage.HOSTS, StartStage.MODELS):
            supervisor.stop_programs(self.settings, [program for program in table if program.stage is stage])
        family = self.family()
        return [f"{one.pid} {one.name()}" for one in leftovers.processes(self.settings) if one.pid not in family]
