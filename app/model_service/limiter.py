"""Limits model calls per user, run and model: requests, tokens, calls at once.

State is in Redis, capacities in the table `limits`. A call acquires all its limits or none, in one script. Rates are
exact moving windows: one entry per call and minute, so never more than the limit in any minute. The actual use of a
call is corrected afterwards. Concurrency is one leased member per call. Calls wait in a queue, first come first served;
a place in the queue expires when its caller stops polling. Redis' clock is the only one.

No library is used: existing ones acquire one limit at a time (a call refused by the third has then used up the first
two), cannot correct a cost afterwards, or keep one entry per token.
Source: MegaFlow, section 2.3.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import redis.asyncio
import structlog
from redis.exceptions import RedisError

from app.errors import BrokerUnavailable, CallThrottled, DatabaseUnavailable
from app.ledger import limits
from app.ledger.database import Database
from app.ledger.limits import everybody
from app.model_service import limiter_scripts as scripts
from app.settings import Settings

log = structlog.get_logger()

_CACHED_S = 1.0
"""Seconds until a changed limit is in force."""


_STEP_S = 0.01
"""Polling interval per call ahead in the queue, at most `_NAP_S`: a place in the queue expires after 5 s."""
_NAP_S = 1.0
_LOOK_S = 0.25
"""Polling interval at the head of the queue: the limit may be raised meanwhile."""
_PARTS = ("members", "sum", "line", "seen")


class CallLimit(NamedTuple):
    """A limit of one call."""

    name: str
    what: str  # requests | tokens | concurrency
    capacity: int
    amount: int


Capacities = Callable[[], Awaitable[Mapping[str, int]]]
"""Function that returns the current capacities by the limit's name."""


def ledger_capacities(database: Database) -> Capacities:
    """Returns a reader of the model limits in the table `limits`: at most once a second, the last values on failure.

    Raises: DatabaseUnavailable: nothing was ever read.
    """
    known: dict[str, int] | None = None
    read_at = 0.0
    lock = asyncio.Lock()
    reading: asyncio.Task[None] | None = None

    def read() -> dict[str, int]:
        with database.begin() as connection:
            return limits.capacities(connection, "model_")

    async def renew() -> None:
        nonlocal known, read_at
        try:
            known = await asyncio.to_thread(read)
        except DatabaseUnavailable as error:
            if known is None:
                raise
            log.warning("model_limits.not_read", error=str(error))
        read_at = time.monotonic()

    async def current() -> Mapping[str, int]:
        nonlocal reading
        age_s = time.monotonic() - read_at
        if known is not None and age_s <= _CACHED_S:
            if age_s > _CACHED_S / 2 and (reading is None or reading.done()):
                reading = asyncio.create_task(renew(), name="model-limits")  # in the background: calls need not wait
            return known
        async with lock:
            if known is None or time.monotonic() - read_at > _CACHED_S:
                await renew()
            assert known is not None
            return known

    return current


@dataclass(slots=True)
class Permit:
    """Right to make one call. `waited`: seconds waited for it, by limit."""

    holder: str
    bounds: Sequence[CallLimit]
    waited: Mapping[str, float]
    spent: int | None = None

    def used(self, tokens: int) -> None:
        """Sets the call's actual cost in tokens, before the block ends. Otherwise the estimate stays."""
        if tokens < 0:
            raise ValueError(f"expected 0 or more tokens, found {tokens}")
        self.spent = tokens


