"""The fixture of one case: an installation of its own on the suite's servers, what is submitted to it, what is done to
it, and what it looks like at the end."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from sqlalchemy import text

from app.agents.catalogue import AGENTS
from app.environments.listing import listed
from app.errors import DatabaseUnavailable
from app.instances.simulated import SimulatedProvider
from app.ledger import accept
from app.ledger.accept import NewRun
from app.ledger.database import Database, dispatcher_leads
from app.ledger.receipts import ObjectKind
from app.models.simulation import Simulation
from app.models.spec import Mode
from app.settings import Settings
from app.stack import home
from app.submission import specs_for
from tests.chaos import work as works
from tests.chaos.programs import Programs, wait_for
from tests.chaos.relay import Relay
from tests.chaos.servers import Servers
from tests.chaos.watch import Watch
from tests.chaos.work import Work

QUICK = {
    "lease_s": 3.0,
    "sweep_s": 1.0,
    "republish_s": 2.0,
    "retry_base_s": 0.1,
    "retry_cap_s": 1.0,
    "ephemeral_idle_s": 4.0,
    "ephemeral_capacity": 6,
    "persistent_instances": 1,
    "persistent_slots": 3,
    "host_cpu_most": 0.0,
    "boot_timeout_s": 30.0,
    "drain_s": 1.0,
    "environment_starts": 4,
    "log_level": "INFO",
}
"""Settings of every case: the product's, with times so short that a fault's whole story fits in seconds."""

NOTHING = Work()
"""A task whose agent does nothing."""

End = tuple[str, str]
"""Task state and end reason."""
GRADED: frozenset[End] = frozenset({("succeeded", "submitted")})
CANCELLED: frozenset[End] = GRADED | {("cancelled", "cancelled")}


@dataclass(frozen=True, slots=True)
class Batch:
    """Tasks that were accepted together, and the ends that are right for them."""

    run_id: UUID
    task_ids: tuple[UUID, ...]
    names: tuple[str, ...]
    allowed: frozenset[End]
    exclusive: bool  # no two attempts of one task may have acted at the same time, whatever the ledger says


@dataclass
class Fixture:
    """One installation and its case."""

    servers: Servers
    settings: Settings
    database_name: str
    out: Path
    programs: Programs
    watch: Watch
    batches: list[Batch] = field(default_factory=list)
    struck_at: list[tuple[float, str]] = field(default_factory=list)  # faults from outside: unix seconds, what
    simulated_faults: int = 0
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # what must not be, found by the case itself
    redis_relay: Relay | None = None
    postgres_relay: Relay | None = None

    @cached_property
    def database(self) -> Database:
        """The harness's own way to PostgreSQL, past any relay."""
        return Database(self.servers.url(self.database_name), pooled=False)

    @property
    def faults_folder(self) -> Path:
        return self.programs.faults_folder

    def start(self, *names: str, within_s: float = 60, led: bool = True, **plans: Sequence[Any]) -> None:
        """Start programs, each with its plan (`control=[…]`), and return when a dispatcher leads, if one will."""
        for name in names or ("launcher", "control"):
            self.programs.start(name, plans.get(name.replace("-", "_"), ()))
        self._wait_until_up("launcher.sock", within_s, led=led)

    def simulate(self, *controls: str, **behaviour: Any) -> None:
        """Start the simulated provider's host and control workers; the settings must name that provider."""
        simulation = json.dumps(Simulation.of(**behaviour).model_dump(mode="json"))
        self.programs.start("simulation", arguments=[simulation])
        for name in controls or ("control",):
            self.programs.start(name)
        self._wait_until_up("simulator.sock", 60)

    def behave(self, **behaviour: Any) -> None:
        """Another behaviour of the simulated provider from here on; what it has broken until now is counted."""
        self.simulated_faults += self.rows(
            "SELECT (SELECT count(*) FROM attempts WHERE state IN ('lost', 'error', 'interrupted'))"
            " + (SELECT count(*) FROM instances WHERE state = 'failed')"
        )[0][0]
        # An answer that is lost ends nothing: the same instances are asked for again.
        log = self.settings.home / "logs" / "control.log"
        self.simulated_faults += log.read_text(errors="replace").count("dispatcher.launch_unclear")
        SimulatedProvider(self.settings).behave(Simulation.of(**behaviour))

    def _wait_until_up(self, socket: str, within_s: float, *, led: bool = True) -> None:
        path = home.run_folder(self.settings) / socket
        if not wait_for(lambda: path.exists() and (not led or self._led()), within_s):
            raise RuntimeError(f"the programs did not come up within {within_s} s: see {self.settings.home / 'logs'}")

    def _led(self) -> bool:
        try:
            return dispatcher_leads(self.database)
        except DatabaseUnavailable:
            return False

    def pool_ready(self, within_s: float = 40) -> None:
        """Return when the standing instances take work."""
        ready = "SELECT 1 FROM instances WHERE mode = 'persistent' AND state = 'ready'"
        if not wait_for(lambda: self.rows(ready), within_s):
            raise RuntimeError("the standing pool did not become ready")

    def submit(
        self,
        count: int,
        *,
        mode: Mode | str,
        work: Work = NOTHING,
        name: str = "task",
        allowed: frozenset[End] = GRADED,
        exclusive: bool = False,
        user_name: str = "default",
        key: str | None = None,
    ) -> Batch:
        """Accept `count` tasks of one kind. Those that do nothing share a spec; those that act have a name each."""
        names = [f"{name}-{n}" for n in range(count)] if work.seconds else [name]
        tasks = works.tasks(self.settings, names, work)
        specs = specs_for(tasks, agent=work.agent, mode=mode, model=None, agents=AGENTS)
        replicas = count // len(names)
        new = NewRun(specs=specs, replicas=replicas, user_name=user_name, idempotency_key=key)
        accepted = accept.accept(self.database, new)
        batch = Batch(accepted.run_id, accepted.task_ids, accepted.names, allowed, exclusive)
        self.batches.append(batch)
        return batch

    def adopt(self, run_id: UUID) -> None:
        """Judge a run that somebody else submitted for us (a schedule)."""
        found = self.rows("SELECT id, name FROM tasks WHERE run_id = :run ORDER BY id", run=run_id)
        ids, names = tuple(row.id for row in found), tuple(row.name for row in found)
        self.batches.append(Batch(run_id, ids, names, GRADED, exclusive=False))

    def rows(self, statement: str, **values: Any) -> list[Any]:
        """Raises: DatabaseUnavailable."""
        with self.database.begin() as connection:
            return list(connection.execute(text(statement), values))

    def eventually(self, statement: str, within_s: float = 30.0, **values: Any) -> list[Any]:
        """The rows of a query as soon as it has some; through outages of the database.

        Raises: RuntimeError: it had none in time.
        """
        found: list[Any] = []

        def look() -> bool:
            with suppress(DatabaseUnavailable):
                found[:] = self.rows(statement, **values)
            return bool(found)

        if not wait_for(look, within_s):
            raise RuntimeError(f"it did not happen within {within_s} s: {statement}")
        return found

    def acting(self, count: int = 1, within_s: float = 60) -> list[Any]:
        """Return when `count` attempts are in their agents' hands: (attempt id, task id, instance id, pid)."""
        statement = (
            "SELECT a.id, a.task_id, a.instance_id, i.handle::int AS pid FROM attempts a"
            " JOIN instances i ON i.id = a.instance_id WHERE a.state = 'running' AND a.phases ? 'agent_started'"
            " AND i.handle ~ '^[0-9]+$' ORDER BY a.claimed_at"
        )
        give_up = time.monotonic() + within_s
        while True:
            with suppress(DatabaseUnavailable):
                found = self.rows(statement)
                if len(found) >= count:
                    return found
            if time.monotonic() > give_up:
                raise RuntimeError(f"expected {count} acting attempts within {within_s} s")
            time.sleep(0.05)

    def struck(self, what: str) -> None:
        """Note that a fault was injected from outside, now."""
        self.struck_at.append((time.time(), what))

    def wait(self, within_s: float) -> bool:
        """Until every accepted task has ended; False when they did not in time."""
        statement = "SELECT count(*) FROM tasks WHERE state NOT IN ('succeeded', 'failed', 'cancelled')"

        def ended() -> bool:
            try:
                return not self.rows(statement)[0][0]
            except DatabaseUnavailable:
                return False

        return wait_for(ended, within_s, every_s=0.25)

    def settle(self, within_s: float = 25.0) -> None:
        """Give leases, instances and sweepers the time to come to rest; what does not is wrong."""
        left: list[str] = []

        def rested() -> bool:
            with suppress(DatabaseUnavailable):
                left[:] = self._unrest()
                return not left
            return False

        if not wait_for(rested, within_s, every_s=0.5):
            self.wrong += [f"after {within_s:.0f} s of rest: {what}" for what in left]

    def _unrest(self) -> list[str]:
        counts = {
            "live attempts": "SELECT count(*) FROM attempts WHERE state IN ('dispatched', 'running', 'grading')",
            "gradings": "SELECT count(*) FROM gradings",
            "leases": "SELECT count(*) FROM leases",
            "ephemeral instances": "SELECT count(*) FROM instances WHERE mode = 'ephemeral'"
            " AND state NOT IN ('terminated', 'failed')",
            "unswept instances": "SELECT count(*) FROM instances WHERE swept_at IS NULL"
            " AND state IN ('terminated', 'failed')",
        }
        found = {what: int(self.rows(statement)[0][0]) for what, statement in counts.items()}
        # A standing pool keeps nothing of a local environment: what is there belongs to nobody.
        found["folders"] = len(self._folders())
        return [f"{count} {what}" for what, count in found.items() if count]

    def left_behind(self) -> list[str]:
        """What exists although everything was stopped: processes, folders, containers."""
        return [*self._processes(), *self._folders(), *self._environments()]

    def _processes(self) -> list[str]:
        own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid in own or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if any(str(self.settings.home) in value for value in process.environ().values()):
                    found.append(f"process {process.pid} {' '.join(process.cmdline())[:80]}")
        return found

    def _folders(self) -> list[str]:
        """Environments, and what agents wrote beside them; an instance's own, empty folder is nothing."""
        scratch = [path for path in (self.settings.home / "scratch").glob("*") if any(path.iterdir())]
        return [
            f"folder {path.parent.name}/{path.name}" for path in [*(self.settings.home / "local").glob("*"), *scratch]
        ]

    def _environments(self) -> list[str]:
        """Containers, networks and what no engine knows of. Volumes are listed without a label: of anybody."""
        apart = (ObjectKind.FOLDER, ObjectKind.VOLUME)
        return [f"{one.kind} {one.id[:12]}" for one in listed(self.settings)[0] if one.kind not in apart]

    def close(self) -> None:
        self.watch.stop()
        for relay in (self.redis_relay, self.postgres_relay):
            if relay is not None:
                relay.close()
        self.database.close()


