"""Asking an engine: which one, when there is room, and again when that helps, until the first byte has come.

What an agent's framework would retry blindly is decided here, with knowledge of all engines: a busy one is waited for,
a broken connection is tried elsewhere, a 5xx a few times. Only what nothing helps against reaches the agent.
"""

from __future__ import annotations

import asyncio
import io
import random
import time

import aiohttp

from app.model_service.dialects.sampling import not_taken
from app.model_service.gateway import faults, reading, troubles
from app.model_service.gateway.enforcement import fits
from app.model_service.gateway.engines import Engine, Target
from app.model_service.gateway.keys import Keys, missing_key
from app.model_service.gateway.plans import Answer, Plan, Planner
from app.model_service.gateway.refusals import Refusal
from app.model_service.gateway.relay import begins_with_error
from app.model_service.gateway.routes import Routes
from app.model_service.gateway.state import CallState
from app.model_service.gateway.troubles import Kind, Trouble
from app.models.model_calls import REPLAY_HEADER, CallEnd, Dialect

_BROKEN_MOST = 3
_RESETS_MOST = 5
_BACKOFF_S = 0.2
_ELSEWHERE_S = 1.0
"""An engine that is away is waited for so long before the others are looked at again."""
_DRAINED_S = 0.25
_RETRY_AFTER_MOST_S = 120.0
_WHOLE_BYTES = 64 << 20
_ERROR_BYTES = 1 << 20
_DIRECT_BYTES = 1 << 20


