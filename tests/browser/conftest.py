"""A web server as a process of its own over a ledger of the test, and a real browser that looks at it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen
from uuid import UUID

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from app.ledger import users
from app.ledger.database import Database
from app.ledger.users import Scope, TokenKind
from app.settings import Settings
from tests.integration.test_reports import NIGHT, Reports
from tests.services import MakeSettings, free_port, missing
from tests.waiting import eventually

_QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""It looks at loopback alone."""


@dataclass
class Site:
    """The server's address, and what is behind it."""

    url: str
    settings: Settings
    database: Database
    reports: Reports
    night: UUID

    def link(self, path: str = "/", user: str = "default", scope: Scope = Scope.ADMINISTER) -> str:
        """An address that signs a user in and leads to a page."""
        secret, _ = users.add_token(self.database, user, scope, kind=TokenKind.LINK, expires_s=600)
        return f"{self.url}/sign-in?once={secret}&next={path}"


@pytest.fixture
def settings(make_settings: MakeSettings, tmp_path: Path) -> Settings:
    return make_settings(artifacts_url=f"file://{tmp_path / 'artifacts'}")


@pytest.fixture
def site(settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """With a run of five tasks: solved, not solved, suspect, lost."""
    port = free_port()
    variables = {
        "MEGAFLOW_HOME": str(settings.home),
        "MEGAFLOW_DATABASE_URL": database.url,
        "MEGAFLOW_ARTIFACTS_URL": settings.artifacts(),
        "MEGAFLOW_BROKER_URL": settings.broker(),
        "MEGAFLOW_INSTALLATION": settings.installation,
    }
    command = [sys.executable, "-m", "app.web", "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | variables)
    try:
        eventually(lambda: _answers(f"http://127.0.0.1:{port}/sign-in"), within_s=60)
        reports = Reports(settings, database, monkeypatch)
        yield Site(f"http://127.0.0.1:{port}", settings, database, reports, reports.run("night", NIGHT))
    finally:
        process.terminate()
        process.wait(20)


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        missing("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(_QUIET))
        yield browser
        browser.close()


OpenPage = Callable[..., Page]


@pytest.fixture
def screenshots(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where the test's screens are kept: below TEST_SCREENSHOTS, or in the test's folder, which is printed."""
    kept = os.environ.get("TEST_SCREENSHOTS")
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", request.node.name)
    folder = Path(kept) / name if kept else tmp_path / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    print(f"screenshots: {folder}")
    return folder


@pytest.fixture
def open_page(chromium: Browser, site: Site, screenshots: Path) -> Iterator[OpenPage]:
    """Open a page as a signed-in user; its last screen is kept, and no page may have said anything on its console."""
    said: list[str] = []
    contexts: list[BrowserContext] = []

    def open_(path: str, *, user: str = "default", scope: Scope = Scope.ADMINISTER, **options: object) -> Page:
        context = chromium.new_context(**options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console",
            lambda message: "status of 4" in message.text or said.append(f"{page.url}: {message.type}: {message.text}"),
        )
        page.on("pageerror", lambda error: said.append(f"{page.url}: {error}"))
        page.goto(site.link(path, user, scope))
        return page

    yield open_
    for number, context in enumerate(contexts):
        for page in context.pages:
            page.screenshot(path=screenshots / f"{number}.png", full_page=True)
        context.close()
    assert said == []
