"""Calls the vendor's API, and maps each error to its meaning for a launch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.parsers import ResponseParserError

from app.errors import InstanceFailed, LaunchUnclear, NoCapacity
from app.instances.cloud import Throttled

NO_CAPACITY = frozenset(
    {
        *("InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientCapacity", "UnfulfillableCapacity"),
        *("InsufficientFreeAddressesInSubnet", "InsufficientReservedInstanceCapacity", "SpotMaxPriceTooLow"),
        *("InstanceLimitExceeded", "VcpuLimitExceeded", "MaxSpotInstanceCountExceeded"),
        "Unsupported",  # this type is not available in this zone
    }
)
_THROTTLED = frozenset({"RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled"})
_LOGIN = frozenset(
    {
        *("ExpiredToken", "ExpiredTokenException", "RequestExpired", "AuthFailure", "InvalidClientTokenId"),
        *("SignatureDoesNotMatch", "InvalidAccessKeyId", "UnrecognizedClientException"),
    }
)
_MADE_BEFORE = "IdempotentParameterMismatch"
"""The client token is known: an earlier request with it was carried out, with another join token in its user data."""
_SERVER_ERROR = 500
_TRIES = 3


class CloudCalls:
    """Clients by service and number of tries. Made when first needed, and again after credentials have expired."""

    def __init__(self, endpoint_url: str | None = None) -> None:
        """Sets the endpoint. endpoint_url: of a server that replaces all of the vendor's; None: boto3's own."""
        self._endpoint_url = endpoint_url
        self._clients: dict[tuple[str, int], Any] = {}
        self._lock = threading.Lock()

    def client(self, service: str, tries: int = _TRIES) -> Any:
        """Raises: InstanceFailed: no region, or malformed settings of the vendor's."""
        with self._lock:
            if (client := self._clients.get((service, tries))) is None:
                # A new session reads credentials and their files again.
                session = boto3.session.Session()
                config = Config(
                    connect_timeout=5.0,
                    read_timeout=30.0,
                    max_pool_connections=32,
                    retries={"mode": "standard", "total_max_attempts": tries},
                )
                client = session.client(service, config=config, endpoint_url=self._endpoint_url)
                self._clients[service, tries] = client
            return client

    def forget(self) -> None:
        """Drops the clients: the next call reads credentials again."""
        with self._lock:
            self._clients.clear()

    @contextmanager
    def asking(self, doing: str, *, launches: bool = False) -> Iterator[None]:
        """Converts errors of the call. Raises: NoCapacity, Throttled, InstanceFailed, or LaunchUnclear."""
        try:
            yield
        except ClientError as error:
            raise self._meaning(doing, error, launches=launches) from error
        except (HTTPClientError, ResponseParserError) as error:  # sent, but without a readable answer
            raise (LaunchUnclear if launches else InstanceFailed)(f"could not {doing}: {error}") from error
        except (BotoCoreError, ValueError) as error:
            self.forget()
            raise InstanceFailed(
                f"could not {doing}: {error}; expected credentials and a region as boto3 finds them: "
                "AWS_DEFAULT_REGION, AWS_PROFILE, an instance profile, …"
            ) from error

    def _meaning(self, doing: str, error: ClientError, *, launches: bool) -> InstanceFailed:
        code = str(error.response.get("Error", {}).get("Code", "?"))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        message = f"could not {doing}: {error}"
        if code in NO_CAPACITY:
            return NoCapacity(message)
        if code in _THROTTLED:
            return Throttled(message)
        if launches and (code == _MADE_BEFORE or status >= _SERVER_ERROR):
            return LaunchUnclear(message)
        if code in _LOGIN:
            self.forget()
            return InstanceFailed(f"{message}; renew the credentials: they are read again at the next try")
        return InstanceFailed(message)


def error_code(error: BaseException | None) -> str:
    """Returns the vendor's error code; empty where there is none."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""
