"""Exports a run: predictions, a Harbor job folder, tables of its tasks, trajectories.

Tasks are read a hundred at a time and artifacts one at a time, so memory does not grow with the run. Output goes to a
scratch folder next to its target first and appears whole, or not at all. Nothing that exists is overwritten.
"""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import UUID

from app.artifacts import ArtifactStore
from app.errors import ArtifactMissing, ExportRefused
from app.evaluation.report import language, repository, resources_of
from app.ledger import report_rows, results
from app.ledger.database import Database
from app.ledger.report_rows import ReportRow
from app.models.outcome import Artifact, ArtifactKind, TaskResult, TestStatus
from app.models.spec import JudgeName, Wire

_EXAMPLES = 3


class ExportFormat(StrEnum):
    PREDICTIONS = "predictions"
    HARBOR = "harbor"
    CSV = "csv"
    PARQUET = "parquet"
    ATIF = "atif"
    VERL = "verl"
    TRL = "trl"
    PRIME_RL = "prime-rl"
    SFT = "sft"


class ExportSummary(Wire):
    """Numbers of written and left-out tasks of an export, with the reasons."""

    format: ExportFormat
    path: str
    written: int  # lines, rows, trials or trajectories
    left_out: dict[str, int]  # by reason
    notes: tuple[str, ...]