class Upstream:
    """All engines. For one event loop."""

    def __init__(self, http: aiohttp.ClientSession, routes: Routes, keys: Keys, *, timeout_s: float) -> None:
        self._http = http
        self._routes = routes
        self._keys = keys
        self._timeout_s = timeout_s
        self.planner = Planner(keys)

    async def ask(self, call: CallState) -> Answer:
        """An answer, or the first bytes of one. Raises: Refusal: there will be none."""
        avoid: set[str] = set()
        deaf: set[str] = set()  # engines that have just refused the dialect, and those that refused our option
        mute: set[str] = set()
        unsampled: dict[str, set[str]] = {}  # the same for sampling options, by engine
        broken = resets = 0
        give_up = time.monotonic() + max(0.0, call.left_s())
        while True:
            target = call.target = await self._target(call, avoid)
            engine = target.engine
            if target.key_expected and (why := missing_key(self._keys, target.api_key_env)) is not None:
                raise Refusal(403, "key_missing", f"{engine.url}: {why}", CallEnd.UNAUTHORISED)
            if target.context_tokens is not None:
                fits(call, target.context_tokens)
            refused = unsampled.get(engine.url, set())
            plan = await self.planner.plan(
                call, target, deaf=engine.url in deaf, usage=engine.url not in mute, unsampled=refused
            )
            if not await self._enter(call, target):
                continue
            entered = time.monotonic()
            answer: Answer | None = None
            try:
                answer = await self._try(call, plan)
                engine.answered()
                if engine.url in deaf and plan.dialect is not call.dialect:
                    engine.deaf.add(call.dialect)
                if refused:
                    engine.unsampled.setdefault(target.upstream_model or call.model, set()).update(refused)
                if engine.url in mute and plan.dialect is Dialect.CHAT:
                    engine.no_usage_option = True
                return answer
            except Trouble as trouble:
                found = trouble
            finally:
                if answer is None or answer.response is None:
                    engine.window.leave()
            call.retries += 1
            match found.kind:
                case Kind.DEAF:
                    deaf.add(engine.url)
                    call.retries -= 1
                case Kind.NO_USAGE:
                    mute.add(engine.url)
                    call.retries -= 1
                case Kind.NO_OPTION:
                    unsampled[engine.url] = refused | not_taken(found.content, plan.sampled.applied)
                    call.retries -= 1
                case Kind.BUSY:
                    engine.window.busy(entered, found.retry_after_s)
                    left_s = min(call.left_s(), give_up - time.monotonic())
                    if left_s <= (found.retry_after_s or 0.0):
                        raise self._refusal(call, plan, found)
                case Kind.DOWN:
                    engine.unreachable(self._keys.redact(found.why))
                    if time.monotonic() >= give_up:
                        raise self._refusal(call, plan, found)
                case Kind.RESET if resets + 1 < _RESETS_MOST:
                    resets += 1
                    if resets > 1:  # the first is most often a kept connection that had gone meanwhile
                        engine.unreachable(self._keys.redact(found.why))
                case Kind.BROKEN if broken + 1 < _BROKEN_MOST:
                    broken += 1
                    avoid.add(engine.url)
                    engine.failed(self._keys.redact(found.why), alone=not target.others)
                    await asyncio.sleep(_BACKOFF_S * 2 ** (broken - 1) * random.uniform(0.7, 1.3))
                case _:
                    call.retries -= 1
                    if found.kind in {Kind.BROKEN, Kind.TIMEOUT, Kind.RESET}:
                        engine.failed(self._keys.redact(found.why), alone=not target.others)
                    raise self._refusal(call, plan, found)

    # --- Where ------------------------------------------------------------------------------------------------------

    async def _target(self, call: CallState, avoid: set[str]) -> Target:
        try:
            await self._routes.known(call.left_s())
        except TimeoutError:
            raise Refusal(503, "routes_unknown", "the table of models cannot be read", _AWAY) from None
        while True:
            found = self._routes.choose(call.session, call.model, call.attempt.stuck, avoid)
            if found is not None:
                return found
            if call.left_s() <= 0:
                raise Refusal(
                    503,
                    "no_engine",
                    f"all engines of the model {call.model!r} are being drained; try `megaflow models resume`",
                    _AWAY,
                )
            with call.waiting(f"drained:{call.model}"):
                await asyncio.sleep(_DRAINED_S)

    async def _enter(self, call: CallState, target: Target) -> bool:
        """Take a place at the engine. False: look for another one first. Raises: Refusal: none was free."""
        engine = target.engine
        if engine.healthy and engine.window.try_enter():
            return True
        left_s = call.left_s()
        if left_s <= 0:
            raise self._no_place(engine)
        with call.waiting(engine.reason):
            try:
                if not engine.healthy:
                    async with asyncio.timeout(min(left_s, _ELSEWHERE_S)):
                        await engine.up.wait()
                    return False
                await engine.window.enter(left_s)
            except TimeoutError:
                return False
        if engine.healthy:
            return True
        engine.window.leave()
        return False

    def _no_place(self, engine: Engine) -> Refusal:
        if engine.healthy:
            message = f"the engine {engine.url} was too busy for as long as a call may wait"
            return Refusal(429, "engine_busy", message, CallEnd.UPSTREAM_BUSY)
        message = f"the engine {engine.url} was away for as long as a call may wait: {engine.last_fault}"
        return Refusal(503, "engine_unreachable", self._keys.redact(message), _AWAY)

    # --- One try ----------------------------------------------------------------------------------------------------

    async def _try(self, call: CallState, plan: Plan) -> Answer:
        """Raises: Trouble: nothing of it has reached the caller."""
        content = plan.content
        data: bytes | io.BytesIO = content if len(content) < _DIRECT_BYTES else io.BytesIO(content)
        response: aiohttp.ClientResponse | None = None
        answer: Answer | None = None
        call.sampled, call.scripted = plan.sampled, False
        try:
            response = await self._http.post(
                plan.target.engine.path(plan.dialect),
                data=data,
                headers=self.planner.told(call, plan),
                allow_redirects=False,
            )
            # Either sign is enough: the address that we know, or what the engine says of itself.
            call.scripted = plan.target.engine.replay or REPLAY_HEADER in response.headers
            answer = await self._read(call, plan, response)
            return answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise troubles.of_error(error, self._timeout_s) from error
        finally:
            if response is not None and (answer is None or answer.response is None):
                response.release()

    async def _read(self, call: CallState, plan: Plan, response: aiohttp.ClientResponse) -> Answer:
        status = response.status
        if not 200 <= status < 300:
            raise await self._refused(call, plan, response)
        if call.stream and response.content_type == "text/event-stream":
            first = await response.content.readany()
            if not first:
                raise Trouble(Kind.RESET, "the engine ended its stream before the first byte of it")
            if begins_with_error(plan.dialect, first):
                raise reading.of_event(self._keys.redact_bytes(await reading.first_event(response, first)))
            return Answer(plan, status, response.headers, first, response, self._keys.redact_bytes)
        content = await reading.whole_of(response, _WHOLE_BYTES)
        if content is None:
            raise Trouble(Kind.FINAL, f"the engine's answer is longer than {_WHOLE_BYTES:,} bytes")
        reading.check(plan.dialect, content)
        return Answer(plan, status, response.headers, content)

    async def _refused(self, call: CallState, plan: Plan, response: aiohttp.ClientResponse) -> Trouble:
        status = response.status
        content = self._keys.redact_bytes(await reading.whole_of(response, _ERROR_BYTES) or b"")
        why = f"the engine answered {status}: {faults.said(content).message}"
        if status in faults.BUSY:
            after = faults.retry_after_s(response.headers.get("retry-after"), _RETRY_AFTER_MOST_S)
            return Trouble(Kind.BUSY, why, status=status, content=content, retry_after_s=after)
        if status >= 500 or status < 400 or status == 408:
            return Trouble(Kind.BROKEN, why, status=status if status >= 500 else 502, content=content)
        if plan.hides_usage and status in {400, 422} and b"stream_options" in content:
            return Trouble(Kind.NO_USAGE, why)
        if status in {400, 422} and not_taken(content, plan.sampled.applied):
            return Trouble(Kind.NO_OPTION, why, status=status, content=content)
        unknown = not plan.target.dialects and plan.dialect is not Dialect.CHAT
        if unknown and faults.no_such_path(status, content, plan.target.upstream_model or call.model):
            return Trouble(Kind.DEAF, why)
        return Trouble(Kind.FINAL, why, status=status, content=content)

    def _refusal(self, call: CallState, plan: Plan, trouble: Trouble) -> Refusal:
        """The last word, in the caller's dialect: the engine's own where it speaks that."""
        said = faults.said(trouble.content) if trouble.content else faults.Said("", trouble.why)
        status = 429 if trouble.kind is Kind.BUSY else trouble.status
        end = {Kind.TIMEOUT: CallEnd.UPSTREAM_TIMEOUT, Kind.DOWN: _AWAY, Kind.RESET: _AWAY}.get(trouble.kind)
        if end is None:
            end = faults.end_of(trouble.status, said, plan.target.upstream_model or call.model)
        message = self._keys.redact(said.message)
        if end is CallEnd.CONTEXT_EXHAUSTED:
            return Refusal(400, "context_length_exceeded", message, end)
        content = self._keys.redact_bytes(trouble.content)
        own = plan.translation is None and end in _OWN_WORDS and reading.is_json(content)
        code = said.code or _CODES.get(end, "engine_error")
        return Refusal(status, self._keys.redact(code), message, end, body=content if own else None)


_AWAY = CallEnd.UPSTREAM_UNREACHABLE
_OWN_WORDS = frozenset({CallEnd.REFUSED, CallEnd.UNAUTHORISED, CallEnd.NOT_FOUND})
_CODES = {
    CallEnd.UPSTREAM_BUSY: "engine_busy",
    CallEnd.UPSTREAM_TIMEOUT: "engine_timeout",
    CallEnd.UPSTREAM_UNREACHABLE: "engine_unreachable",
    CallEnd.UNAUTHORISED: "engine_refused_key",
    CallEnd.NOT_FOUND: "model_not_found",
}
