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
"""The gateway needs at most 30 s for an engine that is slow at everything."""
_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def check_model(
    settings: Settings, database: Database, model: ModelChoice, candidate: dict[str, Any] | None = None
) -> list[str]:
    """What could not be checked, as warnings; no engine is asked for models of the replay engine.

    Raises: as `check_engine`.
    """
    return check_engine(settings, database, model, candidate)[0]


def check_engine(
    settings: Settings, database: Database, model: ModelChoice, candidate: dict[str, Any] | None = None
) -> tuple[list[str], EngineKind]:
    """What could not be checked, as warnings, and which server a candidate is that does not say it.

    candidate: an engine that is not registered yet (`url`, `api_key_env`, `upstream_model`, `dialects`), in place of
    those that a submission would use.

    Raises: ModelEndpointUnavailable: the endpoint does not answer, refuses the key or does not have the model, or no
        gateway answers; DatabaseUnavailable.
    """
    if candidate is None and model.replay and model.base_url is None and not model.side_models:
        return [], EngineKind.UNKNOWN
    asked = {"model": model.model_dump(mode="json"), "candidate": candidate}
    report = _post(settings, new_token(database), json.dumps(asked).encode())
    if report.get("refused"):
        raise ModelEndpointUnavailable(
            f"model {model.name!r}: {report['refused']}; --no-check goes on without this check"
        )
    return list(report.get("warnings", ())), EngineKind(report.get("engine", ""))


def _post(settings: Settings, token: str, body: bytes) -> dict[str, Any]:
    """The first gateway's that takes a connection. Raises: ModelEndpointUnavailable."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    why = ""
    for base in settings.gateway_bases():
        request = urllib.request.Request(f"{base}/megaflow/check", body, headers)
        try:
            with _HTTP.open(request, timeout=_TIMEOUT_S) as answer:
                report = json.load(answer)
                if isinstance(report, dict):
                    return report
                why = "an answer that is no object"
        except urllib.error.HTTPError as error:
            found = error.read(2000).decode(errors="replace")
            raise ModelEndpointUnavailable(
                f"model gateway {base}: expected a report, found status {error.code}: {found}"
            ) from error
        except (OSError, ValueError) as error:
            why = str(getattr(error, "reason", None) or error)
    raise ModelEndpointUnavailable(
        f"the model gateway at {', '.join(settings.gateway_bases())} does not answer ({why}), and only it can check the"
        " endpoint and its key; try `megaflow up`, or --no-check"
    )
