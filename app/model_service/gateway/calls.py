"""Handles one model call, from its first byte to its record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import orjson
import structlog
from starlette.types import Message, Receive, Scope, Send
from uuid_utils import compat as uuids

from app.errors import BrokerUnavailable, CallThrottled, DatabaseUnavailable, SpecInvalid
from app.model_service.dialects import codec_for
from app.model_service.gateway import enforcement
from app.model_service.gateway.callers import Callers, token_of
from app.model_service.gateway.conversations import with_tokens, without_keys, without_keys_in_stream
from app.model_service.gateway.keys import Keys
from app.model_service.gateway.metrics import Metrics
from app.model_service.gateway.plans import EngineAnswer
from app.model_service.gateway.relay import RelayedStream, without_usage
from app.model_service.gateway.state import Attempts, CallState, Headers
from app.model_service.gateway.upstream import Upstream
from app.model_service.limiter import ModelLimiter, Permit
from app.model_service.recording.recorder import HUNG_UP, Recorder
from app.model_service.serving import CallRefusal, ClientDisconnected, read_body, read_request
from app.models.model_calls import CallEnd, Dialect, TokenUse

log = structlog.get_logger()

_FINAL = (b"x-should-retry", b"false")
"""Header that stops retries by OpenAI's and Anthropic's clients: the gateway has already retried where it helps."""
JSON = (b"content-type", b"application/json")
_SSE = (b"content-type", b"text/event-stream; charset=utf-8")
_LIVE = (b"cache-control", b"no-cache")
_PASSED_BACK = ("x-request-id", "request-id", "openai-processing-ms", "openai-version", "openai-model")
_READER_S = 120.0
"""Seconds without reading its answer after which an agent counts as disconnected, because it holds an engine."""
_SILENCE_MOST_S = 30.0
"""Seconds without a byte (or half the engines' timeout, if less) after which a hang-up counts as a timeout."""
_STREAM_TIMES = 10
"""Time limit of a stream, as a multiple of an engine's timeout for a whole answer."""
_SPARE_S = 2.0
"""Seconds added to an engine's timeout for a call. The connection's own timeout, which names the cause, fires first."""
_SEEN_S = 0.5
_MOST_AT_ONCE = 256
"""Limit of concurrent calls of one attempt, waiting calls included."""


@dataclass(slots=True)
class GatewayServices:
    """Services that model calls use."""

    callers: Callers
    attempts: Attempts
    upstream: Upstream
    recorder: Recorder
    limiter: ModelLimiter
    keys: Keys
    metrics: Metrics
    patience_s: float
    body_bytes: int
    timeout_s: float = 600.0  # an engine's time for one call
    boot: str = ""  # unique id of this process
    routed: Callable[[str], bool] = lambda _: True  # whether a model's name has a row of its own


async def answer_refusal(send: Send, dialect: Dialect, refusal: CallRefusal, body: bytes | None = None) -> None:
    """Sends a refusal in the caller's dialect."""
    if body is None:
        body = orjson.dumps(codec_for(dialect).error(refusal.status, refusal.code, refusal.message))
    headers = [JSON, (b"content-length", b"%d" % len(body))]
    if refusal.final:
        headers.append(_FINAL)
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class Call:
    """A request in one dialect."""

    def __init__(self, services: GatewayServices, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> None:
        self._services = services
        self._dialect = dialect
        self._headers: Headers = scope["headers"]
        self._receive = receive
        self._send = send
        self._codec = codec_for(dialect)
        self._finished = False
        self._gone = False

    async def run(self) -> None:
        """Answers the call and records it, also when it fails."""
        begun, started_at = time.monotonic(), datetime.now(UTC)
        try:
            session = await self._services.callers.session(token_of(self._headers))
            attempt = self._services.attempts.of(session.attempt_id)
            attempt.refuse_if_closed()  # as for an ended attempt, the call is not recorded
            if attempt.in_flight >= _MOST_AT_ONCE:  # each call may hold a body in memory
                message = f"this attempt has {attempt.in_flight} calls under way, and may have {_MOST_AT_ONCE}"
                raise CallRefusal(429, "too_many_calls", message, final=False)
        except CallRefusal as refusal:
            await answer_refusal(self._send, self._dialect, refusal)
            return
        call = CallState(
            id=uuids.uuid7(),
            session=session,
            attempt=attempt,
            dialect=self._dialect,
            codec=self._codec,
            headers=self._headers,
            started_at=started_at,
            begun=begun,
            patience_s=self._services.patience_s,
        )
        if (known_s := time.monotonic() - begun) > _SEEN_S:
            call.waited_s["ledger"] = known_s
        call.attempt.enter()
        self._services.metrics.in_flight.inc()
        try:
            await self._read_and_answer(call)
        finally:
            self._record(call)
            call.attempt.leave(allowed=call.allowed, turn=call.turn, tools=call.tools)
            self._services.metrics.in_flight.dec()

    async def _read_and_answer(self, call: CallState) -> None:
        watch: asyncio.Task[None] | None = None
        task = asyncio.current_task()
        assert task is not None
        try:
            call.raw = await read_body(self._receive, self._headers, self._services.body_bytes)
            watch = asyncio.create_task(self._until_gone())
            watch.add_done_callback(lambda _: self._on_disconnect(task))
            async with self._answering(call):
                call.body = read_request(call.raw)
                call.model, call.stream = call.body["model"], bool(call.body.get("stream"))
                call.attempt.refuse_if_closed()
                enforcement.refuse_other_models(call.session, call.model)
                await enforcement.allow(call, self._services.recorder)
                await self._within_limits(call)
        except CallRefusal as refusal:
            await self._refuse(call, refusal)
        except ClientDisconnected:
            if not self._finished:
                self._end(call, CallEnd.CLIENT_GONE, HUNG_UP)
        except asyncio.CancelledError:
            if not self._gone:
                raise
            task.uncancel()
        finally:
            self._finished = True
            if watch is not None:
                watch.cancel()

    @asynccontextmanager
    async def _answering(self, call: CallState) -> AsyncIterator[None]:
        try:
            yield
        except CallRefusal as refusal:
            await self._refuse(call, refusal)
        except ClientDisconnected:
            self._end(call, CallEnd.CLIENT_GONE, f"the agent took nothing of the answer for {_READER_S:g} s")
            raise
        except SpecInvalid as error:  # the caller's request is invalid
            await self._refuse(call, CallRefusal(400, "invalid_request", str(error)))
        except asyncio.CancelledError:
            if self._gone:
                self._end(call, *self._end_of_disconnected(call))
            else:
                self._end(call, CallEnd.CUT, "the gateway was stopped")
            raise
        except Exception as error:
            log.exception("gateway.call_broke", call=str(call.id))
            message = f"the gateway broke: {type(error).__name__}"
            await self._refuse(call, CallRefusal(500, "gateway_error", message, CallEnd.UPSTREAM_ERROR))

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _on_disconnect(self, task: asyncio.Task[None]) -> None:
        if not self._finished:
            self._gone = True
            task.cancel()

    def _end_of_disconnected(self, call: CallState) -> tuple[CallEnd, str]:
        """Returns end and detail of a call that hung up: by the agent's choice, or after too long a wait."""
        if call.whole:
            return CallEnd.ANSWERED, ""
        if call.streamed and self._complete(call):
            return CallEnd.ANSWERED, HUNG_UP
        silence_s = min(_SILENCE_MOST_S, self._services.timeout_s / 2)
        if (silent_s := call.silent_s()) > silence_s:
            return CallEnd.UPSTREAM_TIMEOUT, f"the agent hung up after {silent_s:.1f} s without a byte"
        waited = {name: seconds for name, seconds in call.waited_s.items() if name != enforcement.OWN_CALLS}
        if not call.started and (waited_s := sum(waited.values())) > silence_s:
            most = max(waited, key=lambda name: waited[name])
            end = CallEnd.UPSTREAM_BUSY if most.startswith("engine:") else CallEnd.THROTTLED
            return end, f"the agent hung up after a wait of {waited_s:.1f} s ({most})"
        return CallEnd.CLIENT_GONE, HUNG_UP

    async def _refuse(self, call: CallState, refusal: CallRefusal) -> None:
        message = self._services.keys.redact(refusal.message)
        if call.started:  # the status was sent: the error goes into the stream
            self._end(call, refusal.end, message)
            last = self._codec.error_event(refusal.status, refusal.code, message)
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
            return
        call.status = refusal.status
        own = refusal.body
        call.response = orjson.dumps(self._codec.error(refusal.status, refusal.code, message)) if own is None else own
        self._end(call, refusal.end, message)
        await answer_refusal(self._send, self._dialect, refusal, call.response)

    def _end(self, call: CallState, end: CallEnd, detail: str) -> None:
        self._finished = True
        call.end, call.detail = end, detail

    async def _within_limits(self, call: CallState) -> None:
        permit_used: Permit | None = None
        session = call.session
        begun = time.monotonic()
        call.attempt.waiting_since[call.id] = begun
        try:
            async with self._services.limiter.call(
                run_id=session.run_id,
                user=session.user,
                model=self._limited_model(call),
                tokens=enforcement.estimate(call),
                patience_s=call.left_s(),
            ) as permit:
                call.attempt.waiting_since.pop(call.id, None)
                for name, seconds in permit.waited.items():
                    call.waited_s[name] = call.waited_s.get(name, 0.0) + seconds
                permit_used = permit
                try:
                    async with self._answering(call):
                        await self._answer(call)
                finally:
                    usage = self._record(call)
                    if usage.total is not None or not call.engine_worked():
                        permit.used(usage.total or 0)
        except asyncio.CancelledError:
            if permit_used is None:
                call.waited_s["limits"] = time.monotonic() - begun
            raise
        except CallThrottled as error:
            call.waited_s[error.limit] = call.waited_s.get(error.limit, 0.0) + time.monotonic() - begun
            raise CallRefusal(429, "limit_reached", str(error), CallEnd.THROTTLED) from error
        except (BrokerUnavailable, DatabaseUnavailable) as error:
            if permit_used is not None:
                raise
            raise CallRefusal(503, "limits_unknown", str(error), CallEnd.THROTTLED, final=False) from error
        finally:
            call.attempt.waiting_since.pop(call.id, None)

    def _limited_model(self, call: CallState) -> str:
        """Returns the model's name for limits. A name that an agent makes up must not evade them."""
        own = call.session.model.name or "*"
        return call.model if call.model == own or self._services.routed(call.model) else own

    async def _ask(self, call: CallState) -> EngineAnswer:
        """Returns the engine's answer, within the engine's time. The clock stops while the call waits, which has a
        limit of its own. Failed requests use up the time. Raises: CallRefusal.
        """
        call.await_bytes()
        try:
            async with asyncio.timeout(self._services.timeout_s + _SPARE_S) as call.clock:
                return await self._services.upstream.ask(call)
        except TimeoutError:
            if (target := call.target) is not None:
                target.engine.failed("it took too long to answer", alone=not target.others)
            raise CallRefusal(
                504,
                "engine_timeout",
                f"the engine had no whole answer within {self._services.timeout_s:g} s",
                CallEnd.UPSTREAM_TIMEOUT,
            ) from None
        finally:
            call.clock = None

    async def _answer(self, call: CallState) -> None:
        answer = await self._ask(call)
        call.silent_since = None
        call.first_byte_s = time.monotonic() - call.begun
        try:
            if answer.response is None:
                await self._pass_whole(call, answer)
            else:
                await self._pass_stream(call, answer)
        finally:
            answer.close()

    async def _deliver(self, message: Message) -> None:
        """Sends to the caller. Raises: ClientDisconnected: it reads nothing for too long, and so holds the engine."""
        try:
            async with asyncio.timeout(_READER_S):
                await self._send(message)
        except TimeoutError:
            raise ClientDisconnected from None

    async def _pass_whole(self, call: CallState, answer: EngineAnswer) -> None:
        plan = answer.plan
        content = without_keys(answer.content, plan.hidden) if plan.hidden else answer.content
        call.response = answer.content
        if plan.translation is not None:
            call.response = content = plan.translation.whole(content)
            if plan.hidden:
                call.response = with_tokens(content, answer.content, streamed=False)
        call.status = answer.status
        headers = [JSON, (b"content-length", b"%d" % len(content)), *_response_headers(call, answer)]
        self._services.upstream.conversations.learn(call, plan, answer.content, streamed=False)
        self._end(call, CallEnd.ANSWERED, "")
        call.started = True
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    async def _pass_stream(self, call: CallState, answer: EngineAnswer) -> None:
        stream = RelayedStream(answer)
        translated: list[bytes] = []
        call.streamed = True
        call.status = answer.status
        await self._send(
            {
                "type": "http.response.start",
                "status": answer.status,
                "headers": [_SSE, _LIVE, *_response_headers(call, answer)],
            }
        )
        call.started = True
        pieces = stream.pieces()
        plan = answer.plan
        most_s = _STREAM_TIMES * self._services.timeout_s
        if plan.hidden:
            pieces = without_keys_in_stream(pieces, plan.hidden)
        if plan.translation is not None:
            pieces = plan.translation.events(pieces)
        elif plan.hides_usage:
            pieces = without_usage(pieces)
        try:
            async with asyncio.timeout(most_s) as clock, aclosing(pieces) as source:  # type: ignore[type-var]
                async for piece in source:
                    call.silent_since = None
                    if plan.translation is not None:
                        translated.append(piece)
                    await self._deliver({"type": "http.response.body", "body": piece, "more_body": True})
                    call.await_bytes()
        except TimeoutError:
            if not clock.expired():
                raise
            if stream.end is not CallEnd.ANSWERED:
                stream.end = CallEnd.UPSTREAM_TIMEOUT
                stream.detail = f"the engine's answer had no end within {most_s:g} s"
        finally:
            call.whole = stream.end is CallEnd.ANSWERED
            call.response = b"".join(translated) if plan.translation is not None else stream.recorded
            if plan.translation is not None and plan.hidden:
                call.response = with_tokens(call.response, stream.recorded, streamed=True)
        end, detail = stream.end, stream.detail
        if end is CallEnd.CUT and self._complete(call):
            end, detail = CallEnd.ANSWERED, ""
        call.silent_since = None
        if end is CallEnd.ANSWERED:
            self._services.upstream.conversations.learn(call, plan, stream.recorded, streamed=True)
        last = b""
        if end not in {CallEnd.ANSWERED, CallEnd.UPSTREAM_ERROR}:
            last = self._codec.error_event(502, str(end), detail)  # an engine's own error was already sent
        self._end(call, end, detail)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    def _complete(self, call: CallState) -> bool:
        """Whether a stream is complete without its usual last line, which some engines leave out."""
        try:
            return call.codec.reply(call.response, streamed=True).complete
        except ValueError:
            return False

    def _record(self, call: CallState) -> TokenUse:
        if call.recorded:
            return TokenUse()
        call.recorded = True
        exchange = call.exchange()
        usage = self._services.recorder.record(exchange)
        if call.place is not None:
            self._services.upstream.shares.leave(call.place, _engine_tokens(call, usage))
        enforcement.learn(call, usage.prompt)
        self._services.metrics.ended(exchange, usage)
        return usage


def _engine_tokens(call: CallState, usage: TokenUse) -> int | None:
    if usage.total is None:
        return None if call.engine_worked() else 0
    return usage.total - (usage.cached or 0)


def _response_headers(call: CallState, answer: EngineAnswer) -> Headers:
    headers: Headers = [(b"x-megaflow-call", str(call.id).encode())]
    for name in _PASSED_BACK:
        value = answer.headers.get(name)
        if value is not None:
            headers.append((name.encode(), value.encode("latin-1", "replace")))
    return headers
