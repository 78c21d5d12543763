"""Writes a run for trainers: samples as each trainer reads them, and good trajectories for supervised training."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import msgpack

from app.errors import ExportRefused, SampleRefused
from app.evaluation.export import ExportSource, content_of
from app.experience import files
from app.experience.adapters import prime_rl, trl, verl
from app.experience.adapters.rows import Row
from app.experience.samples import samples_of
from app.ledger import training
from app.ledger.model_calls import StoredCall
from app.ledger.report_rows import ReportRow
from app.model_service.dialects.base import Message
from app.model_service.dialects.chat import assistant_message
from app.model_service.trajectory import artifact
from app.model_service.trajectory.tree import Branch, BranchKind, branches, join
from app.models.kinds import Purpose
from app.models.outcome import ArtifactKind, TaskResult

Records = Sequence[Any]
_MSGPACK = ".msgpack"


def write_verl(source: ExportSource, to: Path) -> int:
    """Rows of verl's batches: `uid`, `prompts`, `responses`, `response_mask`, `rollout_log_probs`, `reward`."""
    return _write_samples(source, to, lambda rows: [verl.record(row) for row in rows])


def write_trl(source: ExportSource, to: Path) -> int:
    """What TRL's `rollout_func` returns, a line for each sample, with its group."""
    return _write_samples(source, to, lambda rows: [{"group_id": row["group_id"], **trl.record(row)} for row in rows])


def write_prime_rl(source: ExportSource, to: Path) -> int:
    """prime-rl's `TrainingSample`s, with the advantages of their groups; in msgpack as arrays."""
    return _write_samples(source, to, prime_rl.positional if to.suffix == _MSGPACK else prime_rl.training_samples)


def _write_samples(source: ExportSource, to: Path, records: Callable[[Sequence[Row]], Records]) -> int:
    """One group after the other. Raises: ExportRefused: the run has no samples."""
    _refuse_other_purposes(source, Purpose.TRAINING)
    stored = training.stored_samples(source.database, source.run_id)
    kept = [one for one in stored if source.chooses(one.agent, one.replica)]
    if not kept:
        raise ExportRefused(
            f"expected samples of run {source.head.name!r}, found none; `megaflow experience open` before its attempts"
            " end, and a policy whose engine gives token ids"
        )
    count = 0
    with _writing(to) as add:
        for _, group in groupby(kept, key=lambda one: one.group_id):
            made = records([row for one in group for row in files.read(source.store.get(one.key))])
            add(made)
            count += len(made)
    return count


def _refuse_other_purposes(source: ExportSource, *purposes: Purpose) -> None:
    if source.head.purpose not in purposes:
        raise ExportRefused(
            f"expected a run with the purpose {' or '.join(purposes)}, found {source.head.purpose!r} of"
            f" {source.head.name!r}: answers to an evaluation are nothing to train on; submit with --purpose"
        )


_ARRAY = struct.Struct(">BI")
_ARRAY_OF_32 = 0xDD
"""How an array with a length of 32 bits begins in msgpack."""


@contextmanager
def _writing(to: Path) -> Iterator[Callable[[Records], None]]:
    """Parquet or one array of msgpack where the file is called so, else JSON lines."""
    if to.suffix == _MSGPACK:
        count = 0
        with to.open("wb") as packed:
            packed.write(_ARRAY.pack(_ARRAY_OF_32, 0))

            def pack(records: Records) -> None:
                nonlocal count
                count += len(records)
                packed.writelines(map(msgpack.packb, records))

            yield pack
            packed.seek(0)
            packed.write(_ARRAY.pack(_ARRAY_OF_32, count))
        return
    if to.suffix != ".parquet":
        with to.open("w", encoding="utf-8") as file:
            yield lambda records: file.writelines(f"{json.dumps(one)}\n" for one in records)
        return
    import pyarrow as pa  # the extra `datasets`
    import pyarrow.parquet as pq

    writers: list[pq.ParquetWriter] = []

    def add(records: Records) -> None:
        table = pa.Table.from_pylist(records, writers[0].schema if writers else None)
        if not writers:
            writers.append(pq.ParquetWriter(to, table.schema, compression="zstd"))
        writers[0].write_table(table)

    try:
        yield add
    finally:
        for writer in writers:
            writer.close()


