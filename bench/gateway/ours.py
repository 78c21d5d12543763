"""Our gateway as a process of its own, with a real PostgreSQL that syncs and a real Redis; nothing of it stays."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

from sqlalchemy import text

from app.ledger import accept, admission, attempts, instances, model_sessions
from app.ledger.accept import NewRun
from app.ledger.attempts import ClaimRequest
from app.ledger.database import Database
from app.ledger.instances import InstanceDemand
from app.models.spec import AgentTask, Bundle, EnvironmentSpec, Limits, Mode, ModelChoice, ScriptGoal, TaskSpec
from app.stack.private import PrivateStack, private_stack
from app.stack.programs import Program, StartStage
from bench.control_system import forget_installation
from bench.gateway import wire

GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Gateway:
    """Ours, running."""

    stack: PrivateStack
    database: Database

    @property
    def pid(self) -> int:
        return self.stack.pids[GATEWAY]

    def tokens(self, count: int, user: str = "default") -> tuple[str, ...]:
        """Keys of so many running attempts, which were accepted, admitted and claimed like any other."""
        run = accept.accept(self.database, NewRun(specs=[_spec()], replicas=count, user_name=user))
        with self.database.begin() as connection:
            published = admission.admit(connection, [(task_id, Mode.PERSISTENT) for task_id in run.task_ids])
            wanted = InstanceDemand("process", Mode.PERSISTENT, "standard", 1, count, None)
            standing = instances.request(connection, wanted)
        instances.ready_many(self.database, standing)
        offers = [ClaimRequest(item.message, instance) for item, instance in zip(published, standing, strict=True)]
        claims = attempts.claim_many(self.database, offers, lease_s=86_400)
        assert len(claims) == count
        made = tuple(secrets.token_urlsafe(32) for _ in claims)
        for claimed, token in zip(claims, made, strict=True):
            model_sessions.open_session(self.database, claimed, token)
        return made

    def recorded(self) -> int:
        """Calls that stand in the ledger."""
        with self.database.begin() as connection:
            return int(connection.execute(text("SELECT count(*) FROM model_calls")).scalar_one())


def _spec() -> TaskSpec:
    """A task whose agent may call as often as the benchmark wants; its limits are looked at all the same."""
    task = AgentTask(
        name="bench",
        description="do it",
        environment=EnvironmentSpec(image="example"),
        goal=ScriptGoal(tests=Bundle(sha256="0" * 64, size_bytes=0)),
        limits=Limits(max_steps=1_000_000_000),
    )
    return TaskSpec(task=task, agent="nop", mode=Mode.PERSISTENT, model=ModelChoice(name=wire.MODEL))


@contextmanager
def gateway(
    engine_url: str, port: int, *, module: str = "app.model_service.gateway", **settings: Any
) -> Iterator[Gateway]:
    """The gateway before that engine. Raises: MegaFlowError: it does not start."""
    forget_installation()
    overrides = {"model_base_url": engine_url, "gateway_port": port, **settings}
    with private_stack(overrides, control_workers=0) as stack:
        command = (sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port))
        stack.start(Program(GATEWAY, StartStage.HOSTS, command, stop_wait_s=15))
        stack.wait_for(GATEWAY, lambda: answers(f"http://127.0.0.1:{port}/health"))
        database = Database(stack.settings.database())
        try:
            yield Gateway(stack, database)
        finally:
            database.close()


def answers(url: str) -> bool:
    """Whether a GET there is answered with 200."""
    try:
        with urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:  # refused, too slow, or another status
        return False


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])
