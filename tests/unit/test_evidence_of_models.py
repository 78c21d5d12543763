"""What was said to models, as evidence: no secret in it, and no fault in reading it costs more than itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from app.artifacts import open_store
from app.ledger.attempts import Claim
from app.ledger.model_calls import StoredCall
from app.model_service import trajectory
from app.models.model_calls import Account
from app.models.outcome import Artifact, ArtifactKind
from app.models.spec import Mode
from app.workers.evidence import Evidence, without_secrets
from tests.building import a_spec, new_id
from tests.unit.test_trajectory import a_call, a_conversation, said

SECRET = "mf-0123456789"


def the_claim() -> Claim:
    ids = (new_id(), new_id(), new_id())
    return Claim(new_id(), 1, *ids, Mode.PERSISTENT, datetime.now(UTC), a_spec())


def kept(
    read: Callable[[], Sequence[StoredCall]], folder: Path
) -> tuple[dict[ArtifactKind, Artifact], dict[ArtifactKind, bytes]]:
    """Records and contents of what is stored of these calls."""
    evidence, store = Evidence(), open_store(f"file://{folder}/store")
    evidence.of_model(the_claim(), "1", read, Account(), redact=[SECRET])
    records = {one.kind: one for one in evidence.store(store, "runs/r/t/1", redact=[SECRET])}
    return records, {kind: store.get(one.key) for kind, one in records.items() if one.key}


def test_a_token_that_was_said_is_in_no_artifact_and_the_calls_can_be_read(tmp_path: Path) -> None:
    leak = {"role": "user", "content": f"OPENAI_API_KEY={SECRET}"}
    reply = said("look", f"curl -H 'Authorization: Bearer {SECRET}'")
    calls = [
        a_call([leak], reply, parameters={"user": SECRET}, tools=({"name": "bash", "description": SECRET},)),
        a_call([leak, reply], None, detail=f"refused {SECRET}", raw={"request": f'{{"key": "{SECRET}"}}'}),
    ]
    _, found = kept(lambda: calls, tmp_path)
    assert SECRET.encode() not in found[ArtifactKind.TRAJECTORY]
    read = trajectory.read(found[ArtifactKind.MODEL_CALLS])
    assert SECRET not in str(read)
    assert read[0].messages == ({"role": "user", "content": "OPENAI_API_KEY=[redacted]"},)
    assert read[1].messages == (*read[0].messages, read[0].reply)
    assert read[1].raw == {"request": '{"key": "[redacted]"}'}


@pytest.mark.parametrize(
    ("broken", "lost", "kept_kind"),
    [
        ("atif", ArtifactKind.TRAJECTORY, ArtifactKind.MODEL_CALLS),
        ("export", ArtifactKind.MODEL_CALLS, ArtifactKind.TRAJECTORY),
    ],
)
def test_what_cannot_be_converted_does_not_take_the_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, lost: ArtifactKind, kept_kind: ArtifactKind
) -> None:
    def fails(*values: Any) -> Any:
        raise KeyError(f"never seen {SECRET}")

    monkeypatch.setattr(trajectory, broken, fails)
    records, found = kept(lambda: a_conversation("a", "b"), tmp_path)
    assert records[lost].missing == "could not be made: KeyError: 'never seen [redacted]'"
    assert found[kept_kind]


def test_calls_without_a_secret_stay_as_they_are_and_share_what_they_shared() -> None:
    calls = a_conversation("a", "b", "c")
    found = without_secrets(calls, [SECRET])
    assert found == calls
    assert all(one.messages[0] is calls[0].messages[0] for one in found)
    leak = {"role": "system", "content": SECRET}
    found = without_secrets([replace(call, messages=(leak, *call.messages)) for call in calls], [SECRET])
    assert all(one.messages[0] is found[0].messages[0] for one in found)
