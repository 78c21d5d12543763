"""Manages the engines: connections, health, and queues of calls."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
import structlog
from yarl import URL

from app.errors import DatabaseUnavailable
from app.ledger import pressure
from app.ledger.database import Database
from app.ledger.pressure import EngineLoad
from app.model_service.gateway.congestion import CongestionWindow
from app.model_service.gateway.engine_faults import whole_of
from app.models.addresses import forbidden
from app.models.engines import TRAITS, EngineKind, EngineTraits
from app.models.model_calls import Dialect

_KEEP_ALIVE_S = 4.0
"""Shorter than the 5 s after which many engines close an idle connection: the gateway must close it first."""


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Creates a socket for the checked address: the name cannot be resolved again before the connection.

    Raises: OSError: models may not be called there (EACCES).
    """
    family, kind, proto, _, (host, *_) = address
    if (why := forbidden(str(host))) is not None:
        raise OSError(errno.EACCES, f"expected a model server, found {why} ({host}): models are never called there")
    return socket.socket(family, kind, proto)


def http_client(timeout_s: float) -> aiohttp.ClientSession:
    """Creates the HTTP client for engines: no limit of connections, no cookies, no proxies, no decompression."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, ttl_dns_cache=60, keepalive_timeout=_KEEP_ALIVE_S, socket_factory=_socket
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(10.0, timeout_s), sock_read=timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=1 << 18,
        max_line_size=1 << 16,
        max_field_size=1 << 16,
    )


log = structlog.get_logger()

_ERRORS_IN_A_ROW = 3
"""Consecutive 5xx, timeouts or invalid answers that set an engine aside when there is another one."""
_PROBE_S = 0.1
_PROBE_MOST_S = 2.0
_PROBE_TIMEOUT_S = 3.0
_UNROUTED_S = 60.0
"""Seconds after its last call for which an engine without a row is probed."""


class ModelEngine:
    """State that all calls to one base URL share. For one event loop."""

    def __init__(self, url: str, http: aiohttp.ClientSession, *, replay: bool = False) -> None:
        """replay: whether this is the replay engine of this installation."""
        self.url = url
        self.replay = replay
        self.reason = f"engine:{url}"
        self.window = CongestionWindow()
        self.up = asyncio.Event()
        self.up.set()
        self.loaded = asyncio.Event()  # cleared while its weights are being changed
        self.loaded.set()
        self.asking: set[asyncio.Timeout] = set()  # calls that have received nothing yet
        self.unspoken: set[Dialect] = set()
        self.takes_priority = True  # until the engine refuses the field
        self.last_fault = ""
        self.called: dict[str, float] = {}  # last call (monotonic seconds) by model, as the call names it
        self.queued = 0  # calls in the engine's own queue, as reported
        self.kv_use: float | None = None  # used share of its KV cache, as reported
        self.routed = False  # whether a row of the table names it
        self.chosen_at = time.monotonic()  # when last chosen for a call
        self.anthropic = (urlsplit(url).hostname or "").endswith(".anthropic.com")
        self._http = http
        self._errors = 0
        self._probing: asyncio.Task[None] | None = None
        self._paths = {dialect: URL(f"{url}/{dialect.value}") for dialect in Dialect}

    def path(self, dialect: Dialect) -> URL:
        return self._paths[dialect]

    @property
    def healthy(self) -> bool:
        return self.up.is_set()

    def interrupt(self) -> None:
        """Makes calls that have received nothing yet retry. The closed connections cancel them at the engine."""
        for timeout in self.asking:
            timeout.reschedule(asyncio.get_running_loop().time())

    def answered(self) -> None:
        """Handles an accepted call."""
        self._errors = 0
        self.window.accepted()

    def unreachable(self, why: str) -> None:
        """Handles a failed connection, or one that broke before an answer: calls wait until a probe succeeds."""
        self._set_aside(why)

    def failed(self, why: str, *, alone: bool) -> None:
        """Handles an invalid answer or a timeout. `alone`: no other engine could answer instead."""
        self._errors += 1
        if self._errors >= _ERRORS_IN_A_ROW and not alone:
            self._set_aside(why)

    def _set_aside(self, why: str) -> None:
        self.last_fault = why
        if self.up.is_set():
            log.warning("gateway.engine_aside", engine=self.url, why=why)
            self.up.clear()
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe(), name="engine-probe")

    async def _probe(self) -> None:
        nap_s = _PROBE_S
        since = time.monotonic()
        while not await self._answers():
            await asyncio.sleep(nap_s)
            nap_s = min(_PROBE_MOST_S, nap_s * 1.5)
            if not self.routed and time.monotonic() - self.chosen_at > _UNROUTED_S:
                break
        self._errors = 0
        self.unspoken.clear()  # another server may run there by now
        self.takes_priority = True
        self.window.reset()
        self.up.set()
        log.info("gateway.engine_back", engine=self.url, away_s=round(time.monotonic() - since, 1))

    async def _answers(self) -> bool:
        """Whether a working server answers: providers have no /health, and engines may require a key."""
        health = await self._status(f"{self.url.removesuffix('/v1')}/health")
        if health is None or health >= 500:
            return False
        if health < 300:
            return True
        models = await self._status(f"{self.url}/models")
        return models is not None and models < 500

    async def _status(self, url: str) -> int | None:
        try:
            timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
            async with self._http.get(url, timeout=timeout, allow_redirects=False) as answer:
                return answer.status
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    @property
    def idle(self) -> bool:
        """Whether no call is at the engine, and none waits for it."""
        return not self.window.inside and not self.window.waiting

    def stop_probing(self) -> None:
        """Stops the probes."""
        self.window.close()
        if self._probing is not None:
            self._probing.cancel()

    async def close(self) -> None:
        self.stop_probing()
        if self._probing is not None:
            await asyncio.gather(self._probing, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of one call: an engine and its options. Chosen at the start of a call and not changed by a swap."""

    engine: ModelEngine
    upstream_model: str | None = None  # None: the name that the agent uses
    policy_version: str = ""
    dialects: tuple[Dialect, ...] = ()  # empty: to be detected
    api_key_env: str | None = None
    context_tokens: int | None = None
    draining: bool = False
    others: bool = field(default=False, compare=False)  # whether others could answer instead
    key_expected: bool = False  # without a key the engine is not called
    named: EngineKind = EngineKind.UNKNOWN  # the inference server named in its row

    @property
    def traits(self) -> EngineTraits:
        return TRAITS[EngineKind.REPLAY if self.engine.replay else self.named]

    @property
    def built_in(self) -> bool:
        """Whether this is the replay engine, which also gets task and attempt."""
        return self.engine.replay

    def speaks(self, dialect: Dialect) -> bool:
        return dialect in self.dialects if self.dialects else dialect not in self.engine.unspoken


