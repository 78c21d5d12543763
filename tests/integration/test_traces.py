"""Ended attempts as traces: a real ledger, the standard SDK, and a collector on loopback that reads what arrives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from app.control.traces import Traces
from app.ledger import names
from app.ledger.database import Database
from app.settings import Settings
from tests.integration.test_reports import NIGHT, Reports


class Collector:
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_each_ended_attempt_is_one_trace_with_its_phases(
    collector: Collector, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = Traces(database, collector.url)
    assert traces.send(settled_s=0) == 0  # from now on
    run_id = Reports(settings, database, monkeypatch).run("night", NIGHT)
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
