"""Gives an attempt its model token, and reads its model usage at the end."""

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
"""Errors of an absent gateway. No read timeouts: a slow gateway may have recorded every call."""


class GatewayClient:
    """Client of the gateway at `base_url` (without /v1) with one attempt's token. Thread-safe.

    `away` is true once a connection was refused or broken: then agents could not call the gateway either.
    """

    def __init__(self, base_url: str, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        self.away = False

    def account(self) -> Account:
        """Returns the attempt's account so far; `waited_s` includes calls that wait at this moment.

        Raises: ModelEndpointUnavailable: the gateway is unreachable, or does not know the token.
        """
        return self._ask("GET", "/megaflow/session")

    def close(self, timeout_s: float = 10.0, *, answer_s: float = _TIMEOUT_S) -> Account | None:
        """Ends the attempt's calls: refuses new calls, gives running calls `timeout_s`, then has all calls recorded.

        The response may take `answer_s` more. None: the gateway is unreachable or cannot reach the ledger; calls
        recorded before are in the ledger. May be called again.
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
            response = self._http.request(method, path, **options)
            body = response.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            self.away = self.away or isinstance(error, _AWAY)
            raise ModelEndpointUnavailable(
                f"model gateway {self._http.base_url}: expected an answer, found {type(error).__name__}: {error};"
                " try `megaflow doctor`"
            ) from error
        if response.status_code != 200 or not isinstance(body, dict):
            problem = f"status {response.status_code}: {str(body)[:500]}"
            raise ModelEndpointUnavailable(f"model gateway {self._http.base_url}: expected an account, found {problem}")
        try:
            return _ACCOUNT.validate_python(body)
        except ValueError as error:
            raise ModelEndpointUnavailable(f"expected an account from the model gateway, found: {error}") from error


log = structlog.get_logger()

Found = TypeVar("Found")

_SETTLE_S = 30.0
"""Time for a restarting gateway to answer."""
_IN_FLIGHT_S = 5.0
"""Time for running calls to end after their agent has ended."""
_BETWEEN_S = 0.5
_HURRIED_S = 1.0
_HURRIED_ANSWER_S = 4.0
"""Both times if the attempt must stop, because the caller waits: for running calls, and in addition for the answer."""


@dataclass(slots=True)
class ModelAccess:
    """Model endpoint and account of one attempt."""

    endpoint: ModelEndpoint
    claimed: Claim
    database: Database
    client: GatewayClient
    stopped: Callable[[], bool]
    """Whether the attempt must stop."""
    patience_s: float
    """Seconds to retry PostgreSQL."""
    doubt: str = ""
    """Reason why the gateway may have missed calls; empty: no known reason."""
    _waited_s: float = field(default=0.0, init=False)
    _gateway: str = field(default="", init=False)  # the gateway process at the start

    @property
    def token(self) -> str:
        """The secret token; must not be stored anywhere."""
        return self.endpoint.api_key.get_secret_value() if self.endpoint.api_key else ""

    def greet(self) -> None:
        """Notes the id of the gateway process: if it dies, calls that it has not yet written are lost."""
        with suppress(ModelEndpointUnavailable):
            self._gateway = self.client.account().gateway

    def waited_s(self) -> float:
        """Returns the seconds that limits made its calls wait; while the gateway is unreachable, the last known value.

        A failed check is noted in `doubt`: an end by a time limit may then be wrong.
        """
        try:
            self._waited_s = max(self._waited_s, self.client.account().waited_s)
        except ModelEndpointUnavailable as error:
            log.warning("gateway.no_account", error=str(error))
            self.doubt = self.doubt or "the gateway could not tell for how long limits had made its calls wait"
        return self._waited_s

    def settle(self) -> Account:
        """Returns the account after the gateway has written all calls to the ledger; without the gateway, the ledger's.

        Raises: DatabaseUnavailable.
        """
        deadline = time.monotonic() + _SETTLE_S
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
            if hurried or time.monotonic() > deadline:
                break
            time.sleep(_BETWEEN_S)
        # Calls that it had not written are lost; the trajectory shows where calls are missing.
        log.warning("gateway.not_settled")
        self.doubt = self.doubt or "the gateway did not put all of its calls on record"
        return self._within(lambda connection: model_calls.account_of(connection, self.claimed.attempt_id))

    def forget(self) -> None:
        """Deletes the messages from the ledger: an artifact has them; the figures stay. Raises: DatabaseUnavailable."""
        self._within(lambda connection: model_calls.forget_messages(connection, self.claimed.attempt_id))

    def calls(self) -> list[StoredCall]:
        """Returns every call of the attempt, with its messages.

        Raises: DatabaseUnavailable; ValueError: the ledger's content cannot be read.
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
    """Gives an attempt model access during the block. Raises: StaleWriter: it does not run; DatabaseUnavailable."""
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
