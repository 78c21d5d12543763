"""Pool of a worker's environments: those in use and, for a persistent worker, those reset for the next attempt.

An attempt gets a used environment that is proven clean, if that is allowed, otherwise a fresh one. A shared environment
is lent to several attempts at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from app.environments.contract import Environment, EnvironmentProvider, Origin, ResetProof, Tags
from app.environments.isolation.fingerprint import Fingerprint, differences
from app.environments.runtimes.session_environment import ended_on_error, give_up
from app.environments.sharing import Borrowed, Loans
from app.errors import StationError
from app.models.spec import Compose, EnvironmentKind, EnvironmentSpec, Network, Resources, Reuse

log = structlog.get_logger()

MAX_AGE_S = 1800.0


@dataclass(frozen=True, slots=True)
class Key:
    """Properties that two tasks must share so that one may get the other's environment."""

    kind: EnvironmentKind
    image_id: str  # not the reference: a tag may move
    resources: Resources
    network: Network
    allowed_hosts: frozenset[str]
    workdir: str
    env: frozenset[tuple[str, str]]
    setup: tuple[str, ...]
    tools: frozenset[tuple[str, str]]  # each with its version: the name of its folder
    compose: Compose | None
    read_only: bool  # made to be shared: its root takes no writes

    @classmethod
    def of(cls, spec: EnvironmentSpec, image_id: str, tools: Mapping[str, str] | None = None) -> Key:
        """Builds the key of a spec. tools: versions by name (`EnvironmentProvider.tool_versions`)."""
        versions = tools or {}
        return cls(
            kind=spec.kind,
            image_id=image_id,
            resources=spec.resources,
            network=spec.network,
            allowed_hosts=frozenset(spec.allowed_hosts),
            workdir=spec.workdir,
            env=frozenset(spec.env.items()),
            setup=spec.setup,
            tools=frozenset((name, versions.get(name, "")) for name in spec.tools),
            compose=spec.compose,
            read_only=spec.reuse is Reuse.SHARED_READONLY,
        )


@dataclass(slots=True)
class Holding:
    """An environment, the key that it fits, and its creation time (monotonic)."""

    environment: Environment
    key: Key
    made: float
    deadline_unix_s: float  # of its current or last attempt
    pristine: Fingerprint | None = None  # its state before the first task, seen from inside; None: not for reuse
    joining: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class _PoolRequest:
    provider: EnvironmentProvider
    spec: EnvironmentSpec
    tags: Tags
    key: Key
    timeout_s: float


CreateEnvironment = Callable[..., Environment]
"""Signature of `EnvironmentProvider.create`, with the provider as the first argument."""


def _create(provider: EnvironmentProvider, *request: Any, timeout_s: float) -> Environment:
    return provider.create(*request, timeout_s=timeout_s)


