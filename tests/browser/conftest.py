"""A web server as a process of its own over a ledger of the test, and a real browser that looks at it."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from app.ledger import users
from app.ledger.database import Database
from app.ledger.users import Scope, TokenKind
from app.settings import Settings
from tests.integration import remote_fixture
from tests.integration.test_reports import NIGHT, Reports
from tests.services import MakeSettings, missing

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


class Site(remote_fixture.Site):
    """The server, and what is behind it: a run of five tasks, solved, not solved, suspect, lost."""

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
    found = Site(settings, database)
    found.start_process()
    try:
        found.reports = Reports(settings, database, monkeypatch)
        found.night = found.reports.run("night", NIGHT)
        yield found
    finally:
        found.end(signal.SIGTERM)


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


def heard(page: Page, *, refusals: bool = True) -> list[str]:
    """What the page will say on its console; refusals: but that a status was 4xx."""
    said: list[str] = []

    def hear(kind: str, text: str) -> None:
        if not (refusals and "status of 4" in text):
            said.append(f"{page.url}: {kind}: {text}")

    page.on("console", lambda message: hear(message.type, message.text))
    page.on("pageerror", lambda error: hear("error", str(error)))
    return said


@pytest.fixture
def open_page(chromium: Browser, site: Site, screenshots: Path) -> Iterator[OpenPage]:
    """Open a page as a signed-in user; its last screen is kept, and no page may have said anything on its console."""
    said: list[list[str]] = []
    contexts: list[BrowserContext] = []

    def open_(path: str, *, user: str = "default", scope: Scope = Scope.ADMINISTER, **options: object) -> Page:
        context = chromium.new_context(**options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        said.append(heard(page))
        page.goto(site.link(path, user, scope))
        return page

    yield open_
    for number, context in enumerate(contexts):
        for page in context.pages:
            page.screenshot(path=screenshots / f"{number}.png", full_page=True)
        context.close()
    assert [line for page in said for line in page] == []
