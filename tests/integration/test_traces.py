"""Ended attempts as traces: a real ledger, the standard SDK, and a collector on loopback that reads what arrives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from app.control.traces import Traces
from app.ledger import names
from app.ledger.database import Database
from tests.integration.http_server import Handler, served
from tests.integration.rows import a_call, one
from tests.integration.test_reports import NIGHT, Reports, reports, verdict

__all__ = ["reports"]


@dataclass
class Collector:
    """Where to send spans, and those that came."""

    url: str
    spans: list[Any]


@pytest.fixture
def collector() -> Iterator[Collector]:
    spans: list[Any] = []

    class Collecting(Handler):
        def respond(self) -> None:
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.body())
            spans.extend(span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans)
            self.answer(200)

    with served(Collecting) as address:
        yield Collector(f"http://{address}/v1/traces", spans)


def test_each_ended_attempt_is_one_trace_with_its_phases(
    collector: Collector, database: Database, reports: Reports
) -> None:
    traces = Traces(database, collector.url)
    assert traces.send(settled_s=0) == 0  # from now on
    run_id = reports.run("night", NIGHT)
    assert traces.send(settled_s=0) == 5
    assert traces.send(settled_s=0) == 0
    traces.flush()
    roots = {span.name: span for span in collector.spans if not span.parent_span_id}
    assert set(roots) == {f"attempt {name}" for name in NIGHT}
    lost = roots["attempt click-5"]
    said = {one.key: one.value for one in lost.attributes}
    assert said["megaflow.run.id"].string_value == str(run_id)
    assert said["megaflow.task.id"].string_value == str(names.find(database, "tasks", f"{run_id}/click-5"))
    assert (lost.status.code, "no image 17" in lost.status.message) == (2, True)
    solved = roots["attempt click-1"]
    below = [span for span in collector.spans if span.parent_span_id == solved.span_id]
    assert {span.trace_id for span in below} == {solved.trace_id}
    assert {"queue", "start", "agent"} <= {span.name for span in below}
    for span in below:
        assert solved.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= solved.end_time_unix_nano


def test_each_model_call_is_a_span_of_its_attempt(collector: Collector, database: Database, reports: Reports) -> None:
    traces = Traces(database, collector.url)
    traces.send(settled_s=0)
    reports.run("night", {"click-1": verdict(1.0)})
    attempt = one(database, "SELECT id AS attempt_id, task_id, dispatched_at FROM attempts")
    whose = {"attempt_id": attempt.attempt_id, "task_id": attempt.task_id, "model": "big-one"}
    told = {"upstream_model": "big-one-2", "policy_version": "v3", "prompt_tokens": 120, "completion_tokens": 7}
    begun = attempt.dispatched_at
    a_call(database, cost_usd=0.25, started_at=begun, duration_s=1.5, **whose, **told)
    a_call(database, cost_usd=None, started_at=begun + timedelta(seconds=2), end_kind="upstream_error", **whose)
    a_call(database, cost_usd=9.0, model="of-another-attempt")
    assert traces.send(settled_s=0) == 1
    traces.flush()
    (root,) = (span for span in collector.spans if not span.parent_span_id)
    answered, failed = (span for span in collector.spans if span.name.startswith("chat "))
    assert {answered.name, failed.name} == {"chat big-one"}
    assert {answered.parent_span_id, failed.parent_span_id} == {root.span_id}
    assert answered.start_time_unix_nano == int(begun.timestamp() * 1e9)
    assert answered.end_time_unix_nano - answered.start_time_unix_nano == pytest.approx(1.5e9, abs=1e4)
    assert (answered.status.code, failed.status.code) == (0, 2)
    assert _facts(answered) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "big-one",
        "gen_ai.response.model": "big-one-2",
        "gen_ai.usage.input_tokens": 120,
        "gen_ai.usage.output_tokens": 7,
        "megaflow.policy_version": "v3",
        "megaflow.call.end": "answered",
        "megaflow.cost_usd": 0.25,
    }
    unknown = {"megaflow.cost_usd", "gen_ai.usage.input_tokens", "megaflow.policy_version"}
    assert not unknown & set(_facts(failed))


def _facts(span: Any) -> dict[str, Any]:
    return {fact.key: getattr(fact.value, fact.value.WhichOneof("value")) for fact in span.attributes}