@dataclass
class ExportSource:
    """The tasks to write, with reports for the user. agent and replica: only these; None: all.

    min_reward, max_turns: limits of trajectories for supervised training.
    """

    database: Database
    store: ArtifactStore
    run_id: UUID
    agent: str | None = None
    replica: int | None = None
    min_reward: float = 1.0
    max_turns: int | None = None
    head: results.RunHead = field(init=False)
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if math.isnan(self.min_reward):
            raise ExportRefused("min_reward: expected a number, found nan; nothing was written")
        self.head = results.run_head(self.database, self.run_id)

    def tasks(self) -> Iterator[tuple[ReportRow, TaskResult]]:
        """Yields every chosen task with its attempts and their artifacts."""
        for rows in report_rows.batches(self.database, self.run_id):
            chosen = [row for row in rows if self.chooses(row.agent, row.replica)]
            yield from zip(chosen, results.results(self.database, [row.task_id for row in chosen]), strict=True)

    def chooses(self, agent: str, replica: int) -> bool:
        return self.agent in (None, agent) and self.replica in (None, replica)

    def leave_out(self, row: ReportRow, reason: str) -> None:
        self.left_out[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(row.name)

    def all_notes(self) -> tuple[str, ...]:
        """Returns the notes, and for each reason the first names of the tasks left out."""
        return (*self.notes, *(f"left out, {reason}: {self._named(reason)}" for reason in self.left_out))

    def _named(self, reason: str) -> str:
        more = self.left_out[reason] - len(self.examples[reason])
        return ", ".join(self.examples[reason]) + (f" and {more} more" if more else "")


def export(source: ExportSource, form: ExportFormat, to: Path) -> ExportSummary:
    """Writes the run's tasks to `to`: a file, or a folder for a Harbor job and trajectories.

    Raises:
        ExportRefused: `to` exists, nothing was chosen, or the format cannot hold it; OSError: `to` cannot be
        written; ArtifactStoreUnavailable; ModuleNotFoundError: Parquet without pyarrow.
    """
    from app.evaluation import trainer_export
    from app.evaluation.harbor_job import write_harbor_job

    writers: dict[ExportFormat, Callable[[ExportSource, Path], int]] = {
        ExportFormat.PREDICTIONS: _write_predictions,
        ExportFormat.HARBOR: write_harbor_job,
        ExportFormat.CSV: _write_csv,
        ExportFormat.PARQUET: _write_parquet,
        ExportFormat.ATIF: _write_trajectories,
        ExportFormat.VERL: trainer_export.write_verl,
        ExportFormat.TRL: trainer_export.write_trl,
        ExportFormat.PRIME_RL: trainer_export.write_prime_rl,
        ExportFormat.SFT: trainer_export.write_sft,
    }
    with new_place(to) as part:
        written = writers[form](source, part)
        if not written and not source.left_out:
            raise ExportRefused(f"expected tasks of run {source.head.name!r} to write; found none that were chosen")
    return ExportSummary(
        format=form, path=str(to), written=written, left_out=dict(source.left_out), notes=source.all_notes()
    )


@contextmanager
def new_place(to: Path) -> Iterator[Path]:
    """Yields a scratch path that is renamed to `to` afterwards. After an error nothing remains."""
    _refuse_existing(to)
    scratch = Path(tempfile.mkdtemp(prefix=".export-", dir=to.parent))
    try:
        part = scratch / to.name
        yield part
        _refuse_existing(to)
        part.rename(to)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _refuse_existing(to: Path) -> None:
    if to.exists() or to.is_symlink():
        raise ExportRefused(f"expected a path that does not exist yet; found {to}; choose another or remove it")
    if not to.parent.is_dir():
        raise ExportRefused(f"expected a folder to write into; found none at {to.parent}; make it first")


def safe_name(text: str) -> str:
    """Converts a text to a file name: no separators, nothing hidden, at most 80 characters."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:80].lstrip(".") or "unnamed"


def content_of(store: ArtifactStore, artifact: Artifact | None) -> bytes | None:
    """Returns an artifact's bytes; None where there are none. Raises: ArtifactStoreUnavailable."""
    if artifact is None or artifact.key is None:
        return None
    try:
        return store.get(artifact.key)
    except ArtifactMissing:
        return None


def _write_predictions(source: ExportSource, to: Path) -> int:
    """Writes a line with the patch per instance, in the form of its dataset's harness: SWE-bench or Multi-SWE-bench.

    Source: swebench 4.1.0 and 5.0.2, `harness.utils.get_predictions_from_file` and the keys of `harness.constants`;
    multi-swe-bench 1.1.2, `harness.run_evaluation.Patch`, which ignores unknown keys.
    """
    seen: dict[str, ReportRow] = {}
    forms: dict[bool, str] = {}
    with to.open("w", encoding="utf-8") as file:
        for row, result in source.tasks():
            name = _instance_id(row)
            if (other := seen.get(name)) is not None:
                raise ExportRefused(
                    f"expected each instance once, as a leaderboard has it; found {name!r} of {_who(other)} and of"
                    f" {_who(row)}; choose one by --agent NAME and --replica N"
                )
            if (patch := _patch(source, row, result)) is None:
                continue
            seen[name] = row
            request = _pull_request(row)
            forms.setdefault(bool(request), name)
            if len(forms) > 1:
                raise ExportRefused(
                    f"expected predictions for one harness; found {forms[True]!r} of Multi-SWE-bench and"
                    f" {forms[False]!r} of SWE-bench's kind; export the runs of each apart"
                )
            model = "__".join(filter(None, (row.agent, row.model)))
            ours = {"instance_id": name, "model_name_or_path": model, "model_patch": patch}
            line = {**request, "fix_patch": patch} if request else ours
            file.write(json.dumps({**line, **_flags(row)}) + "\n")
    return len(seen)


def _patch(source: ExportSource, row: ReportRow, result: TaskResult) -> str | None:
    """Returns the patch as text; an empty one is a prediction, too. None: left out, with the reason."""
    if not row.verdict.get("counts"):
        source.leave_out(row, "not scored")
        return None
    artifact = next((one for one in result.artifacts if one.kind is ArtifactKind.PATCH), None)
    content = content_of(source.store, artifact)
    if content is None:
        source.leave_out(row, "no patch in the artifact store")
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        source.leave_out(row, "its patch is not UTF-8, which JSON cannot hold")
        return None


def _instance_id(row: ReportRow) -> str:
    instance_id = row.spec["task"]["goal"].get("row", {}).get("instance_id")
    return instance_id if isinstance(instance_id, str) and instance_id else row.name


def _pull_request(row: ReportRow) -> dict[str, Any]:
    """Returns the keys by which Multi-SWE-bench names a task; empty: the row is of another dataset."""
    goal = row.spec["task"]["goal"]
    if goal.get("judge") != JudgeName.MULTI_SWE_BENCH:
        return {}
    return {name: goal["row"][name] for name in ("org", "repo", "number")}


def _who(row: ReportRow) -> str:
    return f"{row.agent} (replica {row.replica})"


def _flags(row: ReportRow) -> dict[str, Any]:
    """Returns marks of results that are not plain ones; harnesses ignore unknown keys."""
    suspect = {"suspect": row.verdict["suspect"]} if row.verdict.get("suspect") else {}
    return {**suspect, **({"scripted": True} if row.scripted else {})}


_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters by which spreadsheets recognise a formula."""


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _is_scored(row: ReportRow) -> bool:
    return bool(row.verdict.get("counts")) and not row.scripted


def _counted(row: ReportRow, *wanted: TestStatus) -> int:
    return sum(1 for how in row.verdict.get("tests", {}).values() if not wanted or how in wanted)


_TABLE: dict[str, tuple[str, Callable[[ReportRow], Any]]] = {
    "task_id": ("string", lambda row: str(row.task_id)),
    "task": ("string", lambda row: row.name),
    "replica": ("int64", lambda row: row.replica),
    "agent": ("string", lambda row: row.agent),
    "agent_version": ("string", lambda row: row.environment.get("agent_version")),
    "model": ("string", lambda row: row.model),
    "state": ("string", lambda row: row.state),
    "end_reason": ("string", lambda row: row.end_reason),
    "scored": ("bool", _is_scored),
    "reward": ("float64", lambda row: _number(row.verdict.get("reward"))),
    "solved": ("bool", lambda row: _is_scored(row) and (row.verdict.get("reward") or 0.0) >= 1.0),
    "scripted": ("bool", lambda row: row.scripted),
    "suspect": ("string", lambda row: row.verdict.get("suspect") or None),
    "claimed_reward": ("float64", lambda row: _number(row.verdict.get("claimed_reward"))),
    "grader": ("string", lambda row: row.verdict.get("grader") or None),
    "tests": ("int64", _counted),
    "tests_passed": ("int64", lambda row: _counted(row, TestStatus.PASSED)),
    "attempts": ("int64", lambda row: row.attempts),
    "cost_usd": ("float64", lambda row: _number(row.cost_usd)),
    "agent_s": ("float64", lambda row: row.agent_s),
    "memory_kills": ("int64", lambda row: row.memory_kills),
    "throttled_s": ("float64", lambda row: row.throttled_s),
    "resources": ("string", lambda row: resources_of(row).label),
    "grading_s": ("float64", lambda row: row.grading_s),
    "repository": ("string", repository),
    "language": ("string", language),
    "error": ("string", lambda row: row.failure.get("error")),
    "message": ("string", lambda row: row.failure.get("message") or row.verdict.get("detail")),
    "host": ("string", lambda row: row.host),
    "image": ("string", lambda row: row.environment.get("image") or row.spec["task"]["environment"].get("image")),
    "image_id": ("string", lambda row: row.environment.get("image_id")),
    "spec_digest": ("string", lambda row: row.spec_digest),
}
"""Columns of a table of tasks: their type, by Arrow's names, and their value."""


def _table_row(row: ReportRow) -> dict[str, Any]:
    cells = {name: value(row) for name, (_, value) in _TABLE.items()}
    return {name: str(one) if _TABLE[name][0] == "string" and one is not None else one for name, one in cells.items()}


def _write_csv(source: ExportSource, to: Path) -> int:
    count = 0
    with to.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(_TABLE))
        table.writeheader()
        for row, _ in source.tasks():
            table.writerow({name: _cell(value) for name, value in _table_row(row).items()})
            count += 1
    return count


