"""`megaflow record` as a person uses it, over a real ledger and a real store."""

from __future__ import annotations

import pytest

from app.errors import SpecInvalid
from app.ledger import accept
from app.ledger.accept import NewRun
from app.models.outcome import ArtifactKind
from tests.building import a_spec
from tests.integration.test_reports import Reports, reports, verdict

__all__ = ["reports"]


def test_recording_writes_one_file_for_each_attempt(reports: Reports) -> None:
    reports.also = {ArtifactKind.MODEL_CALLS: b"its calls"}
    run_id = reports.run("night", {"first": verdict(1.0), "second": verdict(1.0)}, replicas=2)
    folder = reports.settings.recordings / str(run_id)
    assert reports.json("record", "night") == {"run_id": str(run_id), "folder": str(folder), "written": 4}
    names = [f"{task}--{replica}--mini-swe-agent.jsonl.zst" for task in ("first", "second") for replica in (0, 1)]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert (folder / names[0]).read_bytes() == b"its calls"


def test_a_run_without_model_calls_is_refused(reports: Reports) -> None:
    accept.accept(reports.database, NewRun(specs=[a_spec()], name="early"))
    with pytest.raises(SpecInvalid, match="no attempt has ended"):
        reports("record", "early")
    assert not reports.settings.recordings.exists()
