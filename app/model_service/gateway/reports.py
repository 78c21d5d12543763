"""Tells the ledger every two seconds how full the engines in use are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

import structlog

from app.errors import DatabaseUnavailable
from app.ledger import pressure
from app.ledger.database import Database
from app.ledger.pressure import EngineLoad
from app.model_service.gateway.engines import ModelEngine

log = structlog.get_logger()

EVERY_S = 2.0
_LATELY_S = 10.0
"""How far back refusals count, and how long after its last call an engine is still reported for a model."""


async def report_loads(database: Database, gateway: str, engines: Callable[[], Collection[ModelEngine]]) -> None:
    """For ever. gateway: a name that no other has."""
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
        engine.queued, engine.kv_use = 0, None  # they are asked for only while it has calls
    elif not lately:  # a call may last longer than that
        lately = [max(engine.called, key=engine.called.__getitem__)]
    engine.called = {model: engine.called[model] for model in lately}
    refused = engine.window.refused(_LATELY_S)
    return EngineLoad(engine.url, tuple(sorted(lately)), inside, waiting, engine.queued, refused, engine.kv_use)
