"""Asks a gateway whether a model can be called. Standard library only."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from app.errors import ModelEndpointUnavailable
from app.ledger.database import Database
from app.ledger.model_sessions import new_token
from app.models.engines import EngineKind
from app.models.spec import ModelChoice
from app.settings import Settings

_TIMEOUT_S = 45.0
"""Longer than the gateway's checks: at most 30 s for an engine that is slow at everything."""
_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def check_engine(
    settings: Settings, database: Database, model: ModelChoice, candidate: dict[str, Any] | None = None
) -> tuple[list[str], EngineKind]:
    """Checks a model's engines. Returns warnings, and the server of a candidate that does not name it.

    Calls no engine for models of the replay engine.

    candidate: an engine that is not registered yet (`url`, `api_key_env`, `upstream_model`, `dialects`), instead of
    those that a submission would use.

    Raises: ModelEndpointUnavailable: the endpoint does not answer, refuses the key or does not have the model, or no
        gateway answers; DatabaseUnavailable.
    """
    if candidate is None and model.replay and model.base_url is None and not model.side_models:
        return [], EngineKind.UNKNOWN
    request = {"model": model.model_dump(mode="json"), "candidate": candidate}
    report = _post(settings, database, request)
    if report.get("refused"):
        raise ModelEndpointUnavailable(
            f"model {model.name!r}: {report['refused']}; --no-check goes on without this check"
        )
    return list(report.get("warnings", ())), EngineKind(report.get("engine", ""))


def _post(settings: Settings, database: Database, body: dict[str, Any]) -> dict[str, Any]:
    """Posts to the first gateway that accepts a connection. Raises: ModelEndpointUnavailable."""
    away: ModelEndpointUnavailable | None = None
    for base in settings.gateway_bases():
        try:
            return ask_gateway(base, "/megaflow/check", database, body, _TIMEOUT_S)
        except ModelEndpointUnavailable as error:
            if isinstance(error.__cause__, urllib.error.HTTPError):
                raise
            away = error
    raise ModelEndpointUnavailable(f"{away}, or --no-check") from away


def ask_gateway(base: str, path: str, database: Database, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Posts to a gateway with a token from the database. Raises: ModelEndpointUnavailable, DatabaseUnavailable."""
    headers = {"Authorization": f"Bearer {new_token(database)}", "Content-Type": "application/json"}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    try:
        with _HTTP.open(request, timeout=timeout_s) as answer:
            report = json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read(2000).decode(errors="replace")
        message = f"model gateway {base}: expected a report, found status {error.code}: {text}"
        raise ModelEndpointUnavailable(message) from error
    except (OSError, ValueError) as error:
        why = str(getattr(error, "reason", None) or error)
        raise ModelEndpointUnavailable(
            f"the model gateway at {base} does not answer ({why}), and only it has the keys; try `megaflow up`"
        ) from error
    if not isinstance(report, dict):
        raise ModelEndpointUnavailable(f"model gateway {base}: expected a report, found {report!r:.200}")
    return report
