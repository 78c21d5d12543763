"""Checks the ledger's invariants periodically, repairs what is safe, and raises alarms.

Any number of auditors may run; one is active at a time. It also issues the receipts of ended runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import structlog
from sqlalchemy import text

from app.errors import DatabaseUnavailable
from app.ledger import audit, events, receipts
from app.ledger.audit import AuditFinding, AuditResult, Memory
from app.ledger.audit_checks import Severity
from app.ledger.database import Database, Leadership
from app.ledger.events import Fact
from app.models.endings import RetryPolicy
from app.settings import Settings

log = structlog.get_logger()

AUDITOR = 73054
"""Advisory lock of the active auditor."""
_ROUNDS = 3
"""Repair rounds in one pass: a repair may reveal the next problem."""
_RECEIPTS_S = 5.0
"""Interval of looking for runs that need a receipt."""


class Auditor:
    """Audits the ledger every `audit_s`; `run` blocks until its event is set."""

    def __init__(
        self, database: Database, settings: Settings, ended: Callable[[UUID], None] = lambda run_id: None
    ) -> None:
        """ended: called for every run that gets its receipt."""
        self._ended = ended
        self._database = database
        self._settings = settings
        self._retry = RetryPolicy(settings.retry_base_s, settings.retry_cap_s)
        self._memory = Memory()
        self._raised: set[str] | None = None  # findings with an active alarm; None: not yet read from the events

    def run(self, stop: threading.Event) -> None:
        lead = Leadership(self._database, AUDITOR)
        try:
            while not stop.is_set():
                try:
                    if lead.held():
                        self.audit()
                        self._issue(stop, lead)
                        continue
                except DatabaseUnavailable as error:
                    log.warning("auditor.interrupted", error=str(error))
                self._memory, self._raised = Memory(), None  # another auditor may lead in the meantime
                stop.wait(min(5.0, self._settings.audit_s))
        finally:
            lead.release()

    def _issue(self, stop: threading.Event, lead: Leadership) -> None:
        """Issues receipts until the next audit is due or the lead is lost."""
        left_s = self._settings.audit_s
        while left_s > 0 and not stop.is_set() and lead.held():
            for run_id in receipts.issue(self._database):
                log.info("run.receipt", run_id=str(run_id))
                self._ended(run_id)
            stop.wait(min(_RECEIPTS_S, left_s))
            left_s -= _RECEIPTS_S

    def audit(self) -> AuditResult:
        """Looks, repairs, looks again, raises alarms. Returns the first findings with the counts of repairs."""
        first = seen = audit.look(self._database, self._settings, self._memory)
        repaired: dict[str, int] = {}
        for _ in range(_ROUNDS):
            findings = audit.repair(self._database, self._settings, seen, self._retry)
            counts = {finding.name: finding.repaired or 0 for finding in findings}
            repaired |= {name: repaired.get(name, 0) + count for name, count in counts.items()}
            if not any(counts.values()):
                break
            seen = audit.look(self._database, self._settings, self._memory)
        self._memory = seen.memory
        findings = tuple(
            finding if finding.repair is None else replace(finding, repaired=repaired[finding.name])
            for finding in first.findings
        )
        self._tell(findings)
        return replace(first, findings=findings)

    def _tell(self, findings: tuple[AuditFinding, ...]) -> None:
        """Records an alarm for each new finding and a `cleared` event for each ended one; nothing in between."""
        raised = self._raised if self._raised is not None else self._on_record()
        now = {finding.name: finding for finding in findings}
        facts = [Fact("audit.alarm", data=_data(now[name])) for name in now if name not in raised]
        facts += [Fact("audit.cleared", data={"finding": name}) for name in sorted(raised - now.keys())]
        with self._database.begin() as connection:
            events.append(connection, *facts)
        self._raised = set(now)
        for fact in facts:
            write = log.warning if fact.kind == "audit.alarm" else log.info
            write(fact.kind, **fact.data)

    def _on_record(self) -> set[str]:
        """Returns the alarms that an earlier auditor raised and did not clear."""
        statement = text(
            "SELECT DISTINCT ON (data->>'finding') data->>'finding' AS finding, kind FROM events"
            " WHERE kind IN ('audit.alarm', 'audit.cleared') ORDER BY data->>'finding', id DESC"
        )
        return {row.finding for row in self._database.sql(statement) if row.kind == "audit.alarm"}


def _data(finding: AuditFinding) -> dict[str, object]:
    return {
        "finding": finding.name,
        "severity": Severity(finding.severity).value,
        "means": finding.means,
        "count": finding.count,
        "ids": list(finding.ids),
        "repaired": finding.repaired,
    }