class EnvironmentPool:
    """The environments of one worker, lent and idle. Safe to share between threads.

    A recycled container keeps the labels of its first attempt, but gets a name for its new one.
    """

    def __init__(self, *, max_idle: int, max_age_s: float = MAX_AGE_S, create: CreateEnvironment = _create) -> None:
        """create: makes an environment with a provider; `EnvironmentRecorder.create` also records it."""
        self._create = create
        self._max_idle = max_idle
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._idle: deque[Holding] = deque()  # least recently used first
        self._lent: dict[str, Holding] = {}
        self._loans: Loans[Holding] = Loans(lambda holding: self._discard([holding]))
        self._closed = False

    def acquire(
        self,
        provider: EnvironmentProvider,
        spec: EnvironmentSpec,
        tags: Tags,
        image_id: str,
        *,
        timeout_s: float,
        allow_reuse: bool,
    ) -> tuple[Environment, Origin]:
        """Returns a fitting clean environment, otherwise a new one. The pool still owns it: return it with `release`.

        allow_reuse: whether other tasks may have used it or, if the spec allows it, use it at the same time.

        Raises: the errors of the provider's `create`.
        """
        self._discard(self._outdated())
        request = _PoolRequest(
            provider, spec, tags, Key.of(spec, image_id, provider.tool_versions(spec) if spec.tools else {}), timeout_s
        )
        if not (allow_reuse and spec.reuse is Reuse.SHARED_READONLY):
            holding, origin = self._get(request, allow_reuse=allow_reuse)
            self._lend(holding)
            return holding.environment, origin
        handle, first = self._loans.borrow(
            (tags.run_id, request.key),
            lambda: self._get(request, allow_reuse=True)[0],
            lambda holding: _joins(holding, tags),
            timeout_s=timeout_s,
        )
        return handle, Origin(handle.describe()["origin"]) if first else Origin.RECYCLED

    def release(self, environment: Environment, *, reuse: bool) -> ResetProof | None:
        """Takes it back. With `reuse`, resets and keeps it if proven clean, else destroys it. None: no reset was tried.

        A shared environment stays unchanged until its last borrower returns it.
        """
        if isinstance(environment, Borrowed):
            holding = self._loans.give_back(environment)
            if holding is None:
                return None
        else:
            with self._lock:
                holding = self._lent.pop(environment.id, None)
            if holding is None:
                environment.destroy()
                return None
        return self._retire(holding, reuse=reuse and self._max_idle > 0 and not self._closed)

    def _retire(self, holding: Holding, *, reuse: bool) -> ResetProof | None:
        environment = holding.environment
        proof = _proven(holding) if reuse else None
        if proof is None or not proof.clean:
            if proof is not None:
                log.info("environment.not_recycled", environment=environment.id, left=list(proof.left))
            environment.destroy()
            return proof
        log.info("environment.reset", environment=environment.id, took_s=round(proof.took_s, 4))
        self._discard(self._keep(holding))
        return proof

    def _get(self, asked: _PoolRequest, *, allow_reuse: bool) -> tuple[Holding, Origin]:
        while allow_reuse and (holding := self._take(asked.key)) is not None:
            if _answers(holding, asked.tags):
                return holding, Origin.RECYCLED
            self._discard([holding])
        environment = self._create(asked.provider, asked.spec, asked.tags, timeout_s=asked.timeout_s)
        with ended_on_error(environment):
            pristine = Fingerprint.take(environment) if allow_reuse and self._max_idle else None
        key, made_at = _key_of(environment, asked), time.monotonic()
        return Holding(environment, key, made_at, asked.tags.deadline_unix_s, pristine), Origin.FRESH

    def close(self) -> None:
        """Destroys all environments, lent ones too: the worker is leaving."""
        with self._lock:
            self._closed = True
            leaving = [*self._idle, *self._lent.values()]
            self._idle.clear()
            self._lent.clear()
        self._discard([*leaving, *self._loans.close()])

    def _lend(self, holding: Holding) -> None:
        with self._lock:
            self._lent[holding.environment.id] = holding

    def _take(self, key: Key) -> Holding | None:
        with self._lock:
            for holding in reversed(self._idle):
                if holding.key == key:
                    self._idle.remove(holding)
                    return holding
        return None

    def _keep(self, holding: Holding) -> list[Holding]:
        """Adds it to the idle ones. Returns those to destroy for it, which may include itself."""
        with self._lock:
            if self._closed:
                return [holding]
            self._idle.append(holding)
            return [self._idle.popleft() for _ in range(len(self._idle) - self._max_idle)]

    def _outdated(self) -> list[Holding]:
        oldest = time.monotonic() - self._max_age_s
        with self._lock:
            outdated = [holding for holding in self._idle if holding.made < oldest]
            for holding in outdated:
                self._idle.remove(holding)
        return outdated

    def _discard(self, holdings: list[Holding]) -> None:
        for holding in holdings:
            give_up(holding.environment)


def _key_of(environment: Environment, asked: _PoolRequest) -> Key:
    """Returns the key of what it was made from: a tag or a tool may have changed since the request was built."""
    about, key = environment.describe(), asked.key
    if (tools := about.get("tools")) is not None:
        key = replace(key, tools=frozenset(tools.items()))
    if (image_id := about.get("image_id")) is not None and not asked.spec.compose:
        key = replace(key, image_id=image_id)
    return key


def _proven(holding: Holding) -> ResetProof:
    begun = time.monotonic()
    proof = holding.environment.reset()
    if proof.clean and holding.pristine is not None:
        proof = _compared(proof, holding.pristine, holding.environment)
    return replace(proof, took_s=time.monotonic() - begun)


def _compared(proof: ResetProof, pristine: Fingerprint, environment: Environment) -> ResetProof:
    """Adds to the driver's proof a comparison of the state seen from inside, which is the same for every driver."""
    try:
        left = differences(pristine, Fingerprint.take(environment))
    except StationError as error:
        left = (f"it could not be looked at: {error}",)
    return replace(proof, clean=not left, left=left[:20])


def _answers(holding: Holding, tags: Tags) -> bool:
    """Gives an idle environment its new owner. False: it no longer lives; it may have been removed meanwhile."""
    environment = holding.environment
    try:
        environment.adopt(tags)
        environment.stats()
    except StationError:
        return False
    holding.deadline_unix_s = tags.deadline_unix_s
    return True


def _joins(holding: Holding, tags: Tags) -> bool:
    """Lends it to one more borrower. It shows the owner with the latest deadline. False: it no longer lives."""
    with holding.joining:  # when two join at once, the later deadline must stay
        if tags.deadline_unix_s > holding.deadline_unix_s:
            return _answers(holding, tags)
    try:
        holding.environment.stats()
    except StationError:
        return False
    return True
