"""Asks a model endpoint whether it is one, before tasks are spent on finding out."""

from __future__ import annotations

from typing import Any

import httpx
import structlog

from app.errors import ModelEndpointUnavailable

log = structlog.get_logger(__name__)


def check_endpoint(base_url: str, model: str, api_key: str | None, timeout_s: float) -> None:
    """Return when an OpenAI-compatible server answers at `base_url` and accepts the key; no tokens are spent.

    A model that the server does not list is only logged: proxies serve names that they do not list.

    Raises: ModelEndpointUnavailable: it is down, refuses the key, or what answers is no such server.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=base_url, headers=headers, timeout=timeout_s) as client:
            answer = client.get("models")
            if answer.status_code in {404, 405}:
                _check_completions(client.post("chat/completions", json={"model": model, "messages": []}), base_url)
                return
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unavailable(
            base_url, f"{type(error).__name__}: {error}", "start the server, or correct the base URL"
        ) from error
    listed = _model_ids(answer, base_url)
    if model not in listed:
        log.info("model_endpoint.model_not_listed", model=model, listed=sorted(listed)[:20])


def _model_ids(answer: httpx.Response, base_url: str) -> set[str]:
    _check_status(answer, base_url)
    match _json(answer, base_url):
        case {"data": list(entries)}:
            return {str(entry.get("id")) for entry in entries if isinstance(entry, dict)}
        case _:
            raise _unavailable(base_url, f"a body without a model list: {answer.text[:80]!r}", _TRY_V1)


def _check_completions(answer: httpx.Response, base_url: str) -> None:
    """An endpoint without a model list still refuses an empty conversation in its own words."""
    if answer.status_code not in {400, 422}:
        _check_status(answer, base_url)
    _json(answer, base_url)


def _check_status(answer: httpx.Response, base_url: str) -> None:
    if answer.status_code in {401, 403}:
        raise _unavailable(base_url, f"HTTP {answer.status_code}: the API key is refused", "give a valid API key")
    if not answer.is_success:
        raise _unavailable(base_url, f"HTTP {answer.status_code} from {answer.url.path}", _TRY_V1)


def _json(answer: httpx.Response, base_url: str) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise _unavailable(base_url, f"a body that is not JSON: {answer.text[:80]!r}", _TRY_V1) from error


_TRY_V1 = "check the base URL; most servers want it to end in /v1"


def _unavailable(base_url: str, found: str, hint: str) -> ModelEndpointUnavailable:
    shown = httpx.URL(base_url).copy_with(userinfo=b"") if "@" in base_url else base_url
    return ModelEndpointUnavailable(
        f"model endpoint {shown}: expected an OpenAI-compatible server; found {found}; {hint}"
    )
