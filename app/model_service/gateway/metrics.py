"""Metrics of the gateway in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.model_service.gateway.engines import ModelEngine
from app.models.model_calls import CallEnd, Dialect, Exchange, TokenUse

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of ended calls; the state of engines is read at each scrape."""

    def __init__(self, engines: Callable[[], Iterable[ModelEngine]]) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.in_flight = Gauge("megaflow_gateway_calls_in_flight", "Calls under way.", registry=registry)
        counter = partial(Counter, registry=registry)
        self._calls = counter("megaflow_gateway_calls", "Calls by how they ended.", ["dialect", "end"])
        self._retries = counter("megaflow_gateway_retries", "Tries that agents did not see.")
        self._seconds = Histogram(
            "megaflow_gateway_call_seconds", "From arrival to the last byte.", registry=registry, buckets=_SECONDS
        )
        waited = "Seconds that calls waited, by kind of limit."
        self._waited = counter("megaflow_gateway_waited_seconds", waited, ["kind"])
        self._tokens = counter("megaflow_gateway_tokens", "Tokens, as engines count.", ["kind"])
        went_on = "Calls of training that go on from one whose token ids are kept, by what became of these."
        self._conversations = counter("megaflow_gateway_conversations", went_on, ["prefix"])
        self._prompt, self._completion = self._tokens.labels("prompt"), self._tokens.labels("completion")
        self._of_end = {
            (dialect, end): self._calls.labels(dialect.value, end.value) for dialect in Dialect for end in CallEnd
        }
        registry.register(_EngineCollector(engines))

    def ended(self, exchange: Exchange, usage: TokenUse) -> None:
        """Counts an ended call."""
        self._of_end[exchange.dialect, exchange.end].inc()
        self._seconds.observe(exchange.duration_s)
        self._retries.inc(exchange.retries)
        for name, seconds in exchange.waited_s.items():
            self._waited.labels(name.partition(":")[0]).inc(seconds)
        self._prompt.inc(usage.prompt or 0)
        self._completion.inc(usage.completion or 0)

    def continued(self, prefix: str) -> None:
        """Counts a continued call: `unchanged`, `sent` in, `broken`, or sent and `ignored`."""
        self._conversations.labels(prefix).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[ModelEngine], float | None]], ...] = (
    ("megaflow_gateway_engine_up", "1 while it takes connections.", lambda engine: float(engine.healthy)),
    ("megaflow_gateway_engine_window", "Calls that it may have at once.", lambda engine: engine.window.size),
    ("megaflow_gateway_engine_calls", "Calls that it has.", lambda engine: engine.window.inside),
    ("megaflow_gateway_engine_waiting", "Calls that wait for it.", lambda engine: engine.window.waiting),
    ("megaflow_gateway_engine_kv_use", "Share of its KV cache in use.", lambda engine: engine.kv_use),
)


class _EngineCollector(Collector):
    def __init__(self, engines: Callable[[], Iterable[ModelEngine]]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        for name, help_text, of in _ENGINE_GAUGES:
            family = GaugeMetricFamily(name, help_text, labels=["engine"])
            for engine in list(self._engines()):
                if (value := of(engine)) is not None:
                    family.add_metric([engine.url], value)
            yield family
