"""Operations on results: report, comparison, export, receipt."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

from pydantic import Field
from starlette.responses import Response

from app.evaluation.comparison import Comparison, compare
from app.evaluation.export import ExportFormat, ExportSource, export
from app.evaluation.report import Report, report_of, require_headline
from app.ledger import receipts, report_rows
from app.ledger.receipts import Receipt
from app.models.wire import Wire
from app.web.api.operation import Operations
from app.web.calls import WebCall

operations = Operations()


class ReportQuery(Wire):
    """allow_loss: tell the rate although infrastructure lost more than 2 %."""

    allow_loss: bool = False


class ComparisonQuery(Wire):
    """first, second: runs; allow: what may differ beside the model."""

    first: str
    second: str
    allow: tuple[str, ...] = Field(default=(), max_length=10)


class ExportQuery(Wire):
    """format: as `megaflow export`; agent, replica: these alone."""

    format: ExportFormat
    agent: str | None = None
    replica: int | None = Field(default=None, ge=0)
    min_reward: float = 1.0
    max_turns: int | None = Field(default=None, ge=1)


@operations.get("/runs/{run}/report", Report, query=ReportQuery)
def report_run(call: WebCall) -> Report:
    """A run's pass rate with its interval, what was lost and why, cost, and all that the numbers depend on."""
    run_id = call.run()
    made = report_of(report_rows.head(call.database, run_id), report_rows.rows(call.database, run_id))
    if not call.query.allow_loss:
        require_headline(made)
    return made


@operations.get("/comparison", Comparison, query=ComparisonQuery)
def compare_runs(call: WebCall) -> Comparison:
    """What the second run has over the first, task by task; refused where something else differs."""
    asked: ComparisonQuery = call.query
    first, second = (report_rows.rows(call.database, call.run(name)) for name in (asked.first, asked.second))
    return compare(first, second, allow=asked.allow)


@operations.get("/runs/{run}/export", bytes, query=ExportQuery, media_type="application/octet-stream")
def export_run(call: WebCall) -> Response:
    """A run in a format for others; a folder comes as a tar."""
    asked: ExportQuery = call.query
    run_id = call.run()
    source = ExportSource(
        call.database,
        call.services.store,
        run_id,
        agent=asked.agent,
        replica=asked.replica,
        min_reward=asked.min_reward,
        max_turns=asked.max_turns,
    )
    with tempfile.TemporaryDirectory(prefix="megaflow-export-") as scratch:
        place = Path(scratch) / f"{str(run_id)[-12:]}-{asked.format.value}"
        export(source, asked.format, place)
        content, suffix = (_tar(place), ".tar") if place.is_dir() else (place.read_bytes(), "")
    headers = {"Content-Disposition": f'attachment; filename="{place.name}{suffix}"'}
    return Response(content, media_type="application/octet-stream", headers=headers)


def _tar(folder: Path) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        archive.add(folder, arcname=folder.name)
    return written.getvalue()


@operations.get("/runs/{run}/receipt", Receipt)
def show_receipt(call: WebCall) -> Receipt:
    """What was made for a run and what was removed."""
    return receipts.of_run(call.database, call.run())
