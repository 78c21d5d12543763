"""Looking at how many calls stand in line at engines that tell: those never answer 429, they only get slower.

vLLM and SGLang show it among their metrics. More than a short line there helps nobody: calls that wait here can still
go to another engine, and are told apart from an engine's own time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection

import aiohttp

from app.model_service.gateway.engines import Engine
from app.model_service.gateway.reading import whole_of

EVERY_S = 2.0
_TIMEOUT_S = 2.0
_METRICS_BYTES = 8 << 20
_CALLS_MOST = 1e9
_WAITING = re.compile(
    rb"^(?:vllm:num_requests_waiting|sglang:num_queue_reqs)(?:\{[^}]*\})?\s+([0-9.eE+]+)", re.MULTILINE
)


class Loads:
    """Asks every engine that has calls of ours, and can tell. For one event loop."""

    def __init__(
        self, http: aiohttp.ClientSession, engines: Callable[[], Collection[Engine]], *, every_s: float = EVERY_S
    ) -> None:
        self._http = http
        self._engines = engines
        self._every_s = every_s
        self._silent: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="engine-loads")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            asked = [one for one in self._engines() if one.window.inside and one.healthy and self._may_tell(one)]
            await asyncio.gather(*(self._look(one) for one in asked))
            self._silent.intersection_update(one.url for one in self._engines())

    def _may_tell(self, engine: Engine) -> bool:
        """Providers are not asked: theirs are no engines of ours, and they say 429."""
        return engine.url.startswith("http://") and engine.url not in self._silent

    async def _look(self, engine: Engine) -> None:
        try:
            timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
            url = f"{engine.url.removesuffix('/v1')}/metrics"
            async with self._http.get(url, timeout=timeout, allow_redirects=False) as answer:
                content = (await whole_of(answer, _METRICS_BYTES) or b"") if answer.status == 200 else b""
        except (aiohttp.ClientError, TimeoutError, OSError):
            return  # too busy to say, perhaps: asked again
        waiting = waiting_of(content)
        if waiting is None:
            self._silent.add(engine.url)
        else:
            engine.window.loaded(waiting)


def waiting_of(metrics: bytes) -> int | None:
    """Calls that stand in line at the engine; None: it does not say."""
    found: list[float] = []
    for said in _WAITING.findall(metrics):
        try:
            found.append(float(said))
        except ValueError:
            return None
    total = sum(found)
    return int(total) if found and 0 <= total <= _CALLS_MOST else None
