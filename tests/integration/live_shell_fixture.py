"""An attempt whose agent is at work until it is told to end, with the worker that has it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from app.client import MegaFlow
from app.evaluation import demo_tasks
from app.ledger.accept import NewRun, accept
from app.models.endings import EndReason
from app.models.outcome import TaskResult
from app.models.spec import EnvironmentKind, Mode, TaskSpec
from app.settings import Settings
from app.workers import services
from app.workers.attempt import carry_out
from app.workers.lease import LeaseRenewer
from tests.building import claim_of
from tests.waiting import eventually

_RESULT = '{"protocol": "megaflow-agent/1", "end_reason": "submitted"}'


def manifest(folder: Path) -> Path:
    """An agent that waits for the file `end` in the folder."""
    (folder / "waiter").mkdir(parents=True)
    script = f"while [ ! -e {folder}/end ]; do sleep 0.05; done\nprintf '%s' '{_RESULT}' > \"$HOME/result.json\"\n"
    (folder / "waiter" / "run").write_text(script)
    head = 'protocol = "megaflow-agent/1"\nversion = "1"\nname = "waiter"\nbundle = "waiter"\nneeds_model = false\n'
    (folder / "waiter.toml").write_text(f'{head}argv = ["sh", "{{tool}}/run"]\n')
    return folder / "waiter.toml"


@dataclass
class AtWork:
    """An attempt under way."""

    id: UUID
    run_id: UUID
    flow: MegaFlow
    folder: Path
    thread: threading.Thread

    def end(self) -> TaskResult:
        """Let its agent end; the task's result."""
        (self.folder / "end").touch()
        self.thread.join(60)
        return self.flow.run(self.run_id).results(timeout=10)[0]


@contextmanager
def at_work(
    settings: Settings, folder: Path, user_name: str = "default", kind: EnvironmentKind = EnvironmentKind.LOCAL
) -> Iterator[AtWork]:
    """The agent of `manifest` in an environment of this kind. settings: with that manifest."""
    with MegaFlow(settings) as flow:
        task = next(one for one in demo_tasks(settings, kind) if one.name == "order-ledger")
        spec = TaskSpec(task=task, agent="waiter", mode=Mode.EPHEMERAL)
        claim = claim_of(flow.database, accept(flow.database, NewRun(specs=[spec], user_name=user_name)), spec.mode)
        here = services.build(settings, pooled=True, max_idle=0)
        renewer = LeaseRenewer(here.database, settings, claim.instance_id)
        renewer.start()
        token = renewer.take(claim)
        thread = threading.Thread(target=carry_out, args=(claim, here, token))
        thread.start()
        try:
            eventually(lambda: token.on_wake is not None, "the agent's start", within_s=60)
            yield AtWork(claim.attempt_id, claim.run_id, flow, folder, thread)
        finally:
            token.stop(EndReason.CANCELLED)
            thread.join(60)
            renewer.close()
            here.close()
