"""Any mixture of faults, in any order, beside what is well: the auditor repairs them all and touches nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from app.ledger import audit
from app.ledger.database import Database
from app.models.endings import EndReason
from app.scheduling.auditor import Auditor
from app.settings import Settings
from tests.integration import rows
from tests.integration import test_audit as faults
from tests.services import MakeSettings

_BREAKS = [fault for table in faults.MENDED.values() for fault in table]


@pytest.fixture
def installation(make_settings: MakeSettings) -> Settings:
    return make_settings(ephemeral_capacity=1000, retry_base_s=0.0)


@pytest.fixture
def database(installation: Settings) -> Iterator[Database]:
    found = Database(installation.database())
    yield found
    found.close()


def _empty(database: Database) -> None:
    tables = (
        "specs, runs, tasks, attempts, leases, instances, events, semaphore_holders, pauses, bindings,"
        " created_resources"
    )
    with database.begin() as connection:
        connection.execute(text(f"TRUNCATE {tables} CASCADE"))


def _healthy(database: Database, ids: list[object]) -> list[object]:
    with database.begin() as connection:
        rows = connection.execute(
            text(
                "SELECT t.id, t.state, t.attempts, t.in_line, a.id, a.state, l.expires_at FROM tasks t"
                " LEFT JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts"
                " LEFT JOIN leases l ON l.attempt_id = a.id WHERE t.id = ANY(:ids) ORDER BY t.id"
            ),
            {"ids": ids},
        )
        return [tuple(row) for row in rows]


@pytest.mark.timeout(200)
def test_whatever_breaks_is_mended_and_the_rest_left_alone(database: Database, installation: Settings) -> None:
    @given(breaks=st.lists(st.sampled_from(_BREAKS), min_size=1, max_size=6, unique=True))
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    def check(breaks: list[faults.Break]) -> None:
        _empty(database)
        rows.begin()
        for fault in breaks:
            fault(database)
        faults.in_order(database)
        with database.begin() as connection:
            fine = list(connection.execute(text("SELECT id FROM tasks ORDER BY accepted_at DESC LIMIT 6")).scalars())
        before = _healthy(database, fine)
        auditor = Auditor(database, installation)
        auditor.audit()
        seen = audit.look(database, installation)
        assert seen.findings == (), [fault.__name__ for fault in breaks]
        assert auditor.audit().findings == ()
        assert _healthy(database, fine) == before
        _every_task_has_a_way_out(database)

    check()


def _every_task_has_a_way_out(database: Database) -> None:
    with database.begin() as connection:
        lost = connection.execute(
            text(
                "SELECT t.id FROM tasks t WHERE t.state = 'pending' AND NOT t.in_line"
                " AND t.available_at >= '9999-01-01'"
                " AND NOT EXISTS (SELECT FROM pauses p WHERE p.name = t.run_id::text)"
                " OR t.state IN ('admitted', 'running') AND NOT EXISTS (SELECT FROM attempts a WHERE a.task_id = t.id"
                " AND a.number = t.attempts AND a.state IN ('dispatched', 'running', 'grading'))"
            )
        ).all()
        assert lost == []
        reasons = connection.execute(
            text("SELECT DISTINCT end_reason FROM tasks WHERE end_reason IS NOT NULL")
        ).scalars()
        assert set(reasons) <= {reason.value for reason in EndReason}
