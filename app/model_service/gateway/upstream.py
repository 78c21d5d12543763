"""Calls an engine, waits for capacity, and retries until the first byte has come.

Retries are decided here, with knowledge of all engines, and not blindly by an agent's framework: a call waits for a
busy engine, goes elsewhere after a broken connection, and repeats a 5xx a few times. Only final errors reach the agent.
"""

from __future__ import annotations

import asyncio
import io
import random
import time
from dataclasses import dataclass, field

import aiohttp
import orjson

from app.model_service.dialects.reading import parse_json
from app.model_service.gateway import engine_faults
from app.model_service.gateway.conversations import Conversations, ask_for_ids, wants_ids, with_prompt_ids
from app.model_service.gateway.enforcement import estimate, fits
from app.model_service.gateway.engine_faults import EngineFault, FaultKind
from app.model_service.gateway.engines import ModelEngine, Target
from app.model_service.gateway.keys import Keys, missing_key
from app.model_service.gateway.plans import CallPlan, EngineAnswer, call_headers, make_plan
from app.model_service.gateway.relay import begins_with_error
from app.model_service.gateway.routes import Routes
from app.model_service.gateway.state import CallState
from app.model_service.gateway.waiting import Place, TokenShares, level_of
from app.model_service.serving import CallRefusal
from app.models.model_calls import REPLAY_HEADER, CallEnd, Dialect

_BROKEN_MOST = 3
_RESETS_MOST = 5
_BACKOFF_S = 0.2
_ELSEWHERE_S = 1.0
"""Seconds to wait for an unreachable engine before the others are tried again."""
_DRAINED_S = 0.25
_RETRY_AFTER_MOST_S = 120.0
_WHOLE_BYTES = 64 << 20
_ERROR_BYTES = 1 << 20
_DIRECT_BYTES = 1 << 20


@dataclass(slots=True)
class _RetryState:
    give_up: float
    broken: int = 0
    resets: int = 0
    avoid: set[str] = field(default_factory=set)
    dialect_refused: set[str] = field(default_factory=set)

    def teach(self, engine: ModelEngine, call: CallState, plan: CallPlan) -> None:
        """Handles an answer: a dialect that the engine refused before is not tried there again."""
        engine.answered()
        if engine.url in self.dialect_refused and plan.dialect is not call.dialect:
            engine.unspoken.add(call.dialect)


