"""The keeper's door: a Unix socket at which ready environments change hands."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import structlog

from app.environments.base import Tags, Ticket, Transferable
from app.environments.warm import wire
from app.environments.warm.ahead import LIFE_S, lives
from app.environments.warm.shelf import Ready, Shelf
from app.errors import StationError

log = structlog.get_logger()

_ARRIVAL_S = 30.0
"""So long a taker may be silent before its ticket is given up; the environment is its own, or the sweeper's."""
_BACKLOG = 128


class Door:
    """Serves what is on the shelf, from `open` to `close`.

    taken: called with the key of what somebody has now. lost: with the key of what could not be given to anybody, with
    itself, which is the callee's to end, and with whether it was alive.

    There is one at an address: whoever opens it sees to that. A file that a killed one left is replaced.
    """

    def __init__(
        self,
        address: Path,
        shelf: Shelf,
        *,
        installation: str,
        taken: Callable[[str], None],
        lost: Callable[[str, Ready, bool], None],
    ) -> None:
        self._address = address
        self._shelf = shelf
        self._installation = installation
        self._taken = taken
        self._lost = lost
        self._listening = wire.new_socket()

    def open(self) -> None:
        """Listen from now on. Raises: OSError."""
        self._address.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._address.with_name(f".{self._address.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        with wire.named(fresh) as address:
            self._listening.bind(address)
        fresh.chmod(0o600)
        self._listening.listen(_BACKLOG)
        fresh.replace(self._address)
        threading.Thread(target=self._accept, name="warm-door", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._address.unlink(missing_ok=True)
        with suppress(OSError):  # it was never opened
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="warm-hand-out", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_ARRIVAL_S)
            try:
                key = wire.receive(connection).decode(errors="replace")
                found = self._given_away(key)
                if found is None:
                    wire.send_ticket(connection, None)
                    return
            except OSError:
                return
            self._hand_over(connection, key, *found)

    def _given_away(self, key: str) -> tuple[Ready, Ticket] | None:
        """One that is alive, and its ticket."""
        while (one := self._shelf.take(key)) is not None:
            with one.turn:
                try:
                    assert isinstance(one.environment, Transferable)  # else it would not be on the shelf
                    return one, replace(one.environment.hand_over(), making=one.phases)
                except StationError as error:
                    log.warning("warm.not_given_away", environment=one.environment.id, reason=str(error))
                    alive = lives(one)
            self._lost(key, one, alive)
        return None

    def _hand_over(self, connection: socket.socket, key: str, one: Ready, ticket: Ticket) -> None:
        """Until it has arrived it is still ours: a taker that fails or dies leaves it to us."""
        begun, arrived = time.monotonic(), False
        try:
            wire.send_ticket(connection, ticket)
            arrived = wire.receive(connection) == wire.ARRIVED
        except TimeoutError:
            arrived = True  # perhaps: nobody else may touch it
        except OSError:
            pass
        finally:
            self._taken(key)  # not before: making the next one would take this one's time
        if arrived:
            wire.close_all(ticket.descriptors)
            log.debug("warm.handed_out", environment=one.environment.id, took_s=round(time.monotonic() - begun, 4))
        else:
            self._take_back(one, ticket)

    def _take_back(self, one: Ready, ticket: Ticket) -> None:
        log.warning("warm.not_arrived", environment=one.environment.id)
        tags = Tags.ahead(self._installation, uuid4(), time.time() + LIFE_S)
        try:
            one.provider.take_over(one.spec, ticket, tags).destroy()
        except StationError as error:  # the taker ended it, or the sweeper will
            log.debug("warm.not_taken_back", environment=one.environment.id, reason=str(error))
