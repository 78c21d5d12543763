"""Writes a run as a folder of static pages and data, to be looked at without a server: `megaflow bundle`.

The pages are those of the web server, requested in this process. Their links are rewritten to the files' names.
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape, unescape
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

import httpx
from starlette.applications import Starlette

from app.errors import ExportRefused
from app.evaluation.export import ExportFormat, ExportSource, export, new_place
from app.ledger import results
from app.ledger.database import Database
from app.settings import Settings
from app.web.access import Reader
from app.web.api.attempts import TEXT_KINDS
from app.web.calls import WebServices
from app.web.server import application

MOST_PAGES = 200_000
_LINK = re.compile(r'(?P<name>href|src)="(?P<path>/[^"]*)"')
_LIVE = re.compile(r' hx-sse:connect="[^"]*" hx-swap="[^"]*"')
_HEADER = re.compile(r'<header class="top">.*?</header>', re.DOTALL)
_FORM = re.compile(r"<form\b.*?</form>", re.DOTALL)
_TRAIL = re.compile(r"<h2>Done by users</h2>.*?</table>", re.DOTALL)
_HOST = "http://bundle"

Report = Callable[[str], None]


@dataclass
class _Crawl:
    """Pages of a run: those still to be fetched, and the file of each."""

    run_id: UUID
    folder: Path
    tasks: set[str]
    attempts: set[str]
    files: dict[str, str] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)

    def file_of(self, path: str) -> str | None:
        """Returns the file of a path of the server, and queues the path; None: it does not belong to the run."""
        parts = urlsplit(path)
        query = "" if parts.path.endswith("/terminal") else parts.query  # the second at which a player begins
        key = parts.path + (f"?{query}" if query else "")
        if key not in self.files:
            if not self._belongs(parts.path):
                return None
            self.files[key] = self._name(parts.path, query)
            self.waiting.append(key)
            if len(self.files) > MOST_PAGES:
                raise ExportRefused(f"expected a run of at most {MOST_PAGES:,} pages, found more; nothing was written")
        return self.files[key]

    def _belongs(self, path: str) -> bool:
        kind, _, rest = path.lstrip("/").partition("/")
        name, _, below = rest.partition("/")
        match kind:
            case "static":
                return True
            case "runs":
                return name == str(self.run_id) and below in ("", "report", "explain", "cleanup", "experience")
            case "tasks":
                return name in self.tasks and not below
            case "attempts":
                return name in self.attempts
            case "api":
                return rest.startswith("v1/attempts/") and rest.split("/")[2] in self.attempts
        return False

    def _name(self, path: str, query: str) -> str:
        if path.startswith(("/static/", "/api/")):
            return path.lstrip("/") + (".txt" if posixpath.basename(path) in TEXT_KINDS else "")
        mark = f"-{hashlib.sha256(query.encode()).hexdigest()[:12]}" if query else ""
        return f"{path.strip('/')}{mark}.html"


def write_bundle(settings: Settings, database: Database, run_id: UUID, to: Path, report: Report) -> int:
    """Writes the run's pages and data into the new folder `to`. Returns the number of pages.

    Raises: UnknownName; ExportRefused: `to` exists, or there are too many pages; ArtifactStoreUnavailable.
    """
    services = WebServices.of(settings, database)
    results.run_head(database, run_id)
    tasks = results.results(database, results.task_ids(database, run_id))
    with new_place(to) as part:
        part.mkdir()
        crawl = _Crawl(
            run_id,
            part,
            {str(one.task_id) for one in tasks},
            {str(attempt.id) for one in tasks for attempt in one.attempts},
        )
        start = crawl.file_of(f"/runs/{run_id}")
        asyncio.run(_fetch(application(settings, database, access=Reader(database)), crawl, report))
        (part / "index.html").write_text(
            f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={start}">'
            f'<title>run</title><a href="{start}">The run</a>\n'
        )
        with (part / "results.jsonl").open("w") as lines:
            lines.writelines(f"{one.model_dump_json()}\n" for one in tasks)
        export(ExportSource(database, services.store, run_id), ExportFormat.CSV, part / "results.csv")
    return len(crawl.files)


async def _fetch(app: Starlette, crawl: _Crawl, report: Report) -> None:
    """Fetches every page that another one links to, each once."""
    transport = httpx.ASGITransport(app=app)
    written = 0
    async with httpx.AsyncClient(transport=transport, base_url=_HOST, follow_redirects=False, timeout=60) as client:
        while crawl.waiting:
            key = crawl.waiting.pop()
            reply = await client.get(key)
            file = crawl.folder / crawl.files[key]
            file.parent.mkdir(parents=True, exist_ok=True)
            is_page = reply.headers.get("content-type", "").startswith("text/html")
            content = "".join(_rewritten(reply.text, crawl, crawl.files[key])).encode() if is_page else reply.content
            file.write_bytes(content)
            written += 1
            if written % 200 == 0:
                report(f"{written} pages written, {len(crawl.waiting)} known to be left")


def _rewritten(page: str, crawl: _Crawl, file: str) -> Iterator[str]:
    """Yields a page with links to files of the bundle, without forms and without the parts that a server updates."""
    for pattern in (_LIVE, _HEADER, _FORM, _TRAIL):
        page = pattern.sub("", page)
    here = posixpath.dirname(file)
    end = 0
    for link in _LINK.finditer(page):
        yield page[end : link.start()]
        end = link.end()
        path, mark, place = unescape(link["path"]).partition("#")
        target = crawl.file_of(path)
        if target is not None:
            yield f'{link["name"]}="{escape(posixpath.relpath(target, here) + mark + place)}"'
        else:
            yield 'data-left-out=""'
    yield page[end:]
