"""Sends each ended attempt as a trace to an OpenTelemetry collector: phases and model calls are its spans.

One control worker sends at a time. An attempt is sent some seconds after its end, when its teardown is recorded.
Attempts that ended while no control worker ran are not sent. Attributes of model calls: OpenTelemetry's `gen_ai` names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context
from sqlalchemy import Connection, Row, text

from app.errors import DatabaseUnavailable
from app.ledger import timeline
from app.ledger.database import Database, Leadership, sql
from app.models.outcome import Phase

log = structlog.get_logger()

_EVERY_S = 5.0
_SETTLED_S = 15.0
"""Seconds between an attempt's end and its sending."""
_MOST = 500
"""Most attempts per query, and most model calls per attempt."""
_TRACES = 73057
"""Advisory lock of the sender."""

_ENDED = text("""
SELECT a.id, a.number, a.state, a.mode, a.resource_class, a.user_name, a.end_reason, a.failure, a.verdict, a.scripted,
    a.cost_usd, a.phases, a.dispatched_at, a.finished_at, t.id AS task_id, t.run_id, t.name, t.agent, t.model,
    t.accepted_at, i.provider || ' ' || coalesce(i.handle, '') AS instance
FROM attempts a JOIN tasks t ON t.id = a.task_id LEFT JOIN instances i ON i.id = a.instance_id
WHERE a.finished_at > :after AND a.finished_at <= :until ORDER BY a.finished_at LIMIT :most
""")
_CALLS = text("""
SELECT id, model, upstream_model, policy_version, started_at, duration_s, status, end_kind, prompt_tokens,
    completion_tokens, cost_usd FROM model_calls WHERE attempt_id = :id ORDER BY started_at LIMIT :most
""")


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A span before it is sent."""

    name: str
    begin: datetime
    end: datetime
    attributes: Mapping[str, Any]
    failed: bool = False


class Traces:
    """Sends ended attempts. endpoint: URL of a collector's OTLP/HTTP receiver, such as http://HOST:4318/v1/traces."""

    def __init__(self, database: Database, endpoint: str) -> None:
        self._database = database
        self._provider = TracerProvider(resource=Resource.create({"service.name": "megaflow"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer: Tracer = self._provider.get_tracer("megaflow")
        self._until: datetime | None = None

    def run(self, stop: threading.Event) -> None:
        """Sends until `stop` is set."""
        lead = Leadership(self._database, _TRACES)
        while not stop.is_set():
            try:
                if lead.held():
                    self.send()
                else:
                    self._until = None
            except DatabaseUnavailable as error:
                log.warning("traces.ledger_silent", error=str(error))
            stop.wait(_EVERY_S)
        lead.release()
        self._provider.shutdown()

    def send(self, settled_s: float = _SETTLED_S) -> int:
        """Sends the attempts that have ended since the last call. Returns their number. Raises: DatabaseUnavailable."""
        with self._database.begin() as connection:
            now: datetime = sql(connection, "SELECT clock_timestamp()").scalar_one()
            until = now - timedelta(seconds=settled_s)
            after = self._until or until
            rows = connection.execute(_ENDED, {"after": after, "until": until, "most": _MOST}).all()
            attempts = [(row, list(_spans(connection, row))) for row in rows]
        for row, spans in attempts:
            self._send_attempt(row, spans)
        self._until = rows[-1].finished_at if len(rows) == _MOST else until
        return len(rows)

    def flush(self) -> None:
        """Waits until all spans are sent."""
        self._provider.force_flush()

    def _send_attempt(self, row: Row[Any], spans: list[TraceSpan]) -> None:
        root, *below = spans
        whole = self._tracer.start_span(root.name, attributes=root.attributes, start_time=_ns(root.begin))
        if root.failed:
            whole.set_status(Status(StatusCode.ERROR, str((row.failure or {}).get("message", ""))[:500]))
        context = set_span_in_context(whole)
        for one in below:
            span = self._tracer.start_span(one.name, context, attributes=one.attributes, start_time=_ns(one.begin))
            if one.failed:
                span.set_status(Status(StatusCode.ERROR))
            span.end(_ns(one.end))
        whole.end(_ns(root.end))


def _spans(connection: Connection, row: Row[Any]) -> Iterator[TraceSpan]:
    """Yields the attempt's span first, then those of its phases and model calls."""
    reached = {Phase(name): datetime.fromisoformat(at) for name, at in row.phases.items() if at}
    begin = row.dispatched_at if row.number > 1 else row.accepted_at
    phases = timeline.spans(reached, row.dispatched_at, row.finished_at, row.finished_at)
    end = max([row.finished_at, *(span.end for span in phases if span.end is not None)])
    verdict = row.verdict or {}
    facts = {
        "megaflow.run.id": row.run_id,
        "megaflow.task.id": row.task_id,
        "megaflow.task.name": row.name,
        "megaflow.attempt.id": row.id,
        "megaflow.attempt.number": row.number,
        "megaflow.attempt.state": row.state,
        "megaflow.end_reason": row.end_reason,
        "megaflow.reward": verdict.get("reward"),
        "megaflow.scripted": row.scripted,
        "megaflow.mode": row.mode,
        "megaflow.resource_class": row.resource_class,
        "megaflow.user": row.user_name,
        "megaflow.instance": row.instance,
        "megaflow.cost_usd": row.cost_usd,
        "gen_ai.agent.name": row.agent,
        "gen_ai.request.model": row.model,
    }
    yield TraceSpan(f"attempt {row.name}", begin, end, _plain(facts), row.state in ("lost", "error"))
    if begin < row.dispatched_at:
        yield TraceSpan(timeline.LINE, begin, row.dispatched_at, {})
    for span in phases:
        yield TraceSpan(span.phase, span.begin, span.end or end, {})
    for call in connection.execute(_CALLS, {"id": row.id, "most": _MOST}):
        facts = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": call.model,
            "gen_ai.response.model": call.upstream_model,
            "gen_ai.usage.input_tokens": call.prompt_tokens,
            "gen_ai.usage.output_tokens": call.completion_tokens,
            "megaflow.policy_version": call.policy_version or None,
            "megaflow.call.end": call.end_kind,
            "megaflow.cost_usd": call.cost_usd,
        }
        ended = call.started_at + timedelta(seconds=call.duration_s)
        yield TraceSpan(f"chat {call.model}", call.started_at, ended, _plain(facts), call.end_kind != "answered")


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the known facts, with values of types that a span can have."""
    return {name: str(one) if isinstance(one, UUID) else one for name, one in facts.items() if one is not None}


def _ns(at: datetime) -> int:
    return int(at.timestamp() * 1e9)
