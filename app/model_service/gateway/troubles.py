"""What can go wrong between the gateway and an engine before the caller has got a byte: nothing is lost yet."""

from __future__ import annotations

import errno
from enum import Enum, auto

import aiohttp


class Kind(Enum):
    """What to do about it follows from this alone."""

    DOWN = auto()  # no connection: wait until it is back, or go elsewhere
    RESET = auto()  # the connection broke
    TIMEOUT = auto()  # nothing was heard for as long as an engine may take
    BUSY = auto()  # it says so
    BROKEN = auto()  # 5xx, rubbish
    FINAL = auto()  # the same again would be refused again
    DEAF = auto()  # it does not know the path of this dialect
    NO_OPTION = auto()  # the model does not take a sampling option
    NO_USAGE = auto()  # it does not take the option that we added


class Trouble(Exception):
    """One try that failed. `content` is what the engine said, if it said something."""

    def __init__(
        self,
        kind: Kind,
        why: str,
        *,
        status: int = 502,
        content: bytes = b"",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(why)
        self.kind = kind
        self.why = why
        self.status = status
        self.content = content
        self.retry_after_s = retry_after_s


def of_error(error: Exception, patience_s: float) -> Trouble:
    """What an exception of the HTTP client stands for. `patience_s`: how long an engine may be silent."""
    name = type(error).__name__
    text = str(error) or name
    match error:
        case aiohttp.ClientSSLError():
            return Trouble(Kind.FINAL, f"the engine's certificate is not accepted: {text}")
        case aiohttp.ClientConnectorError(os_error=OSError(errno=errno.EACCES)):  # of all addresses that it has
            return Trouble(Kind.FINAL, f"the engine may not be called: {error.strerror}", status=403)
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return Trouble(Kind.DOWN, f"the engine takes no connections: {text}", status=503)
        case aiohttp.SocketTimeoutError() | TimeoutError():
            return Trouble(Kind.TIMEOUT, f"the engine said nothing for {patience_s:g} s", status=504)
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError() | OSError():
            return Trouble(Kind.RESET, f"the engine closed the connection before it had answered ({name})")
        case _:
            return Trouble(Kind.BROKEN, f"the engine answered something that is no HTTP: {text[:200]}")