class ModelLimiter:
    """Limiter of model calls, for one event loop; any number of processes may share the limits.

    `patience_s`: limit of the wait for a permit. `lease_s`: seconds until the concurrency of a dead process is free.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        capacities: Capacities,
        *,
        prefix: str,
        patience_s: float = 300.0,
        lease_s: float = 15.0,
        window_s: float = 60.0,
    ) -> None:
        self._client = client
        self._capacities = capacities
        self._prefix = prefix
        self._patience_s = patience_s
        self._lease_ms = int(lease_s * 1000)
        self._window_ms = int(window_s * 1000)
        self._acquire = client.register_script(scripts.ACQUIRE)
        self._settle = client.register_script(scripts.SETTLE)
        self._renew = client.register_script(scripts.RENEW)
        self._live: dict[str, Permit] = {}
        self._renewing: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, settings: Settings, database: Database) -> ModelLimiter:
        """Creates the limiter of an installation. The caller must close it."""
        client = redis.asyncio.Redis.from_url(settings.redis(), socket_connect_timeout=2, socket_timeout=5)
        return cls(
            client, ledger_capacities(database), prefix=prefix_of(settings), patience_s=settings.gateway_patience_s
        )

    async def close(self) -> None:
        """Stops renewing; leases that are still held expire."""
        if self._renewing is not None:
            while not self._renewing.done():  # a Redis answer at the same moment may lose a cancellation
                self._renewing.cancel()
                await asyncio.wait([self._renewing], timeout=0.5)
            self._renewing = None
        await self._client.aclose()

    @asynccontextmanager
    async def call(
        self, *, run_id: object, user: str, model: str, tokens: int, patience_s: float | None = None
    ) -> AsyncIterator[Permit]:
        """Acquires a permit for the block, which makes one call. `tokens`: the estimate of its cost.

        patience_s: longest wait of this call, if it is less than the limiter's own patience.

        Raises: CallThrottled: a limit left no room for that long, or never could; BrokerUnavailable,
        DatabaseUnavailable: the limits cannot be read.
        """
        subjects = {"user": user, "run": str(run_id), "model": model}
        capacities = await self._capacities()
        if not capacities or not limits_of(capacities, subjects, tokens):
            yield Permit("", (), {})  # no limit to acquire or release: Redis is not called
            return
        holder = uuid.uuid4().hex
        waited: dict[str, float] = {}
        bounds: Sequence[CallLimit] = ()
        try:
            patience_s = self._patience_s if patience_s is None else max(0.0, min(patience_s, self._patience_s))
            bounds = await self._wait(holder, subjects, tokens, waited, patience_s)
            permit = Permit(holder, bounds, waited)
            self._hold(permit)
            yield permit
        finally:
            live = self._live.pop(holder, None)
            # Also when the caller is cancelled: its limits are released before anything else happens.
            await asyncio.shield(self._release(holder, live, subjects))

    async def _wait(
        self, holder: str, subjects: Mapping[str, str], tokens: int, waited: dict[str, float], patience_s: float
    ) -> Sequence[CallLimit]:
        begun = last = time.monotonic()
        while True:
            bounds = limits_of(await self._capacities(), subjects, tokens)
            _refuse_impossible(bounds)
            try:
                answer = await self._ask(holder, bounds, subjects)
            except (RedisError, OSError) as error:
                if time.monotonic() - begun > min(patience_s, self._lease_ms / 1000):
                    raise BrokerUnavailable(
                        f"expected Redis to answer, found: {error}; try `megaflow doctor`"
                    ) from error
                await asyncio.sleep(random.uniform(0.1, 0.4))
                continue
            now = time.monotonic()
            if answer is None:
                return bounds
            limit, nap_s = answer
            if now - begun > patience_s:
                raise CallThrottled(
                    f"expected {limit.name} to leave room within {patience_s:g} s, found its {limit.capacity}"
                    f" taken; try `megaflow limits set {limit.name} {max(1, limit.capacity * 2)}`",
                    limit.name,
                )
            await asyncio.sleep(min(nap_s * random.uniform(0.8, 1.2), max(0.01, begun + patience_s - now)))
            waited[limit.name] = waited.get(limit.name, 0.0) + time.monotonic() - last
            last = time.monotonic()

    async def _ask(
        self, holder: str, bounds: Sequence[CallLimit], subjects: Mapping[str, str]
    ) -> tuple[CallLimit, float] | None:
        """Tries to acquire all limits. None: acquired. Else the limiting factor, and the seconds until the next try."""
        if not bounds:
            return None
        keys = [key for bound in bounds for key in self._keys(bound)]
        values = [value for bound in bounds for value in (bound.what, bound.capacity, bound.amount)]
        with _raise_if_cancelled():
            acquired, first, ahead, due_ms = await self._acquire(
                keys=keys, args=[holder, self._window_ms, self._lease_ms, *values]
            )
        if acquired:
            return None
        nap_s = min(_NAP_S, _STEP_S * (ahead + 1))
        return bounds[first - 1], nap_s if due_ms < 0 else max(nap_s, min(_LOOK_S, due_ms / 1000))

    def _keys(self, bound: CallLimit) -> tuple[str, str, str, str]:
        members, total, line, seen = (f"{self._prefix}:{part}:{bound.name}" for part in _PARTS)
        return members, total, line, seen

    def _hold(self, permit: Permit) -> None:
        self._live[permit.holder] = permit
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew_all(), name="model-permits")

    async def _renew_all(self) -> None:
        while self._live:
            await asyncio.sleep(self._lease_ms / 3000)
            leases = [
                (bound, permit.holder)
                for permit in self._live.values()
                for bound in permit.bounds
                if bound.what == "concurrency"
            ]
            try:
                for bound, holder in leases:
                    if holder not in self._live:  # released while the others were renewed
                        continue
                    with _raise_if_cancelled():
                        await self._renew(keys=[self._keys(bound)[0]], args=[holder, self._lease_ms, bound.capacity])
            except (RedisError, OSError) as error:
                log.warning("model_permits.not_renewed", error=str(error), held=len(leases))
            except Exception:  # the next round may succeed
                log.exception("model_permits.not_renewed", held=len(leases))

    async def _release(self, holder: str, permit: Permit | None, subjects: Mapping[str, str]) -> None:
        """Releases the concurrency or the place in the queue, and corrects the tokens. What fails here will expire."""
        bounds = permit.bounds if permit else limits_of(None, subjects, 0)
        spent = -1 if permit is None or permit.spent is None else permit.spent
        keys = [key for bound in bounds for key in self._keys(bound)]
        values = [value for bound in bounds for value in (bound.what, bound.amount)]
        if not bounds:
            return
        try:
            await self._settle(keys=keys, args=[holder, self._window_ms, spent, *values])
        except (RedisError, OSError) as error:
            log.warning("model_permit.not_returned", error=str(error))


class CallUse(NamedTuple):
    """Use of one limit: calls at once, or calls or tokens of the last minute, and the number of waiting calls."""

    used: int
    waiting: int


def in_use(client: redis.Redis, prefix: str, *, window_s: float = 60.0) -> dict[str, CallUse]:
    """Reads the use of all model-call limits that are in use or waited for, by name. Raises: BrokerUnavailable."""
    try:
        firsts = (f"{prefix}:members:", f"{prefix}:line:")
        names = {_name(key)[len(first) :] for first in firsts for key in client.scan_iter(f"{first}*", count=1000)}
        return {name: _use_of(client, prefix, name, int(window_s * 1000)) for name in sorted(names)}
    except (RedisError, OSError) as error:
        raise BrokerUnavailable(f"expected Redis to answer, found: {error}; try `megaflow doctor`") from error


@contextmanager
def _raise_if_cancelled() -> Iterator[None]:
    """Raises: asyncio.CancelledError: the block has swallowed a cancellation.

    redis-py sends by `asyncio.wait_for`. Before Python 3.12 that loses a cancellation if its awaitable is done at that
    moment. A cancelled caller would continue to wait, and then make the call.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    finally:  # also when the awaitable has failed at that moment
        if task.cancelling() > before:
            raise asyncio.CancelledError


