"""What calls are made of, and how they are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import orjson
from starlette.types import Send

from app.model_service.dialects import codec_for
from app.model_service.gateway.attempts import Attempts
from app.model_service.gateway.callers import Callers
from app.model_service.gateway.keys import Keys
from app.model_service.gateway.metrics import Metrics
from app.model_service.gateway.refusals import FINAL, Refusal
from app.model_service.gateway.upstream import Upstream
from app.model_service.limiter import ModelLimiter
from app.model_service.recording.base import Recorder
from app.models.model_calls import Dialect

JSON = (b"content-type", b"application/json")


@dataclass(slots=True)
class Parts:
    """What calls are made of."""

    callers: Callers
    attempts: Attempts
    upstream: Upstream
    recorder: Recorder
    limiter: ModelLimiter
    keys: Keys
    metrics: Metrics
    patience_s: float
    body_bytes: int
    timeout_s: float = 600.0  # that engines get for one call
    boot: str = ""  # this process, by a name that no other has
    routed: Callable[[str], bool] = lambda _: True  # whether a model's name has a row of its own


async def answer_refusal(send: Send, dialect: Dialect, refusal: Refusal, body: bytes | None = None) -> None:
    """Say no in the caller's dialect."""
    if body is None:
        body = orjson.dumps(codec_for(dialect).error(refusal.status, refusal.code, refusal.message))
    headers = [JSON, (b"content-length", b"%d" % len(body))]
    if refusal.final:
        headers.append(FINAL)
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
