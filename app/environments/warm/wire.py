"""What goes over the keeper's socket: a key, a ticket with its open files, and a word when it has arrived."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.environments.base import Ticket

ARRIVED = b"arrived"
_MESSAGE_BYTES = 1 << 16
_FILES = 16


def address(home: Path) -> Path:
    """Where the keeper of a home listens; for its owner alone."""
    return home.resolve() / "run" / "warm.sock"


@contextmanager
def named(place: Path) -> Iterator[str]:
    """A name of `place` for as long as the block: a socket's own has 107 bytes at most. Raises: OSError: no folder."""
    folder = os.open(place.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{place.name}"
    finally:
        os.close(folder)


def new_socket() -> socket.socket:
    """One whose messages stay whole."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_ticket(connection: socket.socket, ticket: Ticket | None) -> None:
    """None: there is none. The descriptors stay open here, too. Raises: OSError."""
    if ticket is None:
        connection.sendall(b"{}")
        return
    told = {"kind": ticket.kind, "body": ticket.body, "making": dict(ticket.making)}
    message = json.dumps(told).encode()
    socket.send_fds(connection, [message], ticket.descriptors)


def receive_ticket(connection: socket.socket) -> Ticket | None:
    """The caller closes its descriptors. Raises: OSError; ValueError: nobody of ours answered."""
    message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _FILES, socket.MSG_CMSG_CLOEXEC)
    try:
        found = json.loads(message or b"{}")
        if not found:
            close_all(descriptors)
            return None
        making = {str(phase): float(took_s) for phase, took_s in found.get("making", {}).items()}
        return Ticket(found["kind"], dict(found["body"].items()), tuple(descriptors), making=making)
    except (KeyError, TypeError, AttributeError) as error:
        close_all(descriptors)
        raise ValueError(f"expected a ticket, found something else ({error!r}); was another version here?") from error
    except BaseException:
        close_all(descriptors)
        raise


def receive(connection: socket.socket) -> bytes:
    """A message without files; empty at the end. Raises: OSError."""
    return connection.recv(_MESSAGE_BYTES)


def close_all(descriptors: list[int] | tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
