"""Any mixture of faults, in any order, beside what is well: the auditor repairs them all and touches nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.ledger import audit
from app.ledger.database import Database
from app.models.endings import EndReason
from app.scheduling.auditor import Auditor
from app.settings import Settings
from tests.integration import rows
from tests.integration import test_audit as faults
from tests.services import MakeSettings


@pytest.fixture
def installation(make_settings: MakeSettings) -> Settings:
    return make_settings(ephemeral_capacity=1000, retry_base_s=0.0)


@pytest.fixture
def database(installation: Settings) -> Iterator[Database]:
    found = Database(installation.database())
    yield found
    found.close()


def _empty(database: Database) -> None:
    kept = "events, semaphore_holders, pauses, bindings, created_resources"
    rows.write(database, f"TRUNCATE specs, runs, tasks, attempts, leases, instances, {kept} CASCADE")


def _healthy(database: Database, ids: list[object]) -> list[object]:
    statement = (
        "SELECT t.id, t.state, t.attempts, t.in_line, a.id, a.state, l.expires_at FROM tasks t"
        " LEFT JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts"
        " LEFT JOIN leases l ON l.attempt_id = a.id WHERE t.id = ANY(:ids) ORDER BY t.id"
    )
    return [tuple(row) for row in rows.every(database, statement, ids=ids)]


@pytest.mark.timeout(200)
def test_whatever_breaks_is_mended_and_the_rest_left_alone(database: Database, installation: Settings) -> None:
    @given(breaks=st.lists(st.sampled_from(faults.MENDED), min_size=1, max_size=6, unique=True))
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    def check(breaks: list[tuple[str, faults.Break]]) -> None:
        _empty(database)
        rows.begin()
        for _, fault in breaks:
            fault(database)
        faults.in_order(database)
        fine = [row.id for row in rows.every(database, "SELECT id FROM tasks ORDER BY accepted_at DESC LIMIT 6")]
        before = _healthy(database, fine)
        auditor = Auditor(database, installation)
        auditor.audit()
        seen = audit.look(database, installation)
        assert seen.findings == (), [name for name, _ in breaks]
        assert auditor.audit().findings == ()
        assert _healthy(database, fine) == before
        _every_task_has_a_way_out(database)

    check()


def _every_task_has_a_way_out(database: Database) -> None:
    lost = (
        "SELECT t.id FROM tasks t WHERE t.state = 'pending' AND NOT t.in_line AND t.available_at >= '9999-01-01'"
        " AND NOT EXISTS (SELECT FROM pauses p WHERE p.name = t.run_id::text)"
        " OR t.state IN ('admitted', 'running') AND NOT EXISTS (SELECT FROM attempts a WHERE a.task_id = t.id"
        " AND a.number = t.attempts AND a.state IN ('dispatched', 'running', 'grading'))"
    )
    assert rows.every(database, lost) == []
    reasons = rows.every(database, "SELECT DISTINCT end_reason AS why FROM tasks WHERE end_reason IS NOT NULL")
    assert {row.why for row in reasons} <= {reason.value for reason in EndReason}