def _cell(value: Any) -> Any:
    """Returns a cell's value, with an apostrophe before a text that a spreadsheet would read as a formula."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _write_parquet(source: ExportSource, to: Path) -> int:
    import pyarrow as pa  # the extra `datasets`
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, (kind, _) in _TABLE.items()])
    count = 0
    with pq.ParquetWriter(to, schema) as writer:
        batch: list[dict[str, Any]] = []
        for row, _ in source.tasks():
            batch.append(_table_row(row))
            if len(batch) == 1000:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                count, batch = count + len(batch), []
        writer.write_table(pa.Table.from_pylist(batch, schema))
    return count + len(batch)


def _write_trajectories(source: ExportSource, to: Path) -> int:
    """Writes a folder per task with one file per attempt, as stored, and `index.jsonl` with each result."""
    to.mkdir()
    count = 0
    with (to / "index.jsonl").open("w", encoding="utf-8") as index:
        for row, result in source.tasks():
            folder = to / f"{safe_name(row.name)}--{str(row.task_id)[-12:]}"
            for attempt in result.attempts:
                artifact = next((one for one in attempt.artifacts if one.kind is ArtifactKind.TRAJECTORY), None)
                if (content := content_of(source.store, artifact)) is None:
                    source.leave_out(row, "no trajectory in the artifact store")
                    continue
                folder.mkdir(exist_ok=True)
                file = folder / f"{attempt.number}.json"
                file.write_bytes(content)
                verdict = attempt.verdict
                line = {
                    "file": str(file.relative_to(to)),
                    "task": row.name,
                    "replica": row.replica,
                    "agent": row.agent,
                    "model": row.model,
                    "attempt": attempt.number,
                    "end_reason": attempt.end_reason,
                    "scripted": attempt.scripted,
                    "reward": verdict.reward if verdict else None,
                    "suspect": verdict.suspect if verdict else "",
                }
                index.write(json.dumps(line) + "\n")
                count += 1
    return count
