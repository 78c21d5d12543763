"""Writes a run for trainers: samples in each trainer's format, good trajectories for supervised training."""

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
    """Writes rows of verl's batches: `uid`, `prompts`, `responses`, `response_mask`, `rollout_log_probs`, `reward`."""
    return _write_samples(source, to, lambda rows: [verl.record(row) for row in rows])


def write_trl(source: ExportSource, to: Path) -> int:
    """Writes the results of TRL's `rollout_func`, a line for each sample, with its group."""
    return _write_samples(source, to, lambda rows: [{"group_id": row["group_id"], **trl.record(row)} for row in rows])


def write_prime_rl(source: ExportSource, to: Path) -> int:
    """Writes prime-rl's `TrainingSample`s, with the advantages of their groups; in msgpack as arrays."""
    return _write_samples(source, to, prime_rl.positional if to.suffix == _MSGPACK else prime_rl.training_samples)


def _write_samples(source: ExportSource, to: Path, records: Callable[[Sequence[Row]], Records]) -> int:
    """Writes one group after the other. Raises: ExportRefused: the run has no samples."""
    _refuse_other_purposes(source, Purpose.TRAINING)
    stored = training.stored_samples(source.database, source.run_id)
    chosen = [one for one in stored if source.chooses(one.agent, one.replica)]
    if not chosen:
        raise ExportRefused(
            f"expected samples of run {source.head.name!r}, found none; `megaflow experience open` before its attempts"
            " end, and a policy whose engine gives token ids"
        )
    count = 0
    with _writing(to) as add:
        for _, group in groupby(chosen, key=lambda one: one.group_id):
            group_records = records([row for one in group for row in files.read(source.store.get(one.key))])
            add(group_records)
            count += len(group_records)
    return count


def _refuse_other_purposes(source: ExportSource, *purposes: Purpose) -> None:
    if source.head.purpose not in purposes:
        raise ExportRefused(
            f"expected a run with the purpose {' or '.join(purposes)}, found {source.head.purpose!r} of"
            f" {source.head.name!r}: answers to an evaluation are nothing to train on; submit with --purpose"
        )


_ARRAY = struct.Struct(">BI")
_ARRAY_OF_32 = 0xDD
"""First byte of an msgpack array whose length has 32 bits."""


@contextmanager
def _writing(to: Path) -> Iterator[Callable[[Records], None]]:
    """Opens a writer by the file's suffix: Parquet, one array of msgpack, else JSON lines."""
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


_TAUGHT = frozenset({BranchKind.MAIN, BranchKind.CONTINUATION, BranchKind.SUB_AGENT})
"""Conversations worth imitating: no abandoned ones, no titles."""


def write_sft(source: ExportSource, to: Path) -> int:
    """Writes a line for each conversation of the selected trajectories: messages and tools in OpenAI's form, token
    ids and the mask of the model's own tokens if an engine gave them.

    Selected: scored, not suspect, at least `min_reward`, at most `max_turns`, no duplicate. Duplicates have the same
    token ids (without ids: the same answers) or the same patch as another trajectory of the same task.
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
            lines = list(_conversations(row, calls, taught))
            add(lines)
            count += len(lines)
    return count


def _calls(source: ExportSource, row: ReportRow, result: TaskResult) -> list[StoredCall] | None:
    """Returns the calls of a trajectory with a good enough verdict. None: it is left out, with the reason."""
    reward, least = row.verdict.get("reward"), source.min_reward
    stored = next((one for one in result.artifacts if one.kind is ArtifactKind.MODEL_CALLS), None)
    reason = ""
    if not row.verdict.get("counts") or reward is None:
        reason = "not scored"
    elif row.verdict.get("suspect"):
        reason = "suspect"
    elif reward < least:
        reason = f"reward below {least:g}"
    elif (content := content_of(source.store, stored)) is None:
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
    """Returns what identifies a trajectory's duplicates: the answers of its main conversation, its patch."""
    answers = tuple(
        node.call.token_ids if node.call.token_ids is not None else json.dumps(node.call.reply, sort_keys=True)
        for branch in taught[:1]
        for node in branch.nodes
    )
    return {answers} | ({row.patch_sha256} if row.patch_sha256 else set())


def _conversations(row: ReportRow, calls: Sequence[StoredCall], taught: Sequence[Branch]) -> Iterator[dict[str, Any]]:
    try:
        samples = samples_of(calls)
    except SampleRefused:  # the engine gives no token ids
        samples = []
    for branch in taught:
        whole = [one for one in samples if one.branch == branch.number]
        sample = whole[0] if len(whole) == 1 else None  # in several parts: no single sequence is the conversation
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
