"""Small parts of the worker: how an attempt hears that it must stop, and how evidence is kept."""

from __future__ import annotations

import threading
from pathlib import Path

from app.agents.base import AgentReport
from app.artifacts import open_store
from app.grading.base import Grade
from app.models.endings import EndReason
from app.models.outcome import ArtifactKind, Verdict
from app.workers.evidence import Evidence
from app.workers.lease import StopToken


def test_a_callback_is_called_once_when_told_to_stop_and_at_once_when_late() -> None:
    token, heard = StopToken(), []
    token.on_cancel(lambda: heard.append("early"))
    token.stop(EndReason.CANCELLED)
    token.stop(EndReason.LOST)
    token.on_cancel(lambda: heard.append("late"))
    assert heard == ["early", "late"]
    assert token.reason is EndReason.CANCELLED


def test_a_callback_that_was_taken_back_is_not_called() -> None:
    token, heard = StopToken(), []
    forget = token.on_cancel(lambda: heard.append("x"))
    forget()
    token.stop(EndReason.CANCELLED)
    assert heard == []


def test_a_callback_that_fails_does_not_keep_the_others_from_hearing() -> None:
    token, heard = StopToken(), threading.Event()

    def broken() -> None:
        raise RuntimeError("x")

    token.on_cancel(broken)
    token.on_cancel(heard.set)
    token.stop(EndReason.INTERRUPTED)
    assert heard.is_set()


def test_every_kind_of_evidence_is_stored_or_its_absence_explained(tmp_path: Path) -> None:
    evidence = Evidence()
    log = tmp_path / "agent.log"
    log.write_text("hello")
    evidence.of_agent(AgentReport(EndReason.SUBMITTED, log=log))
    evidence.patch(b"")
    stored = {a.kind: a for a in evidence.store(open_store(f"file://{tmp_path}/store"), "runs/r/t/1", redact=[])}
    assert set(stored) == set(ArtifactKind)
    assert stored[ArtifactKind.AGENT_LOG].size_bytes == 5
    assert stored[ArtifactKind.PATCH].size_bytes == 0
    assert stored[ArtifactKind.TRAJECTORY].missing == "this agent wrote none"
    assert stored[ArtifactKind.VERDICT].missing == "the attempt did not get that far"


def test_secrets_are_blotted_out_of_what_is_stored(tmp_path: Path) -> None:
    evidence = Evidence()
    evidence.grade(Grade(Verdict(reward=1.0, counts=True), report=b"key sk-123 leaked"))
    store = open_store(f"file://{tmp_path}/store")
    stored = {a.kind: a for a in evidence.store(store, "runs/r/t/1", redact=["sk-123"])}
    key = stored[ArtifactKind.TEST_REPORT].key
    assert key is not None
    assert store.get(key) == b"key [redacted] leaked"
