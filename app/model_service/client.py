"""Asks the gateway about an attempt: its usage so far, and whether everything is recorded."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import TypeAdapter

from app.errors import ModelEndpointUnavailable
from app.models.model_calls import Account

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
