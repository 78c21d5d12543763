"""A replica that its group no longer needs: told by the control plane, its container gone within five seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.environments.listing import listed
from app.evaluation import Submission
from app.ledger import experience
from app.ledger.experience import EndedAttempt, ExperienceRun, StoredSamples
from tests.acceptance.conftest import System
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.extra, pytest.mark.timeout(300)]

_GONE_S = 5.0
_PIDS = (
    "SELECT i.handle FROM instances i JOIN attempts a ON a.instance_id = i.id JOIN tasks t ON t.id = a.task_id"
    " WHERE t.run_id = :run"
)


@pytest.mark.parametrize(("mode", "hung"), [("persistent", False), ("ephemeral", False), ("ephemeral", True)])
def test_the_container_of_a_superseded_replica_is_gone_within_five_seconds(
    system: System, task_folder: Callable[..., Path], mode: str, hung: bool
) -> None:
    own = f"FROM megaflow/base:bookworm\nENV TRIED={mode}-{hung}\nWORKDIR /app\n"  # no environment of others fits it
    folder = task_folder(f"to-supersede-{mode}-{hung}", solve="sleep 300", dockerfile=own)
    asked = Submission(dataset=str(folder), agent="oracle", mode=mode, replicas=2, purpose="training", quorum=1)
    run = system.flow.submit(asked)
    database = system.flow.database

    def working() -> list[tuple[str, str]]:
        return system.rows(
            "SELECT a.id, t.group_id, t.id AS task FROM attempts a JOIN tasks t ON t.id = a.task_id"
            " WHERE t.run_id = :run AND a.phases ? 'agent_started' AND a.state = 'running'",
            run=run.id,
        )

    def containers() -> set[str]:
        """What stands on this host and its engine, of all that was made for the run."""
        made = {
            row.engine_id for row in system.rows("SELECT engine_id FROM created_resources WHERE run_id = :r", r=run.id)
        }
        return made & {thing.id for thing in listed(system.settings)[0]}

    eventually(lambda: len(working()) == 2, within_s=60)
    eventually(lambda: len(containers()) == 2)
    for row in system.rows(_PIDS, run=run.id) if hung else ():
        os.kill(int(row.handle), signal.SIGSTOP)
    experience.open_run(database, ExperienceRun(run.id, "policy"))
    attempt, group, task = working()[0]
    ended = EndedAttempt(attempt, task, 1, run.id, group, "t", "oracle", "policy", "submitted", 1.0, {}, "", None)
    began = time.monotonic()
    experience.record(database, ended, StoredSamples("k", 1, 2, 1, ()))  # the control plane alone tells the workers
    eventually(lambda: not containers(), within_s=_GONE_S)
    took_s = time.monotonic() - began
    print(f"{mode}, {hung=}: containers of two superseded replicas gone after {took_s:.2f} s")
    assert took_s < _GONE_S
    eventually(lambda: not working())
    ends = system.rows("SELECT end_reason, verdict FROM tasks WHERE run_id = :run", run=run.id)
    assert [tuple(row) for row in ends] == [("superseded", None)] * 2
    assert "2 superseded" in system.megaflow("status", str(run.id)).stderr
