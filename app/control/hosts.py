"""Keeps the accounts of joined hosts true: Redis forgets its users, and a host that was one instance ends with it."""

from __future__ import annotations

import threading

import structlog

from app.errors import BrokerUnavailable, DatabaseUnavailable, InstallationFailed
from app.instances import broker_users, joining
from app.ledger import hosts
from app.ledger.database import Database
from app.settings import Settings

log = structlog.get_logger()

_EVERY_S, _REFUSED_S = 3.0, 60.0
"""Between two looks; after Redis refused to make users."""


class JoinedHosts:
    """`run` blocks until told to stop. Several at once do each other no harm."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._settings = database, settings

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(_EVERY_S):
            try:
                self._look()
            except (DatabaseUnavailable, BrokerUnavailable) as error:
                log.debug("hosts.away", reason=str(error))
            except InstallationFailed as error:
                log.error("hosts.accounts_refused", reason=str(error))
                stop.wait(_REFUSED_S)

    def _look(self) -> None:
        if not hosts.any_joined(self._database):
            return
        for host in hosts.ended(self._database):
            joining.revoke(self._settings, self._database, host, "the instance that its host was has ended")
        if changed := broker_users.restore(self._settings, hosts.broker_users(self._database)):
            log.warning("hosts.broker_users_restored", accounts=changed)
