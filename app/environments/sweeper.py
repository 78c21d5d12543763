"""The net under the net: removes environments whose instance is gone or whose deadline has passed."""

from __future__ import annotations

import json
import time
from typing import Any
from uuid import UUID

import structlog

from app.environments.engine import ROLE, engine_of
from app.environments.local import OWNER, end
from app.errors import EngineUnavailable, EnvironmentFailed
from app.settings import Settings

log = structlog.get_logger()

_YOUNG_S = 3.0
"""Its instance may be newer than the list of live ones that we were given."""


class Sweeper:
    """Looks at what exists on this host and its engine, not at what somebody remembers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def sweep(self, live_instances: set[UUID]) -> int:
        """Remove what belongs to no live instance or is overdue; how many. Instances are their provider's to end.

        An engine that does not answer has nothing to sweep.
        """
        live = {str(instance_id) for instance_id in live_instances}
        return self._sweep_folders(live) + self._sweep_containers(live)

    def _sweep_containers(self, live: set[str]) -> int:
        labels = [f"megaflow={self._settings.installation}", f"{ROLE}=environment"]
        removed = 0
        try:
            engine = engine_of(self._settings)
            with engine.named("sweep environments", EnvironmentFailed):
                for found in engine.api.containers(all=True, filters={"label": labels}):
                    if _doomed(found["Labels"], found["Created"], _deadline(found), live):
                        log.warning("environment.swept", environment=found["Id"])
                        engine.remove(found["Id"])
                        removed += 1
        except (EngineUnavailable, EnvironmentFailed) as error:
            log.debug("sweeper.engine_failed", reason=str(error))
        return removed

    def _sweep_folders(self, live: set[str]) -> int:
        removed = 0
        for file in (self._settings.home / "local").glob(f"*/{OWNER}"):
            try:
                labels: dict[str, str] = json.loads(file.read_text())["labels"]
                made = file.stat().st_mtime
            except (OSError, ValueError, KeyError):  # going, or half written: the next sweep sees it
                continue
            ours = labels["megaflow"] == self._settings.installation
            if ours and _doomed(labels, made, float(labels["megaflow.deadline"]), live):
                log.warning("environment.swept", environment=file.parent.name)
                end(file.parent)
                removed += 1
        return removed


def _doomed(labels: dict[str, str], made: float, deadline: float, live: set[str]) -> bool:
    now = time.time()
    return now > deadline or (labels.get("megaflow.instance") not in live and now - made > _YOUNG_S)


def _deadline(container: dict[str, Any]) -> float:
    """From the name, which a recycled container got anew; else from the label, which it could not."""
    name = container["Names"][0] if container["Names"] else ""
    for text in (name.rpartition("-")[2], container["Labels"].get("megaflow.deadline", "")):
        if text.isdigit():
            return float(text)
    return float("inf")
