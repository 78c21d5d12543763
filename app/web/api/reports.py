"""Operations on results: report, comparison, regrade, export, bundle, receipt."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import structlog
from pydantic import Field
from pydantic_core import to_json
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from app.errors import TooManyRequests
from app.evaluation.comparison import Comparison
from app.evaluation.diagnosis import FailureGroup
from app.evaluation.export import ExportFormat
from app.evaluation.regrade import RegradeSummary
from app.evaluation.report import Report
from app.evaluation.transcripts import TranscriptReport
from app.ledger import receipts
from app.ledger.receipts import Receipt
from app.models.spec import PlainText
from app.models.wire import Wire
from app.web.access import Reader
from app.web.api.operation import Operations
from app.web.calls import WebCall

log = structlog.get_logger()
operations = Operations()


class ReportQuery(Wire):
    """allow_loss: report the rate even if infrastructure lost more than 2 %."""

    allow_loss: bool = False


class TranscriptsQuery(Wire):
    """all_bytes: read all transcripts, however large; else the first 512 MiB."""

    all_bytes: bool = False


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


class Regrading(Wire):
    """grader: only verdicts of this one; reason: stored in the trail."""

    grader: str | None = None
    reason: PlainText = Field(default="", max_length=1000)


_LONG = threading.Lock()


@contextmanager
def _alone() -> Iterator[None]:
    """Runs one long operation at a time, which takes minutes of this server. Raises: TooManyRequests."""
    if not _LONG.acquire(blocking=False):
        raise TooManyRequests("expected one bundle or regrade at a time, found another at work; try again later")
    try:
        yield
    finally:
        _LONG.release()


@operations.get("/runs/{run}/report", Report, query=ReportQuery)
def report_run(call: WebCall) -> Report:
    """Reports a run's pass rate with its interval, loss with causes, cost, and all that the numbers depend on."""
    return call.flow.installation.report(call.run(), allow_loss=call.query.allow_loss)


@operations.get("/runs/{run}/transcripts", TranscriptReport, query=TranscriptsQuery)
def check_transcripts(call: WebCall) -> TranscriptReport:
    """Reports what the rules find in the transcripts of a run."""
    return call.flow.installation.transcripts(call.run(), all_bytes=call.query.all_bytes)


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


@operations.get("/runs/{run}/bundle", bytes, media_type="application/x-tar")
def bundle_run(call: WebCall) -> Response:
    """Returns a run as a tar of pages and data that need no server: only pages that the caller may see."""
    from app.web.bundle import write_bundle  # it imports the server: a cycle at the top

    run_id = call.run()
    with ExitStack() as stack, _alone():
        place = _scratch(stack) / f"{str(run_id)[-12:]}-bundle"
        services, reader = call.services, Reader(call.database, call.caller)
        pages = write_bundle(services.settings, call.database, run_id, place, log.info, reader)
        return _sent(place, stack, {"MegaFlow-Pages": str(pages)})


@operations.post("/runs/{run}/regrade", RegradeSummary, body=Regrading)
def regrade_run(call: WebCall) -> RegradeSummary:
    """Grades a run's stored test reports again, without agents. Earlier verdicts stay."""
    run_id = call.run()
    with _alone():
        call.note("run.regraded", run_id, call.body.reason)  # first: results stay even if it ends early
        return call.flow.installation.regrade(run_id, grader=call.body.grader)


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


@operations.get("/runs/{run}/receipt", Receipt)
def show_receipt(call: WebCall) -> Receipt:
    """Lists the resources that were made for a run, and those removed."""
    return receipts.of_run(call.database, call.run())
