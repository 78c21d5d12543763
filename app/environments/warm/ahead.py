"""Making environments ahead, in the background: what is a guess waits for nothing that a task could wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from uuid import UUID

import structlog

from app.environments.base import Environment, EnvironmentProvider, Tags, Taking, Transferable
from app.environments.host_slots import Gate
from app.environments.tools import versions_of
from app.environments.warm.key import Key
from app.environments.warm.shelf import Ready, Shelf
from app.errors import AgentUnavailable, DatabaseUnavailable, EnvironmentFailed, MegaFlowError, StationError
from app.models.spec import EnvironmentKind, EnvironmentSpec

log = structlog.get_logger()

LIFE_S = 120.0
"""What is ready lives so long by itself, when whoever keeps it is killed."""
_BELIEVED_S = 20.0
"""So long an image is taken for the one that a reference means."""
_ABSENT_S = 3.0
"""Between the first two looks for an image that is not here yet; each time twice as long."""
_ABSENT_MOST_S = 60.0
_FAILED_S = 120.0
"""What could not be made is left to the tasks that need it for so long."""
_BUSY_S = 0.5
"""Nothing is begun for so long when no place was free to make one."""
_LOOKS_S = 30.0
_LOOKERS = 2
"""Images that are asked for at once, and how long one may take to unpack."""
_KNOWN_S = 600.0

Provide = Callable[[EnvironmentKind], EnvironmentProvider]


class AheadGate:
    """Takes a place for a start only where one is free at this moment, and fetches no image: tasks go before guesses.

    Images are pulled and built ahead by the prefetcher, in its own order.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def hold(self, limit: str, capacity: int | None, *, timeout_s: float) -> AbstractContextManager[None]:
        if not limit.startswith("environment_starts:"):
            raise TimeoutError(f"{limit} is for tasks that wait")
        return self._gate.hold(limit, capacity, timeout_s=min(timeout_s, 0.0))


@dataclass(frozen=True, slots=True)
class Wish:
    """One environment that a task will need, and how long its making may take."""

    spec: EnvironmentSpec
    timeout_s: float


@runtime_checkable
class Looking(Protocol):
    """A provider that can tell whether an image is here."""

    def has_image(self, spec: EnvironmentSpec) -> bool:
        """Whether `prepare_image` would find it, with nothing to fetch or to build, and nobody to wait for.

        Raises: EngineUnavailable, ImageUnavailable.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a spec: its key, when its image is here, and until when that is believed (monotonic)."""

    key: str | None = None
    until: float = 0.0
    failures: int = 0  # in a row


