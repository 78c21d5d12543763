"""Recording: who keeps what the gateway saw (`base`), and the one that keeps it in the ledger."""

from __future__ import annotations

from app.model_service.recording.base import Recorder
from app.model_service.recording.ledger import LedgerRecorder

__all__ = ["LedgerRecorder", "Recorder"]