_WATCH_S = 2.0
_TIMEOUT_S = 2.0
_METRICS_BYTES = 8 << 20
_CALLS_MOST = 1e9
_WAITING = re.compile(
    rb"^(?:vllm:num_requests_waiting|sglang:num_queue_reqs)(?:\{[^}]*\})?\s+([0-9.eE+]+)", re.MULTILINE
)
_KV_USE = re.compile(
    rb"^(?:vllm:kv_cache_usage_perc|vllm:gpu_cache_usage_perc|sglang:token_usage)(?:\{[^}]*\})?\s+([0-9.eE+-]+)",
    re.MULTILINE,
)


async def watch_queues(http: aiohttp.ClientSession, engines: Callable[[], Collection[ModelEngine]]) -> None:
    """Reads the queue lengths of engines that have calls from this gateway, for ever.

    Providers (https) are not queried: they answer 429 when they are busy.
    """
    silent: set[str] = set()

    async def look(engine: ModelEngine) -> None:
        try:
            timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
            url = f"{engine.url.removesuffix('/v1')}/metrics"
            async with http.get(url, timeout=timeout, allow_redirects=False) as answer:
                content = (await whole_of(answer, _METRICS_BYTES) or b"") if answer.status == 200 else b""
        except (aiohttp.ClientError, TimeoutError, OSError):
            return  # perhaps too busy to answer: the next round retries
        waiting = waiting_of(content)
        if waiting is None:
            silent.add(engine.url)
        else:
            engine.window.loaded(waiting)
            engine.queued, engine.kv_use = waiting, kv_use_of(content)

    while True:
        await asyncio.sleep(_WATCH_S)
        busy = [one for one in engines() if one.window.inside and one.healthy and one.url.startswith("http://")]
        await asyncio.gather(*(look(one) for one in busy if one.url not in silent))
        silent.intersection_update(one.url for one in engines())


def waiting_of(metrics: bytes) -> int | None:
    """Reads the number of calls in the engine's queue. None: it is not reported."""
    counts = _numbers(_WAITING, metrics)
    total = sum(counts)
    return int(total) if counts and 0 <= total <= _CALLS_MOST else None


def kv_use_of(metrics: bytes) -> float | None:
    """Reads the used share of the KV cache, of its fullest part. None: it is not reported."""
    most = max(_numbers(_KV_USE, metrics), default=-1.0)
    return most if 0 <= most <= 1 else None


def _numbers(pattern: re.Pattern[bytes], metrics: bytes) -> list[float]:
    try:
        return [float(value) for value in pattern.findall(metrics)]
    except ValueError:
        return []


EVERY_S = 2.0
_LATELY_S = 10.0
"""Seconds for which refusals count, and for which an engine is reported for a model after its last call."""


async def report_loads(database: Database, gateway: str, engines: Callable[[], Collection[ModelEngine]]) -> None:
    """Reports the engines' loads, for ever. gateway: a unique name."""
    while True:
        await asyncio.sleep(EVERY_S)
        if loads := [load for engine in engines() if (load := _load_of(engine)).models]:
            try:
                await asyncio.to_thread(pressure.report_engines, database, gateway, loads)
            except DatabaseUnavailable as error:
                log.debug("gateway.loads_not_reported", error=str(error))


def _load_of(engine: ModelEngine) -> EngineLoad:
    inside, waiting = engine.window.inside, engine.window.waiting
    lately = [model for model, at in engine.called.items() if at > time.monotonic() - _LATELY_S]
    if not inside and not waiting:
        engine.queued, engine.kv_use = 0, None  # both are read only while it has calls
    elif not lately:  # a call may last longer than that
        lately = [max(engine.called, key=engine.called.__getitem__)]
    engine.called = {model: engine.called[model] for model in lately}
    refused = engine.window.refused(_LATELY_S)
    return EngineLoad(engine.url, tuple(sorted(lately)), inside, waiting, engine.queued, refused, engine.kv_use)
