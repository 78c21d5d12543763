"""Operations on results: report, comparison, export."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import structlog
from pydantic import Field
from pydantic_core import to_json
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from app.evaluation.comparison import Comparison
from app.evaluation.diagnosis import FailureGroup
from app.evaluation.export import ExportFormat
from app.evaluation.report import Report
from app.evaluation.transcripts import TranscriptReport
from app.models.wire import Wire
from app.web.api.operation import Operations
from app.web.calls import WebCall

log = structlog.get_logger()
operations = Operations()


class ReportQuery(Wire):
    """allow_loss: report the rate even if infrastructure lost more than 2 %."""

    allow_loss: bool = False


class ComparisonQuery(Wire):
    """first, second: runs; allow: what may differ besides the model; power: a difference that replicas shall show."""

    first: str
    second: str
    allow: tuple[str, ...] = Field(default=(), max_length=10)
    power: float | None = Field(default=None, gt=0, le=1)


class ExportQuery(Wire):
    """format: as `megaflow export`; agent, replica: only these."""

    format: ExportFormat
    agent: str | None = None
    replica: int | None = Field(default=None, ge=0)
    min_reward: float = 1.0
    max_turns: int | None = Field(default=None, ge=1)


@operations.get("/runs/{run}/report", Report, query=ReportQuery)
def report_run(call: WebCall) -> Report:
    """Reports a run's pass rate with its interval, loss with causes, cost, and all that the numbers depend on."""
    return call.flow.installation.report(call.run(), allow_loss=call.query.allow_loss)


@operations.get("/runs/{run}/transcripts", TranscriptReport)
def check_transcripts(call: WebCall) -> TranscriptReport:
    """Reports what the rules find in the transcripts of a run."""
    return call.flow.installation.transcripts(call.run())


@operations.get("/comparison", Comparison, query=ComparisonQuery)
def compare_runs(call: WebCall) -> Comparison:
    """Compares the second run with the first, task by task; refused if anything else differs."""
    query: ComparisonQuery = call.query
    first, second = call.run(query.first), call.run(query.second)
    return call.flow.installation.compare(first, second, allow=query.allow, power=query.power)


@operations.get("/runs/{run}/diagnosis", list[FailureGroup])
def diagnose_run(call: WebCall) -> list[FailureGroup]:
    """Groups the failures of a run by common features, the most frequent group first."""
    return call.flow.installation.diagnose(call.run())


@operations.get("/runs/{run}/export", bytes, query=ExportQuery, media_type="application/octet-stream")
def export_run(call: WebCall) -> Response:
    """Exports a run in another tool's format; a folder comes as a tar."""
    query: ExportQuery = call.query
    run_id, chosen = call.run(), query.model_dump(exclude={"format"})
    with ExitStack() as stack:
        place = _scratch(stack) / f"{str(run_id)[-12:]}-{query.format.value}"
        summary = call.flow.installation.export(run_id, query.format, place, **chosen)
        header = to_json(summary.model_copy(update={"path": place.name}), ensure_ascii=True).decode()
        return _sent(place, stack, {"MegaFlow-Export": header})


def _scratch(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megaflow-export-")))


def _sent(place: Path, stack: ExitStack, headers: dict[str, str]) -> Response:
    """Returns a file, or a folder as a tar. `stack` is closed when it was sent."""
    written, media_type = place, "application/octet-stream"
    if place.is_dir():
        written, media_type = place.with_name(f"{place.name}.tar"), "application/x-tar"
        with tarfile.open(written, "w") as archive:
            archive.add(place, arcname=".")
        shutil.rmtree(place)
    headers["Content-Disposition"] = f'attachment; filename="{written.name}"'
    return _SentOnce(written, stack.pop_all(), media_type=media_type, headers=headers)


class _SentOnce(FileResponse):
    """A file that is removed when it was sent, or when its reader has disconnected."""

    def __init__(self, path: Path, scratch: ExitStack, **named: Any) -> None:
        super().__init__(path, **named)
        self._scratch = scratch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._scratch:
            await super().__call__(scope, receive, send)
