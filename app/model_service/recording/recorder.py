"""Records calls: usage in memory, calls written by a separate thread."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar
from uuid import UUID

import structlog
from sqlalchemy import Connection

from app.errors import DatabaseUnavailable
from app.ledger import model_calls
from app.ledger.database import Database
from app.model_service.dialects import codec_for
from app.model_service.prices import Prices
from app.model_service.recording.process import CallStore, LedgerStore
from app.model_service.recording.rows import PARTLY, CountedExchange, has_tools
from app.model_service.recording.writer import CallWriter
from app.models.model_calls import Account, CallEnd, Exchange, ModelSession, TokenUse
from app.settings import Settings

T = TypeVar("T")
log = structlog.get_logger()

_KEPT_BYTES = 256 << 20
_ACCOUNTS = 20_000
_SPEND_S, _SPEND_MOST_S = 1.0, 15.0
_SPEND_SHARE = 20
CLOSE_S = 10.0
HUNG_UP = "the agent hung up"
"""Detail of a call whose agent did not wait for its end."""
_UNUSED = frozenset(CallEnd) - PARTLY
"""Ends without tokens from an engine: such a call costs nothing, unless it reports tokens."""


@dataclass(slots=True)
class _Spend:
    at: float
    spent: float
    budget: float | None
    every_s: float = _SPEND_S
    reading: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _PendingAccount:
    """An account that is being read. Calls recorded meanwhile are added afterwards, so that each counts once."""

    task: asyncio.Task[Account]
    meanwhile: list[Exchange] = field(default_factory=list)


class Recorder:
    """Recorder of calls and their accounts. Created in the event loop that uses it."""

    def __init__(
        self, settings: Settings, database: Database, *, store: CallStore | None = None, kept_bytes: int = _KEPT_BYTES
    ) -> None:
        """store: destination of the calls, closed with the recorder. None: the database, by a thread of this process.
        kept_bytes: limit for all bodies that wait for the ledger; beyond it the oldest are dropped.

        Raises: SettingsInvalid: the table of prices cannot be read.
        """
        self._database = database
        self._prices = Prices.read(settings.model_prices)
        self._loop = asyncio.get_running_loop()
        self._accounts: OrderedDict[UUID, Account] = OrderedDict()
        self._reading: dict[UUID, _PendingAccount] = {}
        self._spends: OrderedDict[UUID, _Spend] = OrderedDict()
        self._waiters: dict[UUID, list[asyncio.Future[None]]] = {}
        self._warming = self._loop.run_in_executor(None, Prices.warm)
        self._writer = CallWriter(store or LedgerStore(database), self._on_written, kept_bytes=kept_bytes)

    async def account(self, session: ModelSession) -> Account:
        """Returns the attempt's usage so far. The first read is from the ledger, then it is updated in memory.

        Raises: DatabaseUnavailable: at the first read only.
        """
        cached = self._accounts.get(session.attempt_id)
        if cached is None:
            reading = self._reading.get(session.attempt_id)
            if reading is None:
                reading = _PendingAccount(asyncio.create_task(self._read(session.attempt_id)))
                self._reading[session.attempt_id] = reading
            account = await asyncio.shield(reading.task)
            return self._accounts.get(session.attempt_id, account)  # with the calls recorded meanwhile
        self._accounts.move_to_end(session.attempt_id)
        return cached

    async def _read(self, attempt_id: UUID) -> Account:
        try:
            await self._until_written(attempt_id)
            account = await self._query(model_calls.account_of, attempt_id)
            self._accounts[attempt_id] = account
            return account
        finally:
            meanwhile = self._reading.pop(attempt_id).meanwhile
            for exchange in meanwhile:
                self.record(exchange)
            self._bound()

    async def _query(self, query: Callable[[Connection, UUID], T], of: UUID) -> T:

        def run() -> T:
            with self._database.begin() as connection:
                return query(connection, of)

        return await asyncio.to_thread(run)

    def _bound(self) -> None:
        """Drops the oldest accounts, but not those with unwritten calls: these would be read again too early."""
        if (over := len(self._accounts) - _ACCOUNTS) <= 0:
            return
        for attempt_id in list(islice(self._accounts, over)):
            if not self._writer.open_calls(attempt_id):
                del self._accounts[attempt_id]

    async def run_spend(self, session: ModelSession) -> tuple[float, float | None]:
        """Returns the US dollars that the session's run has spent, and may spend (None: no limit, nothing is added up).

        Calls recorded here count at once, those recorded by other gateways within seconds.
        """
        spend = self._spends.get(session.run_id)
        if spend is None:
            spend = self._spends[session.run_id] = _Spend(float("-inf"), 0.0, None)
            while len(self._spends) > _ACCOUNTS:
                self._spends.popitem(last=False)
        if time.monotonic() - spend.at >= spend.every_s:
            if spend.reading is None:
                spend.reading = asyncio.create_task(self._read_spend(session.run_id, spend))
            await asyncio.shield(spend.reading)
        return spend.spent, spend.budget

    async def _read_spend(self, run_id: UUID, known: _Spend) -> None:
        begun = time.monotonic()
        try:
            spent, known.budget = await self._query(model_calls.run_spend, run_id)
            known.spent = max(known.spent, spent)  # calls recorded here meanwhile may not be in the ledger yet
            # A run of very many calls is added up less often; calls recorded here still count at once.
            known.every_s = min(_SPEND_MOST_S, max(_SPEND_S, _SPEND_SHARE * (time.monotonic() - begun)))
        except DatabaseUnavailable as error:  # the last known value is still nearly right
            log.warning("recorder.spend_unknown", run=str(run_id), error=str(error))
        finally:
            known.at, known.reading = time.monotonic(), None

    def record(self, exchange: Exchange) -> TokenUse:
        """Records a call. The account counts it at once; its messages are written soon, in batches, by a thread.

        Never raises: unreadable calls are stored as they are. While the ledger is unreachable, calls wait, up to a
        limit of bytes; beyond it the oldest bodies are dropped (their rows stay).
        """
        use = codec_for(exchange.dialect).usage(exchange.response, streamed=exchange.streamed)
        reading = self._reading.get(exchange.session.attempt_id)
        if reading is not None:
            reading.meanwhile.append(exchange)
            return use
        cost = self._cost(exchange, _estimated(exchange, use))
        account = self._accounts.get(exchange.session.attempt_id)
        tools = has_tools(exchange.request)
        offered = account is not None and account.offered_tools
        auxiliary = offered and not tools
        is_turn = exchange.end is CallEnd.ANSWERED and not auxiliary
        first = is_turn and tools and not offered  # so earlier calls without tools were no turns
        if account is not None:
            before = replace(account, turns=0, offered_tools=True) if first else account
            account = _account_after(before, exchange, use, cost, is_turn)
            if not auxiliary and exchange.end is not CallEnd.CLIENT_GONE:
                account = replace(account, turn_end=exchange.end)
            self._accounts[exchange.session.attempt_id] = account
        if cost and (spend := self._spends.get(exchange.session.run_id)) is not None:
            spend.spent += cost
        self._writer.put(CountedExchange(exchange, use, cost, is_turn, tools, settles_turns=first or account is None))
        return use

    def _cost(self, exchange: Exchange, use: TokenUse) -> float | None:
        if exchange.end in _UNUSED and use.prompt is None and use.completion is None:
            return 0.0
        return self._prices.cost(
            use,
            model=exchange.asked_model or exchange.session.model.name,
            upstream_model=exchange.upstream_model,
            url=exchange.replica,
            built_in=exchange.built_in,
        )

    async def flush(self, attempt_id: UUID) -> None:
        """Waits until all calls of the attempt are in the ledger. Raises: DatabaseUnavailable."""
        if (reading := self._reading.get(attempt_id)) is not None:
            await asyncio.shield(reading.task)
        await self._until_written(attempt_id)

    async def _until_written(self, attempt_id: UUID) -> None:
        while self._writer.open_calls(attempt_id):
            waiter = self._loop.create_future()
            self._waiters.setdefault(attempt_id, []).append(waiter)
            self._writer.hurry()
            await waiter

    def forget(self, attempt_id: UUID) -> None:
        """Drops the account of an ended attempt from memory."""
        if not self._writer.open_calls(attempt_id):
            self._accounts.pop(attempt_id, None)
        self._writer.forget(attempt_id)

    async def close(self) -> None:
        """Writes the remaining calls and stops."""
        await self._warming
        left = await asyncio.to_thread(self._writer.close, CLOSE_S)
        if left:
            log.error("recorder.calls_lost", calls=left)

    def _on_written(self, attempts: Iterable[UUID], error: DatabaseUnavailable | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._wake, list(attempts), error)
        except RuntimeError:  # the loop has ended
            log.info("recorder.loop_ended")

    def _wake(self, attempts: list[UUID], error: DatabaseUnavailable | None) -> None:
        for attempt_id in attempts:
            for waiter in self._waiters.pop(attempt_id, ()):
                if waiter.done():
                    continue
                if error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(error)


def _estimated(exchange: Exchange, use: TokenUse) -> TokenUse:
    """Estimates the tokens for the price: a hang-up before a stream reports them is not free. Each event is one."""
    hung_up = exchange.end is CallEnd.CLIENT_GONE or (exchange.detail == HUNG_UP and use.total is None)
    if not (hung_up and exchange.streamed and exchange.response):
        return use
    prompt = len(exchange.request) // 4 if use.prompt is None else use.prompt
    return replace(use, prompt=prompt, completion=max(use.completion or 0, exchange.response.count(b"data:")))


def _account_after(account: Account, exchange: Exchange, use: TokenUse, cost: float | None, is_turn: bool) -> Account:
    waited = sum(exchange.waited_s.values())
    stopped = exchange.end if exchange.end in model_calls.STOPS else None
    return replace(
        account,
        calls=account.calls + 1,
        turns=account.turns + is_turn,
        prompt_tokens=account.prompt_tokens + (use.prompt or 0),
        completion_tokens=account.completion_tokens + (use.completion or 0),
        cached_tokens=account.cached_tokens + (use.cached or 0),
        cost_usd=account.cost_usd + (cost or 0.0),
        unpriced_calls=account.unpriced_calls + (cost is None),
        scripted_calls=account.scripted_calls + exchange.scripted,
        model_s=account.model_s + max(exchange.duration_s - waited, 0.0),
        waited_s=account.waited_s + waited,
        last_end=exchange.end,
        last_cost_usd=cost or account.last_cost_usd,
        stopped_by=account.stopped_by or stopped,
    )