class Workshop:
    """Finds images and makes environments, each in a thread; `changed` is called when there is something new.

    makers: environments that it makes at once.
    """

    def __init__(
        self,
        shelf: Shelf,
        provide: Provide,
        *,
        installation: str,
        keeper_id: UUID,
        makers: int,
        changed: Callable[[], None],
    ) -> None:
        self._shelf = shelf
        self._provide = provide
        self._installation = installation
        self._keeper_id = keeper_id
        self._makers = makers
        self._changed = changed
        self._lock = threading.Lock()
        self._providers: dict[EnvironmentKind, EnvironmentProvider] = {}
        self._keys: dict[str, _Known] = {}  # by spec
        self._looking: set[str] = set()
        self._left_until: dict[str, float] = {}  # by key: monotonic seconds
        self._busy_until = 0.0  # for all keys
        self._ending = 0

    # --- Images ---------------------------------------------------------------------------------------------------

    def key_of(self, wish: Wish, *, look: bool) -> str | None:
        """Its key, when the image is here; None while that is not known. look: have it found out."""
        name = wish.spec.model_dump_json()
        with self._lock:
            known = self._keys.get(name, _Known())
            if look and known.until < time.monotonic() and name not in self._looking and len(self._looking) < _LOOKERS:
                self._looking.add(name)
                _in_background("warm-image", self._look, name, wish.spec)
        return known.key

    def forget(self) -> None:
        """Drop what was known long ago: specs go out of the queue for ever."""
        now = time.monotonic()
        with self._lock:
            self._keys = {name: known for name, known in self._keys.items() if known.until > now - _KNOWN_S}
            self._left_until = {key: until for key, until in self._left_until.items() if until > now}

    def _look(self, name: str, spec: EnvironmentSpec) -> None:
        key, waits = None, False
        try:
            key = self._found(spec)
        except AgentUnavailable as error:  # the first task that needs it installs it
            log.debug("warm.no_tool", image=spec.label, reason=str(error))
            waits = True
        except MegaFlowError as error:
            log.debug("warm.no_image", image=spec.label, reason=str(error))
        finally:
            with self._lock:
                self._looking.discard(name)
                failures = 0 if key else 1 if waits else self._keys.get(name, _Known()).failures + 1
                absent_s = min(_ABSENT_MOST_S, _ABSENT_S * 2 ** min(failures - 1, 16)) if failures else 0.0
                self._keys[name] = _Known(key, time.monotonic() + (absent_s or _BELIEVED_S), failures)
        self._changed()

    def _found(self, spec: EnvironmentSpec) -> str | None:
        """Its key. None: its image is not here; whoever is fetching it is not waited for."""
        provider = self._provider(spec.kind)
        if isinstance(provider, Looking) and not provider.has_image(spec):
            return None
        tools = versions_of(provider, spec)
        return Key.of(spec, provider.prepare_image(spec, timeout_s=_LOOKS_S), tools).digest()

    # --- Environments ---------------------------------------------------------------------------------------------

    def may_make(self, key: str) -> bool:
        """Whether there is a maker, and it has not just failed."""
        if self._shelf.stock()[1].total() >= self._makers:
            return False
        with self._lock:
            return max(self._busy_until, self._left_until.get(key, 0.0)) <= time.monotonic()

    def leave(self, key: str) -> None:
        """Make none of these for a while: they are of no use."""
        with self._lock:
            self._left_until[key] = time.monotonic() + _FAILED_S

    def make(self, key: str, wish: Wish) -> None:
        """Have one made; the shelf counts it from now on."""
        self._shelf.begin(key)
        _in_background("warm-maker", self._make, key, wish)

    def _make(self, key: str, wish: Wish) -> None:
        made, rest_s, busy_s = None, _FAILED_S, 0.0
        try:
            made, rest_s = self._made(wish), 0.0
        except AgentUnavailable as error:  # the first task that needs it installs it
            log.debug("warm.no_tool", image=wish.spec.label, reason=str(error))
            rest_s = _ABSENT_S
        except MegaFlowError as error:
            if isinstance(error, DatabaseUnavailable) or isinstance(error.__cause__, TimeoutError):  # no place is free
                rest_s = busy_s = _BUSY_S
            else:
                log.warning("warm.not_made", image=wish.spec.label, reason=str(error))
        finally:
            fits = made is not None and self._fits(key, made)
            with self._lock:
                self._left_until[key] = time.monotonic() + rest_s
                self._busy_until = max(self._busy_until, time.monotonic() + busy_s)
            if not self._shelf.end(key, made if fits else None) or (made is not None and not fits):
                assert made is not None  # else the shelf has nothing against it
                self.end_soon(made)
        if made is not None:  # whoever gets it tells what its making took; of one that nobody takes only this does
            told = {"path": made.environment.describe().get("path"), "phases": made.phases}
            log.info("warm.made", environment=made.environment.id, image=made.spec.label, **told)
        self._changed()

    def _fits(self, key: str, made: Ready) -> bool:
        """Whether it is what was found before: a tag may have moved, a tool been replaced; then nothing is believed."""
        about = made.environment.describe()
        image_id = about.get("image_id")
        if image_id is None or Key.of(made.spec, image_id, about.get("tools")).digest() == key:
            return True
        log.info("warm.image_moved", image=made.spec.label, image_id=image_id)
        with self._lock:
            self._keys.pop(made.spec.model_dump_json(), None)
        return False

    # --- Ends -----------------------------------------------------------------------------------------------------

    @property
    def ending(self) -> int:
        """How many are being ended: they are there yet."""
        with self._lock:
            return self._ending

    def end_soon(self, one: Ready) -> None:
        """Destroy it; an engine that takes long over it keeps nobody waiting."""
        with self._lock:
            self._ending += 1
        _in_background("warm-end", self._end, one)

    def _end(self, one: Ready) -> None:
        try:
            end(one)
        finally:
            with self._lock:
                self._ending -= 1
            self._changed()

    def _made(self, wish: Wish) -> Ready:
        provider = self._provider(wish.spec.kind)
        if not isinstance(provider, Taking):
            raise EnvironmentFailed(f"environments of the kind {wish.spec.kind.value} do not change hands here.")
        tags = Tags.ahead(self._installation, self._keeper_id, time.time() + wish.timeout_s + LIFE_S)
        environment = provider.create(wish.spec, tags, timeout_s=wish.timeout_s)
        made = Ready(environment, wish.spec, provider, environment.describe().get("phases", {}))
        try:
            put_off(made.environment)  # the time of its making is over
        except BaseException:
            end(made)
            raise
        return made

    def _provider(self, kind: EnvironmentKind) -> EnvironmentProvider:
        with self._lock:
            if kind not in self._providers:
                self._providers[kind] = self._provide(kind)
            return self._providers[kind]


def put_off(environment: Environment) -> None:
    """Let it live on for a while. Raises: EnvironmentFailed: it does not, or cannot change hands."""
    if not isinstance(environment, Transferable):
        raise EnvironmentFailed(f"environment {environment.id[:12]} cannot change hands.")
    environment.keep_until(time.time() + LIFE_S)


def lives(one: Ready) -> bool:
    """Whether it answers."""
    try:
        one.environment.stats()
    except StationError:
        return False
    return True


def end(one: Ready) -> None:
    """Destroy it; what stays is the sweeper's, by its deadline."""
    try:
        one.environment.destroy()
    except StationError as error:
        log.warning("warm.not_destroyed", environment=one.environment.id, reason=str(error))


def _in_background(name: str, work: Callable[..., None], *values: object) -> None:
    threading.Thread(target=work, args=values, name=name, daemon=True).start()