class Upstream:
    """Calls to all engines. For one event loop."""

    def __init__(
        self, http: aiohttp.ClientSession, routes: Routes, keys: Keys, conversations: Conversations, *, timeout_s: float
    ) -> None:
        self.conversations = conversations
        self.shares = TokenShares()
        self._http = http
        self._routes = routes
        self._keys = keys
        self._timeout_s = timeout_s

    async def ask(self, call: CallState) -> EngineAnswer:
        """Returns an answer, or the first bytes of one. Raises: CallRefusal: no engine gives one."""
        retry = _RetryState(give_up=time.monotonic() + max(0.0, call.left_s()))
        place = call.place = self.shares.place(
            call.model,
            call.session.user,
            level=level_of(call.attained_s),
            began=call.attempt.began,
            tokens=estimate(call),
        )
        while True:
            target = call.target = await self._target(call, retry.avoid)
            target.engine.called[call.model] = time.monotonic()
            plan = await self._plan(call, target, retry)
            if not await self._enter(call, target, place):
                continue
            entered = time.monotonic()
            answer: EngineAnswer | None = None
            try:
                async with asyncio.timeout(None) as timeout:
                    target.engine.asking.add(timeout)
                    self._urge(plan, place)
                    answer = await self._try(call, plan)
                retry.teach(target.engine, call, plan)
                return answer
            except TimeoutError:
                if not timeout.expired():
                    raise
                call.retries += 1  # interrupted: its weights are being changed
                continue
            except EngineFault as raised:
                fault = raised
            finally:
                target.engine.asking.discard(timeout)
                if answer is None:
                    place.settle(0)
                if answer is None or answer.response is None:
                    target.engine.window.leave()
            await self._after(call, plan, retry, fault, entered)

    async def _plan(self, call: CallState, target: Target, retry: _RetryState) -> CallPlan:
        url = target.engine.url
        if target.key_expected and (why := missing_key(self._keys, target.api_key_env)) is not None:
            raise CallRefusal(403, "key_missing", f"{url}: {why}", CallEnd.UNAUTHORISED)
        if target.context_tokens is not None:
            fits(call, target.context_tokens)
        plan = await make_plan(call, target, dialect_refused=url in retry.dialect_refused)
        if wants_ids(call, plan):
            body = ask_for_ids(plan, parse_json(plan.content))
            if target.traits.prompt_ids and (ids := await self.conversations.prompt_ids(call, plan, body)):
                body = with_prompt_ids(plan, body, ids)
            plan.content = orjson.dumps(body)
        return plan

    def _urge(self, plan: CallPlan, place: Place) -> None:
        target = plan.target
        if target.traits.priority and target.engine.takes_priority and plan.dialect is Dialect.CHAT:
            priority = target.traits.priority * self.shares.urgency(place)
            plan.content = orjson.dumps(parse_json(plan.content) | {"priority": priority})
            plan.priority = True

    async def _after(
        self, call: CallState, plan: CallPlan, retry: _RetryState, fault: EngineFault, entered: float
    ) -> None:
        """Handles a fault; returns if a retry may help. Raises: CallRefusal: none does."""
        target = plan.target
        engine = target.engine
        call.retries += fault.kind not in {FaultKind.DIALECT, FaultKind.PRIORITY}  # the next request differs
        match fault.kind:
            case FaultKind.DIALECT:
                retry.dialect_refused.add(engine.url)
            case FaultKind.PRIORITY:
                engine.takes_priority = False
            case FaultKind.BUSY:
                engine.window.busy(entered, fault.retry_after_s)
                left_s = min(call.left_s(), retry.give_up - time.monotonic())
                if left_s <= (fault.retry_after_s or 0.0):
                    raise self._refusal(call, plan, fault)
            case FaultKind.DOWN:
                engine.unreachable(self._keys.redact(fault.why))
                if time.monotonic() >= retry.give_up:
                    raise self._refusal(call, plan, fault)
            case FaultKind.RESET if retry.resets + 1 < _RESETS_MOST:
                retry.resets += 1
                if retry.resets > 1:  # the first is usually an idle connection that was closed meanwhile
                    engine.unreachable(self._keys.redact(fault.why))
            case FaultKind.BROKEN if retry.broken + 1 < _BROKEN_MOST:
                retry.broken += 1
                retry.avoid.add(engine.url)
                engine.failed(self._keys.redact(fault.why), alone=not target.others)
                await asyncio.sleep(_BACKOFF_S * 2 ** (retry.broken - 1) * random.uniform(0.7, 1.3))
            case _:
                call.retries -= 1
                if fault.kind in {FaultKind.BROKEN, FaultKind.TIMEOUT, FaultKind.RESET}:
                    engine.failed(self._keys.redact(fault.why), alone=not target.others)
                raise self._refusal(call, plan, fault)

    async def _target(self, call: CallState, avoid: set[str]) -> Target:
        try:
            await self._routes.known(call.left_s())
        except TimeoutError:
            raise CallRefusal(503, "routes_unknown", "the table of models cannot be read", _AWAY) from None
        while True:
            target = self._routes.choose(call.session, call.model, call.attempt.stuck, avoid)
            if target is not None:
                return target
            if call.left_s() <= 0:
                raise CallRefusal(
                    503,
                    "no_engine",
                    f"all engines of the model {call.model!r} are being drained; try `megaflow models resume`",
                    _AWAY,
                )
            with call.waiting(f"drained:{call.model}"):
                await asyncio.sleep(_DRAINED_S)

    async def _enter(self, call: CallState, target: Target, place: Place) -> bool:
        """Takes a slot at the engine. False: choose the engine again first. Raises: CallRefusal: none was free."""
        engine = target.engine
        if engine.healthy and engine.loaded.is_set() and engine.window.try_enter(place):
            return True
        left_s = call.left_s()
        if left_s <= 0:
            raise self._no_place(engine)
        with call.waiting(engine.reason):
            try:
                if not engine.loaded.is_set():
                    async with asyncio.timeout(left_s):
                        await engine.loaded.wait()
                    return False
                if not engine.healthy:
                    async with asyncio.timeout(min(left_s, _ELSEWHERE_S)):
                        await engine.up.wait()
                    return False
                await engine.window.enter(place, left_s)
            except TimeoutError:
                return False
        if engine.healthy and engine.loaded.is_set():
            return True
        engine.window.leave()
        return False

    def _no_place(self, engine: ModelEngine) -> CallRefusal:
        if not engine.loaded.is_set():
            message = f"{engine.url} is held for new weights: `megaflow models publish` did not end in time"
            return CallRefusal(503, "engine_held", message, _AWAY)
        if engine.healthy:
            message = f"the engine {engine.url} was too busy for as long as a call may wait"
            return CallRefusal(429, "engine_busy", message, CallEnd.UPSTREAM_BUSY)
        message = f"the engine {engine.url} was away for as long as a call may wait: {engine.last_fault}"
        return CallRefusal(503, "engine_unreachable", self._keys.redact(message), _AWAY)

    async def _try(self, call: CallState, plan: CallPlan) -> EngineAnswer:
        content = plan.content
        data: bytes | io.BytesIO = content if len(content) < _DIRECT_BYTES else io.BytesIO(content)
        response: aiohttp.ClientResponse | None = None
        answer: EngineAnswer | None = None
        call.sampled, call.scripted = plan.sampled, False
        try:
            response = await self._http.post(
                plan.target.engine.path(plan.dialect),
                data=data,
                headers=call_headers(self._keys, call, plan),
                allow_redirects=False,
            )
            # Either sign is enough: the known address, or the header of the engine.
            call.scripted = plan.target.engine.replay or REPLAY_HEADER in response.headers
            answer = await self._read(call, plan, response)
            return answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise engine_faults.fault_of_error(error, self._timeout_s) from error
        finally:
            if response is not None and (answer is None or answer.response is None):
                response.release()

    async def _read(self, call: CallState, plan: CallPlan, response: aiohttp.ClientResponse) -> EngineAnswer:
        status = response.status
        if not 200 <= status < 300:
            raise await self._refused(call, plan, response)
        if call.stream and response.content_type == "text/event-stream":
            first = await response.content.readany()
            if not first:
                raise EngineFault(FaultKind.RESET, "the engine ended its stream before the first byte of it")
            if begins_with_error(plan.dialect, first):
                raise engine_faults.fault_of_event(
                    self._keys.redact_bytes(await engine_faults.first_event(response, first))
                )
            return EngineAnswer(plan, status, response.headers, first, response, self._keys.redact_bytes)
        content = await engine_faults.whole_of(response, _WHOLE_BYTES)
        if content is None:
            raise EngineFault(FaultKind.FINAL, f"the engine's answer is longer than {_WHOLE_BYTES:,} bytes")
        engine_faults.check_answer(plan.dialect, content)
        return EngineAnswer(plan, status, response.headers, content)

    async def _refused(self, call: CallState, plan: CallPlan, response: aiohttp.ClientResponse) -> EngineFault:
        status = response.status
        content = self._keys.redact_bytes(await engine_faults.whole_of(response, _ERROR_BYTES) or b"")
        why = f"the engine answered {status}: {engine_faults.message_of(content).message}"
        if status in engine_faults.BUSY:
            after = engine_faults.retry_after_s(response.headers.get("retry-after"), _RETRY_AFTER_MOST_S)
            return EngineFault(FaultKind.BUSY, why, status=status, content=content, retry_after_s=after)
        if status >= 500 or status < 400 or status == 408:
            return EngineFault(FaultKind.BROKEN, why, status=status if status >= 500 else 502, content=content)
        if plan.priority and status in {400, 422} and b"priority" in content.lower():
            return EngineFault(FaultKind.PRIORITY, why)
        unknown = not plan.target.dialects and plan.dialect is not Dialect.CHAT
        if unknown and engine_faults.no_such_path(status, content, plan.target.upstream_model or call.model):
            return EngineFault(FaultKind.DIALECT, why)
        return EngineFault(FaultKind.FINAL, why, status=status, content=content)

    def _refusal(self, call: CallState, plan: CallPlan, fault: EngineFault) -> CallRefusal:
        """Returns the final error in the caller's dialect: the engine's own body if it speaks that dialect."""
        error = engine_faults.message_of(fault.content) if fault.content else engine_faults.EngineMessage("", fault.why)
        status = 429 if fault.kind is FaultKind.BUSY else fault.status
        end = {FaultKind.TIMEOUT: CallEnd.UPSTREAM_TIMEOUT, FaultKind.DOWN: _AWAY, FaultKind.RESET: _AWAY}.get(
            fault.kind
        )
        if end is None:
            end = engine_faults.end_of(fault.status, error, plan.target.upstream_model or call.model)
        message = self._keys.redact(error.message)
        if end is CallEnd.CONTEXT_EXHAUSTED:
            return CallRefusal(400, "context_length_exceeded", message, end)
        content = self._keys.redact_bytes(fault.content)
        own = plan.translation is None and end in _OWN_WORDS and engine_faults.is_json(content)
        code = error.code or _CODES.get(end, "engine_error")
        return CallRefusal(status, self._keys.redact(code), message, end, body=content if own else None)


_AWAY = CallEnd.UPSTREAM_UNREACHABLE
_OWN_WORDS = frozenset({CallEnd.REFUSED, CallEnd.UNAUTHORISED, CallEnd.NOT_FOUND})
_CODES = {
    CallEnd.UPSTREAM_BUSY: "engine_busy",
    CallEnd.UPSTREAM_TIMEOUT: "engine_timeout",
    CallEnd.UPSTREAM_UNREACHABLE: "engine_unreachable",
    CallEnd.UNAUTHORISED: "engine_refused_key",
    CallEnd.NOT_FOUND: "model_not_found",
}
