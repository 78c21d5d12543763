"""Plans of the statements that the dispatcher, the leases and the workers run all the time, beside 100,000 old rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, event

from app.ledger import (
    accept,
    admission,
    attempts,
    ends,
    gradings,
    graphs,
    instances,
    pauses,
    quotas,
    replicas,
    tasks,
    waiting,
)
from app.ledger.accept import NewRun
from app.ledger.attempts import Claim
from app.ledger.database import Database
from app.models.endings import EndReason
from app.models.graphs import ComesAfter
from app.models.instance import InstanceMode
from app.models.outcome import AgentResult, Phase, Verdict, WakeUpMessage
from app.models.spec import Mode
from tests.building import RETRY, a_spec, accepted, claimed, ready_instance

ROWS = 100_000
LARGE = {"tasks", "attempts", "events"}

_FILL = """
INSERT INTO specs (digest, body) VALUES ('old', :body);
INSERT INTO runs (id, name, user_name, purpose, total)
SELECT md5('run' || n)::uuid, 'old', 'user' || n, 'evaluation', 1000 FROM generate_series(1, 100) n;
INSERT INTO tasks (id, run_id, group_id, replica, spec_digest, name, agent, user_name, requested_mode, resource_class,
    lifetime_s, max_attempts, attempts, state, finished_at, in_line)
SELECT md5('task' || n)::uuid, md5('run' || n % 100 + 1)::uuid, md5('task' || n)::uuid, 0, 'old', 'old', 'nop',
    'user' || n % 100 + 1, 'persistent', 'standard', 60, 3, 1, CASE WHEN n % 5 = 0 THEN 'pending' ELSE 'succeeded' END,
    now(), n % 10 = 0 FROM generate_series(1, :rows) n;
INSERT INTO attempts (id, task_id, number, state, user_name, mode, resource_class, finished_at, end_reason)
SELECT md5('attempt' || n)::uuid, md5('task' || n)::uuid, 1, 'finished', 'user' || n % 100 + 1, 'persistent',
    'standard', now(), 'submitted' FROM generate_series(1, :rows) n;
INSERT INTO events (kind, task_id) SELECT 'attempt.finished', md5('task' || n)::uuid FROM generate_series(1, :rows) n;
"""


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    found = Database(database_url)
    values = {"rows": ROWS, "body": a_spec().model_dump_json()}
    for statement in filter(None, _FILL.split(";\n")):
        found.sql(statement, values)
    found.sql("ANALYZE")
    yield found
    found.close()


def _within(database: Database, read: Callable[[Connection], object]) -> None:
    with database.begin() as connection:
        read(connection)


def _dispatch(connection: Connection) -> None:
    """All that one look of the dispatcher reads, and the tasks that it moves."""
    graphs.settle(connection, 100)
    admission.promote(connection, 100)
    queues = waiting.queues(connection)
    heads = waiting.heads(connection, [(queue, 10) for queue in queues])
    waiting.backlogs(connection, queues, 100, waiting.bounded_runs(connection))
    waiting.occupancy(connection)
    admission.admit(connection, [(task.task_id, Mode.PERSISTENT) for task in heads[queues[0]]])
    admission.unpublished(connection, 30.0, 1000, at_host_s=1.0)
    admission.next_due_s(connection)
    gradings.unpublished(connection, 30.0)
    instances.failing(connection, 3)


def _work(database: Database, claim: Claim) -> dict[str, Callable[[], object]]:
    """What a claimed attempt writes until its end, and what is looked at beside it, by name."""
    idle, grader, other = ready_instance(database), ready_instance(database, InstanceMode.GRADING), claimed(database)
    message = WakeUpMessage(attempt_id=other.attempt_id, number=1)
    later = NewRun([a_spec()], upstream=ComesAfter(frozenset([claim.task_id, other.task_id])))
    return {
        "accept what comes after": lambda: accept.accept(database, later),
        "dispatch": lambda: _within(database, _dispatch),
        "claim another": lambda: attempts.claim_any(database, idle, lease_s=30),
        "renew": lambda: attempts.renew(database, [claim.attempt_id], lease_s=30),
        "record a phase": lambda: attempts.record_phase(database, claim, Phase.IMAGE_READY),
        "look up earlier failures": lambda: attempts.failed_before(database, claim, "EnvironmentFailed"),
        "finish": lambda: ends.finish(database, claim, verdict=Verdict(reward=1.0, counts=True)),
        "settle": lambda: _within(database, lambda connection: graphs.settle(connection, 100)),
        "hand over": lambda: gradings.hand_over(database, other, AgentResult(end_reason=EndReason.SUBMITTED)),
        "claim a grading": lambda: gradings.claim(database, message, grader, lease_s=30),
        "lose a grader": lambda: instances.exited(database, grader, -9, "killed", RETRY),
        "cancel a queued grading": lambda: tasks.cancel(database, [other.task_id]),
        "cancel what waits": lambda: _within(database, lambda connection: graphs.settle(connection, 100)),
        "try again": lambda: tasks.retry(database, [other.task_id]),
        "cancel a graph": lambda: tasks.cancel(database, [other.task_id]),
        "take back": lambda: _within(database, lambda connection: waiting.reclaim_lapsed(connection, RETRY)),
        "expire": lambda: _within(database, lambda connection: tasks.expire(connection, RETRY)),
        "tend groups": lambda: replicas.tend(database, 30, RETRY),
        "end the cancelled": lambda: tasks.settle_cancelled(database),
        "close an instance": lambda: instances.exited(database, idle, 0, "it left", RETRY),
        "check a quota": lambda: _within(database, lambda connection: quotas.check_pending(connection, "user1", 1)),
        "check budgets": lambda: pauses.hold_spent(database),
        "accept": lambda: accepted(database),
    }


def _scans(connection: Any, statement: str, parameters: Any) -> set[str]:
    """The large tables that a statement would read from end to end."""
    (plan,) = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", parameters).scalar_one()
    nodes, found = [plan["Plan"]], set()
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", ())
        if node["Node Type"] == "Seq Scan":
            found.add(node["Relation Name"])
    return found & LARGE


def test_no_hot_statement_reads_a_large_table_from_end_to_end(database: Database) -> None:
    assert quotas.set_quota(database, "*", pending=10 * ROWS).pending == 10 * ROWS
    ran: list[tuple[str, str, Any]] = []
    name = "claim"

    def note(_c: object, _cursor: object, statement: str, parameters: Any, *_rest: object) -> None:
        if statement.lstrip().startswith(("SELECT", "WITH", "UPDATE", "DELETE")):
            ran.append((name, statement, parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    claim = claimed(database)
    for name, act in _work(database, claim).items():  # noqa: B007  `note` reads it
        act()
    event.remove(database.engine, "before_cursor_execute", note)
    with database.engine.connect() as connection:
        scans = [(of, statement, found) for of, statement, v in ran if (found := _scans(connection, statement, v))]
    assert scans == []
    assert len({statement for _, statement, _ in ran}) > 30, "the statements were seen"
