"""A live shell on its page: typed in a real browser, run where a real agent is at work."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from app.ledger.users import Scope
from tests.browser.conftest import OpenPage, Site
from tests.integration.live_shell_fixture import AtWork
from tests.integration.test_live_shell import attempt, settings

__all__ = ["attempt", "settings"]
pytestmark = [pytest.mark.extra, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
def test_a_shell_is_opened_typed_in_and_ends_with_the_agent(
    site: Site, attempt: AtWork, open_page: OpenPage, screenshots: Path, scheme: str, width: int
) -> None:
    reader = open_page(f"/attempts/{attempt.id}", scope=Scope.READ)
    expect(reader.get_by_role("link", name="Shell")).to_have_count(0)
    page = open_page(f"/attempts/{attempt.id}", viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("[...document.scripts].every((one) => !one.src.includes('xterm'))")
    page.get_by_role("link", name="Shell").click()
    page.get_by_role("button", name="Open the shell").click()
    expect(page.locator("#state")).to_have_text("Open.")
    page.keyboard.type("echo $((6*7)) in $(tput cols) columns; ls -la --color /\n")
    expect(page.locator(".xterm-accessibility")).to_contain_text("42 in")
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    page.screenshot(path=screenshots / "open.png")
    faults = Axe().run(page, options={"exclude": [["#shell"]]}).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:80]) for one in faults] == []
    attempt.end()
    expect(page.locator("#state")).to_contain_text("the agent has ended", timeout=20_000)
    page.reload()
    expect(page.locator("main .problem")).to_contain_text("There is none: expected an attempt whose agent is at work")