# --- Supervised training --------------------------------------------------------------------------------------------

_TAUGHT = frozenset({BranchKind.MAIN, BranchKind.CONTINUATION, BranchKind.SUB_AGENT})
"""Conversations worth imitating: not what was not gone on from, nor titles."""


def write_sft(source: ExportSource, to: Path) -> int:
    """A line for each conversation of the trajectories that are kept: messages and tools as OpenAI writes them, token
    ids and the mask of the model's own where an engine gave them.

    Kept: scored, not suspect, of at least the reward and at most the turns that are asked for, and no duplicate, which
    has the same token ids (without ids: the same answers) or the same patch as another at the same task.
    """
    _refuse_other_purposes(source, Purpose.SYNTHESIS, Purpose.TRAINING)
    if to.suffix in (".parquet", _MSGPACK):
        raise ExportRefused(f"expected a file of JSON lines for sft, whose messages differ in keys; found {to.name!r}")
    seen: dict[str, set[object]] = defaultdict(set)
    count = 0
    with _writing(to) as add:
        for row, result in source.tasks():
            calls = _calls(source, row, result)
            if calls is None:
                continue
            taught = [one for one in branches(join(calls)) if one.kind in _TAUGHT]
            reason = _unfit(source, taught)
            identities = _identities(row, taught)
            if reason or identities & seen[row.name]:
                source.leave_out(row, reason or "duplicate")
                continue
            seen[row.name] |= identities
            made = list(_conversations(row, calls, taught))
            add(made)
            count += len(made)
    return count


def _calls(source: ExportSource, row: ReportRow, result: TaskResult) -> list[StoredCall] | None:
    """The calls of a trajectory whose verdict is good enough; None: it is left out, with the reason."""
    reward, least = row.verdict.get("reward"), source.min_reward
    found = next((one for one in result.artifacts if one.kind is ArtifactKind.MODEL_CALLS), None)
    reason = ""
    if not row.verdict.get("counts") or reward is None:
        reason = "not scored"
    elif row.verdict.get("suspect"):
        reason = "suspect"
    elif reward < least:
        reason = f"reward below {least:g}"
    elif (content := content_of(source.store, found)) is None:
        reason = "its model calls were not kept"
    else:
        try:
            return artifact.read(content)
        except ValueError:
            reason = "its model calls cannot be read"
    source.leave_out(row, reason)
    return None


def _unfit(source: ExportSource, taught: Sequence[Branch]) -> str:
    if not taught:
        return "no answered calls"
    turns = len(taught[0].nodes)
    return f"more than {source.max_turns} turns" if source.max_turns is not None and turns > source.max_turns else ""


def _identities(row: ReportRow, taught: Sequence[Branch]) -> set[object]:
    """By what a trajectory is known again: the answers of its main conversation, its patch."""
    answers = tuple(
        node.call.token_ids if node.call.token_ids is not None else json.dumps(node.call.reply, sort_keys=True)
        for branch in taught[:1]
        for node in branch.nodes
    )
    return {answers} | ({row.patch_sha256} if row.patch_sha256 else set())


def _conversations(row: ReportRow, calls: Sequence[StoredCall], taught: Sequence[Branch]) -> Iterator[dict[str, Any]]:
    try:
        samples = samples_of(calls)
    except SampleRefused:  # an engine that gives no ids
        samples = []
    for branch in taught:
        whole = [one for one in samples if one.branch == branch.number]
        sample = whole[0] if len(whole) == 1 else None  # in several parts: no one sequence is the conversation
        last = branch.nodes[-1].call
        messages = [*last.messages, *([last.reply] if last.reply else ())]
        yield {
            "task": row.name,
            "replica": row.replica,
            "framework": row.agent,
            "model": row.model,
            "reward": row.verdict["reward"],
            "end_reason": row.end_reason,
            "scripted": row.scripted,
            "kind": branch.kind.value,
            "turns": len(branch.nodes),
            "messages": [_message(one) for one in messages],
            "tools": [{"type": "function", "function": tool} for tool in last.tools],
            "token_ids": list(sample.token_ids) if sample else None,
            "mask": list(sample.mask) if sample else None,
        }


def _message(message: Message) -> dict[str, Any]:
    return assistant_message(message) if message["role"] == "assistant" else dict(message)
