"""Retries calls to PostgreSQL and the container engine while they restart."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from app.errors import DatabaseUnavailable, MegaFlowError

log = structlog.get_logger()


def retrying(
    patience_s: float,
    *,
    of: type[MegaFlowError] = DatabaseUnavailable,
    hurried: Callable[[], bool] = lambda: False,
) -> Retrying:
    """Returns a retrier for errors of type `of`: it retries for `patience_s` seconds, and stops once `hurried`.

    The function must be safe to call twice: a transaction may have been applied although it returned an error.
    """
    longest = stop_after_delay(patience_s)

    def enough(state: RetryCallState) -> bool:
        return hurried() or longest(state)

    return Retrying(
        retry=retry_if_exception_type(of),
        wait=wait_random_exponential(multiplier=0.2, max=3),
        stop=enough,
        before_sleep=_log_retry,
        reraise=True,
    )


def _log_retry(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    log.warning("server.awaited", tries=state.attempt_number, error=str(error))
