"""Gives an attempt its model token, and reads its usage at the end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import structlog
from pydantic import SecretStr, TypeAdapter
from sqlalchemy import Connection

from app.agents.base import ModelEndpoint
from app.errors import ModelEndpointUnavailable
from app.ledger import model_calls, model_sessions
from app.ledger.attempts import Claim
from app.ledger.database import Database
from app.ledger.model_calls import StoredCall
from app.models.model_calls import Account
from app.settings import Settings
from app.workers.retry import retrying

_TIMEOUT_S = 10.0
_ACCOUNT = TypeAdapter(Account)
_AWAY = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""Read timeouts are not among them: a gateway that is slow to answer may have recorded every call."""


class GatewayClient:
    """One attempt's view of the gateway at `base_url` (without /v1), by the attempt's token. Threads may share it.

    `away` is true once a connection was refused or broken: then agents could not call either.
    """

    def __init__(self, base_url: str, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        self.away = False

    def account(self) -> Account:
        """What the attempt has had so far; `waited_s` counts calls that wait at this moment, too.

        Raises: ModelEndpointUnavailable: the gateway is away, or does not know the token.
        """
        return self._ask("GET", "/megaflow/session")

    def close(self, timeout_s: float = 10.0, *, answer_s: float = _TIMEOUT_S) -> Account | None:
        """End the attempt's calls: no more are taken, those under way get `timeout_s`, and all of it is on record then.

        The answer may take `answer_s` more. None: the gateway is away, or does not reach the ledger; what it had on
        record is in the ledger. May be asked again.
        """
        params = {"timeout_s": f"{timeout_s:g}"}
        try:
            return self._ask("POST", "/megaflow/session/close", params=params, timeout=timeout_s + answer_s)
        except ModelEndpointUnavailable:
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()  # the session stays open: `close` ends it

    def _ask(self, method: str, path: str, **options: Any) -> Account:
        try:
            answer = self._http.request(method, path, **options)
            body = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            self.away = self.away or isinstance(error, _AWAY)
            raise ModelEndpointUnavailable(
                f"model gateway {self._http.base_url}: expected an answer, found {type(error).__name__}: {error};"
                " try `megaflow doctor`"
            ) from error
        if answer.status_code != 200 or not isinstance(body, dict):
            found = f"status {answer.status_code}: {str(body)[:500]}"
            raise ModelEndpointUnavailable(f"model gateway {self._http.base_url}: expected an account, found {found}")
        try:
            return _ACCOUNT.validate_python(body)
        except ValueError as error:
            raise ModelEndpointUnavailable(f"expected an account from the model gateway, found: {error}") from error


log = structlog.get_logger()

Found = TypeVar("Found")

_SETTLE_S = 30.0
"""For a gateway that is being started again to answer."""
_IN_FLIGHT_S = 5.0
"""For calls whose agent has ended to end, too."""
_BETWEEN_S = 0.5
_HURRIED_S = 1.0
_HURRIED_ANSWER_S = 4.0
"""The same, and beyond it for the answer, when the attempt was told to stop: the caller waits."""


@dataclass(slots=True)
class ModelAccess:
    """Where one attempt's agent finds its model, and what it has had of it."""

    endpoint: ModelEndpoint
    claimed: Claim
    database: Database
    client: GatewayClient
    stopped: Callable[[], bool]
    """Whether the attempt was told to stop."""
    patience_s: float
    """With PostgreSQL."""
    doubt: str = ""
    """Why it is not sure that the gateway saw all of its calls; empty: it did, as far as is known."""
    _waited_s: float = field(default=0.0, init=False)
    _gateway: str = field(default="", init=False)  # the process that was there at the beginning

    @property
    def token(self) -> str:
        """What must not be kept anywhere."""
        return self.endpoint.api_key.get_secret_value() if self.endpoint.api_key else ""

    def greet(self) -> None:
        """Remember which process of the gateway is there: what one that dies has not written is lost."""
        with suppress(ModelEndpointUnavailable):
            self._gateway = self.client.account().gateway

    def waited_s(self) -> float:
        """Seconds that limits have made its calls wait, as far as is known: while the gateway is away, its last answer.

        An end by a time limit that could not be checked is named in `doubt`.
        """
        try:
            self._waited_s = max(self._waited_s, self.client.account().waited_s)
        except ModelEndpointUnavailable as error:
            log.warning("gateway.no_account", error=str(error))
            self.doubt = self.doubt or "the gateway could not tell for how long limits had made its calls wait"
        return self._waited_s

    def settle(self) -> Account:
        """The account when all that the gateway saw is in the ledger; without the gateway, what the ledger has.

        Raises: DatabaseUnavailable.
        """
        give_up = time.monotonic() + _SETTLE_S
        while True:
            hurried = self.stopped()
            hurry = {"timeout_s": _HURRIED_S, "answer_s": _HURRIED_ANSWER_S}
            account = self.client.close(**(hurry if hurried else {"timeout_s": _IN_FLIGHT_S}))
            if self.client.away:
                self.doubt = self.doubt or "the gateway was away when it ended; calls may be missing"
            if account is not None:
                if self._gateway and account.gateway and account.gateway != self._gateway:
                    self.doubt = self.doubt or "the gateway was started anew in between; calls may be missing"
                return account
            if hurried or time.monotonic() > give_up:
                break
            time.sleep(_BETWEEN_S)
        # What it had not written is lost; the trajectory says where calls are missing.
        log.warning("gateway.not_settled")
        self.doubt = self.doubt or "the gateway did not put all of its calls on record"
        return self._within(lambda connection: model_calls.account_of(connection, self.claimed.attempt_id))

    def forget(self) -> None:
        """What was said is an artifact now: the ledger keeps the figures alone. Raises: DatabaseUnavailable."""
        self._within(lambda connection: model_calls.forget_messages(connection, self.claimed.attempt_id))

    def calls(self) -> list[StoredCall]:
        """Every call of the attempt, with what was said.

        Raises: DatabaseUnavailable; ValueError: what the ledger has cannot be read.
        """
        return self._within(lambda connection: model_calls.calls_of(connection, self.claimed.attempt_id))

    def _within(self, verb: Callable[[Connection], Found]) -> Found:

        def once() -> Found:
            with self.database.begin() as connection:
                return verb(connection)

        return retrying(self.patience_s, hurried=self.stopped)(once)


@contextmanager
def model_access(
    settings: Settings, database: Database, claimed: Claim, stopped: Callable[[], bool]
) -> Iterator[ModelAccess]:
    """Access for one attempt, as long as it runs. Raises: StaleWriter: it runs no more; DatabaseUnavailable."""
    model = claimed.spec.model
    assert model is not None
    token = f"mf-{secrets.token_urlsafe(32)}"
    retrying(settings.lease_s, hurried=stopped)(model_sessions.open_session, database, claimed, token)
    gateway = settings.gateway_of(claimed.attempt_id)
    with GatewayClient(gateway, token) as client:
        endpoint = ModelEndpoint(f"{gateway}/v1", model.name, SecretStr(token))
        access = ModelAccess(endpoint, claimed, database, client, stopped, settings.lease_s)
        access.greet()
        yield access