def _use_of(client: redis.Redis, prefix: str, name: str, window_ms: int) -> CallUse:
    members, seen = f"{prefix}:members:{name}", f"{prefix}:seen:{name}"
    seconds, micros = client.time()
    now = int(seconds) * 1000 + int(micros) // 1000
    waiting = client.zcount(seen, f"({now}", "+inf")
    if name.startswith("model_concurrency:"):
        return CallUse(int(client.zcount(members, f"({now}", "+inf")), int(waiting))
    entries: list[bytes | str] = client.zrangebyscore(members, f"({now - window_ms}", "+inf")  # type: ignore[assignment]
    amounts = [int(_name(entry).rpartition(" ")[2]) for entry in entries]
    return CallUse(sum(amounts), int(waiting))


def _name(said: bytes | str) -> str:
    return said if isinstance(said, str) else said.decode()


def prefix_of(settings: Settings) -> str:
    """Returns the prefix of every key in Redis."""
    return f"megaflow:{settings.installation}:limits"


def limits_of(capacities: Mapping[str, int] | None, subjects: Mapping[str, str], tokens: int) -> list[CallLimit]:
    """Returns the limits set for a call. capacities None: all that may be set, since a call may be in any queue."""
    bounds = []
    for what, amount in (("requests", 1), ("tokens", tokens), ("concurrency", 1)):
        for scope, subject in subjects.items():
            name = f"model_{what}:{scope}:{subject}"
            capacity = 0 if capacities is None else capacities.get(name, capacities.get(everybody(name)))
            if capacity is not None:
                bounds.append(CallLimit(name, what, capacity, amount))
    return bounds


def _refuse_impossible(bounds: Sequence[CallLimit]) -> None:
    for bound in bounds:
        if bound.what == "tokens" and bound.amount > bound.capacity:
            raise CallThrottled(
                f"expected a call of at most {bound.capacity} tokens ({bound.name}), found one of {bound.amount};"
                f" try `megaflow limits set {bound.name} {bound.amount}`",
                bound.name,
            )
