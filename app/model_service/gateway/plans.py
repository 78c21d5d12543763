"""How an engine is asked: the caller's own bytes where nothing has to be changed, and headers of ours."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from app.model_service.dialects.sampling import sampled
from app.model_service.gateway.engines import Target
from app.model_service.gateway.keys import Keys
from app.model_service.gateway.state import CallState
from app.model_service.gateway.translation import Translation, translation_for
from app.models.model_calls import Dialect, Sampled

_PASSED = (b"anthropic-version", b"anthropic-beta", b"openai-beta")
_USAGE = {"include_usage": True}


@dataclass(slots=True)
class Plan:
    """How one engine is asked."""

    target: Target
    dialect: Dialect  # spoken there
    content: bytes
    translation: Translation | None = None
    sampled: Sampled = field(default_factory=Sampled)
    hides_usage: bool = False  # the usage of the stream was our wish, not the caller's


@dataclass(slots=True)
class Answer:
    """What came: a whole body, or the beginning of a stream that goes on in `response`. Close it."""

    plan: Plan
    status: int
    headers: Any  # of aiohttp
    content: bytes
    response: aiohttp.ClientResponse | None = None
    redact: Callable[[bytes], bytes] = bytes
    """Takes keys out of an engine's words."""

    def close(self) -> None:
        """Let go of the engine, in the middle of its answer if need be."""
        if self.response is not None:
            self.response.close()
            self.response = None
            self.plan.target.engine.window.leave()


class Planner:
    """Makes plans."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def plan(
        self,
        call: CallState,
        target: Target,
        *,
        deaf: bool = False,
        usage: bool = True,
        unsampled: Collection[str] = (),
    ) -> Plan:
        """The request as this engine wants it: the caller's own bytes, if nothing has to be changed.

        `deaf`: it has just refused the dialect; not `usage`: it has just refused the wish for the usage; `unsampled`:
        sampling options that it has just refused.
        """
        body = call.body
        limits = call.session.limits
        if limits.max_turn_tokens is not None:
            body = call.codec.limited(body, limits.max_turn_tokens)
        translation: Translation | None = None
        dialect = call.dialect
        if deaf or not target.speaks(dialect):
            spoken = target.dialects[0] if target.dialects else Dialect.CHAT
            translation = await translation_for(dialect, spoken)
            body = translation.request(body)
            dialect = spoken
        if target.upstream_model is not None and target.upstream_model != call.model:
            body = {**body, "model": target.upstream_model}
        options = Sampled()
        if (wanted := call.session.model.sampling) is not None:
            refused = {*unsampled, *target.engine.unsampled.get(str(body.get("model")), ())}
            body, options = sampled(body, dialect, wanted, most=limits.max_turn_tokens, refused=refused)
        hides = False
        if call.stream and dialect is Dialect.CHAT and usage and not target.engine.no_usage_option:
            asked = body.get("stream_options")
            if not (isinstance(asked, dict) and asked.get("include_usage")):
                body = {**body, "stream_options": {**(asked if isinstance(asked, dict) else {}), **_USAGE}}
                hides = True
        unchanged = body is call.body or body == call.body
        return Plan(target, dialect, call.raw if unchanged else orjson.dumps(body), translation, options, hides)

    def headers(self, call_headers: list[tuple[bytes, bytes]], target: Target, dialect: Dialect) -> dict[str, str]:
        """What an engine is told beside the body: nothing that the caller proved itself with."""
        found = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "megaflow-gateway"}
        for name, value in call_headers:
            if name in _PASSED:
                found[name.decode()] = value.decode("latin-1")
        key = self._keys.value(target.api_key_env)
        if key is not None:
            if dialect is Dialect.MESSAGES:
                found["x-api-key"] = key
            if not (dialect is Dialect.MESSAGES and target.engine.anthropic):
                found["Authorization"] = f"Bearer {key}"
        return found

    def told(self, call: CallState, plan: Plan) -> dict[str, str]:
        headers = self.headers(call.headers, plan.target, plan.dialect)
        if plan.target.ours:
            headers["X-MegaFlow-Task"] = call.session.task_name
            headers["X-MegaFlow-Replica"] = str(call.session.replica)
            headers["X-MegaFlow-Agent"] = call.session.agent
            headers["X-MegaFlow-Attempt"] = str(call.session.attempt_id)
        return headers
