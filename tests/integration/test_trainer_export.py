"""Samples in trainers' formats and trajectories for supervised training, from a real ledger and store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import msgpack
import pyarrow.parquet
import pytest

from app.artifacts.folder import FolderStore
from app.errors import ExportRefused
from app.evaluation.export import ExportFormat, ExportSource, ExportSummary, export
from app.experience.maker import SampleMaker
from app.ledger import experience
from app.ledger.database import Database
from app.ledger.experience import ExperienceRun
from app.model_service.trajectory import artifact
from tests.building import new_id
from tests.integration.rows import a_task, an_attempt, insert
from tests.unit.test_trajectory import a_conversation


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "artifacts")


def _run(database: Database, purpose: str) -> UUID:
    run_id = new_id()
    insert(database, "runs", id=run_id, name=purpose, user_name="alice", purpose=purpose, total=4)
    return run_id


def _ended(
    database: Database,
    store: FolderStore,
    run_id: UUID,
    *,
    answers: str = "ab",
    ids: tuple[int, ...] | None = (7, 8),
    reward: float | None = 1.0,
    patch: str = "",
    name: str = "fix-it",
    group: UUID | None = None,
    **verdict: Any,
) -> UUID:
    """An ended task whose conversation says a letter a turn; ids: of its last answer, the others have 5."""
    said = {"reward": reward, "counts": reward is not None, **verdict}
    ended = {"end_reason": "submitted", "verdict": said}
    values = {"attempts": 1, "group_id": group} if group else {"attempts": 1}
    task = a_task(database, run_id, name=name, state="succeeded", **ended, **values)
    attempt = an_attempt(database, task, state="finished", **ended)
    calls = a_conversation(*answers)
    known: tuple[int, ...] = (1, 2)
    made = []
    for call in calls:
        own = ids if call is calls[-1] else (5,)
        if ids is not None and own is not None:
            call = replace(call, prompt_token_ids=known, token_ids=own, logprobs=(-0.5,) * len(own))
            known = (*known, *own, 3)
        made.append(call)
    key = f"runs/{run_id}/{task}/1/model_calls.jsonl.zst"
    store.put(key, artifact.export(made))
    insert(database, "artifacts", attempt_id=attempt, kind="model_calls", key=key)
    if patch:
        insert(database, "artifacts", attempt_id=attempt, kind="patch", key="p", sha256=patch)
    return task


def _export(
    database: Database, store: FolderStore, run_id: UUID, form: ExportFormat, to: Path, **which: Any
) -> tuple[ExportSummary, list[dict[str, Any]]]:
    found = export(ExportSource(database, store, run_id, **which), form, to)
    if to.suffix == ".parquet":
        return found, pyarrow.parquet.read_table(to).to_pylist()
    return found, [json.loads(line) for line in to.read_text().splitlines()]


def test_what_is_good_and_new_is_kept_with_messages_and_ids(
    database: Database, store: FolderStore, tmp_path: Path
) -> None:
    run_id = _run(database, "synthesis")
    _ended(database, store, run_id)
    _ended(database, store, run_id, reward=0.5)
    _ended(database, store, run_id, reward=0.0, suspect="edits_tests", claimed_reward=1.0)
    _ended(database, store, run_id, reward=None)
    _ended(database, store, run_id, answers="abcd", ids=(9,))
    found, rows = _export(database, store, run_id, ExportFormat.SFT, tmp_path / "s.jsonl", max_turns=3)
    assert found.left_out == {"reward below 1": 1, "suspect": 1, "not scored": 1, "more than 3 turns": 1}
    (row,) = rows
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    call = row["messages"][2]["tool_calls"][0]
    assert (call["type"], json.loads(call["function"]["arguments"])) == ("function", {"command": "run a"})
    assert row["tools"][0]["function"]["name"] == "bash"
    assert row["token_ids"] == [1, 2, 5, 3, 7, 8]
    assert row["mask"] == [False, False, True, False, True, True]
    assert (row["reward"], row["turns"], row["kind"]) == (1.0, 2, "main")
    lenient, rows = _export(database, store, run_id, ExportFormat.SFT, tmp_path / "l.jsonl", min_reward=0.5)
    assert "reward below 0.5" not in lenient.left_out
    with pytest.raises(ExportRefused, match="found nan"):
        _export(database, store, run_id, ExportFormat.SFT, tmp_path / "n.jsonl", min_reward=float("nan"))


def test_the_same_ids_or_the_same_patch_at_a_task_are_kept_once(
    database: Database, store: FolderStore, tmp_path: Path
) -> None:
    run_id = _run(database, "synthesis")
    _ended(database, store, run_id, patch="one")
    _ended(database, store, run_id, patch="two")  # the same ids
    _ended(database, store, run_id, ids=(9,), patch="one")  # the same patch
    _ended(database, store, run_id, name="another", patch="one")  # of another task
    _ended(database, store, run_id, ids=None, patch="three")  # an engine without ids
    _ended(database, store, run_id, ids=None, patch="four")  # that said the same
    found, rows = _export(database, store, run_id, ExportFormat.SFT, tmp_path / "s.jsonl")
    assert found.left_out == {"duplicate": 3}
    assert [row["task"] for row in rows] == ["fix-it", "another", "fix-it"]
    assert (rows[2]["token_ids"], rows[2]["mask"]) == (None, None)


def test_samples_are_written_as_their_trainers_read_them(
    database: Database, store: FolderStore, tmp_path: Path
) -> None:
    run_id, group = _run(database, "training"), new_id()
    experience.open_run(database, ExperienceRun(run_id, "policy"))
    for reward in (1.0, 0.0):
        _ended(database, store, run_id, reward=reward, group=group)
    _ended(database, store, run_id, reward=1.0)
    SampleMaker(database, store, lambda _: None).pass_once()
    _, trl = _export(database, store, run_id, ExportFormat.TRL, tmp_path / "t.jsonl")
    assert [(row["prompt_ids"], row["completion_ids"], row["env_mask"]) for row in trl] == [
        ([1, 2], [5, 3, 7, 8], [1, 0, 1, 1])
    ] * 3
    _, prime = _export(database, store, run_id, ExportFormat.PRIME_RL, tmp_path / "p.jsonl")
    assert sorted(max(row["advantages"], key=abs) for row in prime) == [-1.0, 0.0, 1.0], "within their groups"
    export(ExportSource(database, store, run_id), ExportFormat.PRIME_RL, tmp_path / "p.msgpack")
    arrays = msgpack.unpackb((tmp_path / "p.msgpack").read_bytes())
    beginning = ("token_ids", "mask", "logprobs", "temperatures", "env_name")
    assert arrays == [[*(row[name] for name in beginning), *[None] * 7, row["advantages"]] for row in prime]
    for to in (tmp_path / "v.parquet", tmp_path / "v.jsonl"):
        found, verl = _export(database, store, run_id, ExportFormat.VERL, to)
        assert found.written == 3
        assert {row["uid"] for row in verl} >= {str(group)}
        assert verl[0]["response_mask"] == [1, 0, 1, 1]
