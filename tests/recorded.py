"""A provider whose environments are recorded in the ledger, as a worker's are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.environments.contract import EnvironmentProvider, Tags
from app.environments.receipts import EnvironmentRecorder
from app.ledger.database import Database
from app.models.spec import EnvironmentSpec
from app.settings import Settings


@dataclass(frozen=True)
class Recording:
    provider: EnvironmentProvider
    settings: Settings
    database: Database

    def create(self, spec: EnvironmentSpec, tags: Tags, *, timeout_s: float) -> Any:
        recorder = EnvironmentRecorder(self.settings, self.database)
        return recorder.create(self.provider, spec, tags, timeout_s=timeout_s)
