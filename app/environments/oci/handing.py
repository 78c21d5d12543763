"""How an environment changes hands between processes: what a ticket of it says, and the connection that goes along.

The connection is what keeps it alive on the way: a helper that nobody is connected to takes its owner for dead. Nobody
has read from it yet, so whoever takes over greets the helper on it, as on one of its own.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from app.environments.base import Origin, Route, Ticket, Times
from app.environments.oci.store import StoredImage
from app.environments.session import unix_connector
from app.environments.session.connect import Connect, Stream
from app.errors import EnvironmentFailed

KIND = "oci"


@dataclass(frozen=True)
class Handed:
    """What cannot be read from an environment's record, nor from the spec it was made from."""

    id: str
    image: StoredImage  # with the snapshot's layer, when it stands on one
    origin: Origin
    set_up_inside: bool
    tools: dict[str, str]

    @property
    def times(self) -> Times:
        """As those of its next owner begin, who does not pay for its making: that was ahead, or for another task."""
        return Times(Route.RECYCLED if self.origin is Origin.RECYCLED else Route.WARM)

    def ticket(self, connection: int) -> Ticket:
        """connection: an open file, from now on the ticket's."""
        return Ticket(KIND, asdict(self), (connection,))

    @classmethod
    def of(cls, ticket: Ticket) -> Handed:
        """Raises: EnvironmentFailed: it is not a ticket of ours."""
        if ticket.kind != KIND:
            raise EnvironmentFailed(f"expected a ticket of the kind {KIND!r}, found {ticket.kind!r}.")
        try:
            found = cls(**ticket.body)
            image = StoredImage(**{**ticket.body["image"], "layers": tuple(ticket.body["image"]["layers"])})
            return replace(found, image=image, origin=Origin(found.origin))
        except (KeyError, TypeError, ValueError) as error:
            raise EnvironmentFailed(f"this ticket cannot be read ({error!r}); was another version here?") from error


def connection_to(address: Path) -> int:
    """A connection to the helper that listens there, as an open file: nothing was read from it yet. Raises: OSError."""
    stream: Any = unix_connector(address)()
    return int(stream.detach())


@contextmanager
def files_of(ticket: Ticket) -> Iterator[list[socket.socket]]:
    """Its connections; those still in the list at the end are closed."""
    found: list[socket.socket] = []
    try:
        for number in ticket.descriptors:
            try:
                found.append(socket.socket(fileno=number))
            except OSError:  # no connection: whatever it is, it goes
                with suppress(OSError):
                    os.close(number)
        yield found
    finally:
        for connection in found:
            connection.close()


def holds(connections: list[socket.socket]) -> bool:
    """Whether somebody is at the other end of one of them: a greeting alone may be of a helper that has died since."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLRDHUP)
    return len(poll.poll(0)) < len(connections)


def first(connections: list[socket.socket], otherwise: Connect) -> Connect:
    """Hands out these connections, then others. Takes them from the list."""

    def connect() -> Stream:
        return connections.pop() if connections else otherwise()

    return connect
