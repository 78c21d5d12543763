"""Getting a ready environment: what a worker does in place of making one."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import structlog

from app.environments.base import Environment, Tags, Taking
from app.environments.warm import wire
from app.environments.warm.key import Key, may_be_ready
from app.errors import StationError
from app.models.spec import EnvironmentSpec

log = structlog.get_logger()

_PATIENCE_S = 2.0
"""A keeper that says nothing for so long is taken for one that has nothing."""


class Warm:
    """Asks the keeper of a home. Holds nothing, so it may be made before or after a fork, and threads may share it."""

    def __init__(self, home: Path) -> None:
        self._address = wire.address(home)

    def take(self, provider: Taking, spec: EnvironmentSpec, key: Key, tags: Tags) -> Environment | None:
        """A ready environment, ours from now on; None when there is none, or nobody who keeps any."""
        if not may_be_ready(spec):
            return None
        begun = time.monotonic()
        try:
            with self._asked(key) as connection:
                ticket = wire.receive_ticket(connection)
                if ticket is None:
                    return None
                environment = provider.take_over(spec, replace(ticket, asked=begun), tags)
                with suppress(OSError):  # a keeper that has just gone does not miss it
                    connection.sendall(wire.ARRIVED)
                return environment
        except (OSError, ValueError) as error:
            log.debug("warm.not_asked", reason=str(error))
        except StationError as error:
            log.warning("warm.not_taken", reason=str(error))
        return None

    @contextmanager
    def _asked(self, key: Key) -> Iterator[socket.socket]:
        with wire.new_socket() as connection:
            connection.settimeout(_PATIENCE_S)
            with wire.named(self._address) as address:
                connection.connect(address)
            connection.sendall(key.digest().encode())
            yield connection
