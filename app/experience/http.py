"""A trainer's client of `megaflow experience serve`, for environments without a database driver."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Any
from urllib.parse import quote

from app.errors import MegaFlowError, SampleRefused, SpecInvalid, StackNotRunning, UnknownName
from app.experience import files
from app.experience.adapters.rows import Row, by_group

_SPARE_S = 60.0
"""Seconds added to the time that the server may wait."""
_PAUSE_S = 0.5
_ERRORS = {kind.__name__: kind for kind in (SampleRefused, SpecInvalid, UnknownName)}
_AGAIN = (502, 503, 504)


@dataclass(frozen=True, slots=True)
class HttpBatch:
    """Groups under one lease; `rows` have the columns of docs/reference/experience.md."""

    lease: str
    rows: Sequence[dict[str, Any]]

    def groups(self) -> Mapping[str, Sequence[Row]]:
        """Returns the samples as rows, by the id of their group."""
        return by_group(self.rows)


class HttpExperience:
    """The samples of one run over HTTP, like `app.experience.hand_out.Experience` in process.

    Requests are retried for `patience_s`: commits may be repeated, and leases of lost replies expire.
    """

    def __init__(
        self,
        url: str,
        token: str,
        run: str,
        *,
        policy: str,
        consumer: str,
        max_staleness: int | None = None,
        patience_s: float = 120.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._run, self._policy = quote(run, safe=""), quote(policy)
        self._consumer = consumer
        self._max_staleness = max_staleness
        self._patience_s = patience_s
        self.groups_left: int | None = None
        """Groups that may still be trained on, with those under lease, at the last `next_batch`."""
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def next_batch(self, groups: int, *, wait_s: float = 0.0) -> HttpBatch | None:
        """Returns at most `groups` complete groups. None: none was complete within `wait_s`.

        Raises: UnknownName, SampleRefused: another consumer has the run; StackNotRunning: no server answers.
        """
        body = {"consumer": self._consumer, "groups": groups, "wait_s": wait_s, "max_staleness": self._max_staleness}
        content, headers = self._ask(f"/runs/{self._run}/batches", body, wait_s)
        left = headers["megaflow-groups-left"]
        self.groups_left = None if left is None else int(left)
        return HttpBatch(headers["megaflow-lease"], files.read(content)) if content else None

    def renew(self, batch: HttpBatch) -> None:
        """Renews a batch's lease. Raises: SampleRefused: it has expired or is committed."""
        self._ask(f"/leases/{batch.lease}/renew", {})

    def commit(self, batch: HttpBatch, version: str) -> None:
        """Commits a batch as trained into `version`. Raises: SampleRefused: its lease has expired: discard the step."""
        self._ask(f"/leases/{batch.lease}/commit", {"version": version})

    def publish(self, version: str) -> int:
        """Records a version of the policy and returns its number. Raises: SampleRefused: a newer one is live."""
        content, _ = self._ask(f"/policies/{self._policy}/versions", {"version": version})
        return int(json.loads(content)["number"])

    def release(self) -> None:
        """Frees the run for another trainer; leased groups are offered again."""
        self._ask(f"/runs/{self._run}/release", {"consumer": self._consumer})

    def _ask(self, path: str, body: Mapping[str, Any], wait_s: float = 0.0) -> tuple[bytes, Message]:
        """Returns the body and headers of the answer."""
        until = time.monotonic() + self._patience_s
        while True:
            request = urllib.request.Request(self._url + path, json.dumps(body).encode(), self._headers, method="POST")
            try:
                with self._opener.open(request, timeout=wait_s + _SPARE_S) as reply:
                    return reply.read(), reply.headers
            except urllib.error.HTTPError as error:
                refusal = _refusal(error)
                if error.code not in _AGAIN or time.monotonic() >= until:
                    raise refusal from None
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() >= until:
                    raise StackNotRunning(
                        f"expected `megaflow experience serve` at {self._url}, found: {error}; start it there"
                    ) from error
            time.sleep(_PAUSE_S)


def _refusal(error: urllib.error.HTTPError) -> MegaFlowError:
    try:
        details = json.loads(error.read())["error"]
        return _ERRORS.get(details["type"], MegaFlowError)(details["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return MegaFlowError(f"expected an answer of `megaflow experience serve`, found HTTP {error.code}")