@contextmanager
def fixture(
    servers: Servers, out: Path, *, redis_relay: bool = False, postgres_relay: bool = False, **changes: Any
) -> Iterator[Fixture]:
    """An installation for the length of the block; its programs are ended with it. `changes` are settings."""
    folder = servers.folder / uuid.uuid4().hex[:6]
    with servers.database() as name:
        where = Settings(home=folder, **{**QUICK, **changes})
        home.prepare(where)
        redis_socket, postgres_folder = servers.settings.redis_socket, servers.settings.postgres_socket_dir
        relays: dict[str, Relay] = {}
        if redis_relay:
            relays["redis_relay"] = Relay(folder / "run" / "r.sock", redis_socket)
            redis_socket = folder / "run" / "r.sock"
        if postgres_relay:
            target = postgres_folder / ".s.PGSQL.5432"
            relays["postgres_relay"] = Relay(folder / "run" / "pg" / ".s.PGSQL.5432", target)
            postgres_folder = folder / "run" / "pg"
        settings = Settings(
            home=folder,
            installation=f"chaos-{folder.name}",
            database_url=servers.url(name, postgres_folder),
            broker_url=f"redis+socket://{redis_socket}",
            **{**QUICK, **changes},
        )
        faults_folder = folder / "faults"
        faults_folder.mkdir()
        watch = Watch(servers.url(name))
        here = Fixture(servers, settings, name, out, Programs(settings, faults_folder), watch, **relays)  # type: ignore[arg-type]
        watch.start()
        try:
            yield here
        finally:
            here.programs.close()
            _end_stragglers(here)
            here.close()
            if not os.environ.get("CHAOS_KEEP"):
                shutil.rmtree(folder, ignore_errors=True)


def _end_stragglers(here: Fixture) -> None:
    """What a broken case left running must not disturb the next."""
    for line in here._processes():
        with suppress(psutil.Error):
            psutil.Process(int(line.split()[1])).kill()
