"""The pages over what a real system made: a task of the demo in containers, by an agent with a replayed model."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.acceptance.conftest import running
from tests.browser.conftest import heard

pytestmark = [pytest.mark.extra, pytest.mark.docker, pytest.mark.timeout(600)]


def test_every_screen_of_a_demo_run(base_image_tag: str, chromium: Browser, screenshots: Path) -> None:
    with running(base_image_tag) as system:
        submit = ["submit", "demo", "--wait", "--mode", "persistent", "--task", "csv-to-jsonl"]
        first = system.json(*submit, "--agent", "nop")["results"][0]["run_id"]
        submit += ["--model", "replay", "--name", "by mini"]
        second = system.json(*submit, "--agent", "mini-swe-agent")["results"][0]["run_id"]
        context = chromium.new_context()
        page = context.new_page()
        page.set_default_timeout(15_000)
        said = heard(page, refusals=False)
        page.goto(system.json("web")["link"])
        expect(page.locator("#hosts + table")).to_contain_text("persistent")
        page.screenshot(path=screenshots / "fleet.png", full_page=True)
        page.get_by_role("link", name="by mini").click()
        expect(page.locator(".legend").first).to_contain_text("solved 1")
        page.screenshot(path=screenshots / "run.png", full_page=True)
        page.locator("tbody").get_by_role("link", name="csv-to-jsonl").click()
        expect(page.locator(".lead")).to_contain_text("solved")
        page.locator("tbody").get_by_role("link", name="1", exact=True).click()
        expect(page.locator("svg.timeline rect.working").first).to_be_attached()
        expect(page.locator("svg.timeline rect.model").first).to_be_attached()
        page.screenshot(path=screenshots / "attempt.png", full_page=True)
        page.get_by_role("link", name="Trajectory").click()
        expect(page.locator(".step.agent").first).to_be_visible()
        page.get_by_role("link", name="Terminal").click()
        expect(page.locator(".ap-player")).to_be_visible()
        page.get_by_role("link", name="Agent log").click()
        for path, words in (
            (f"/runs/{second}/explain", "agent"), (f"/runs/{second}/cleanup", "standing instance"),
            (f"/runs/{second}/report", "solved"),
            (f"/compare?first={first}&second={second}", "differ"), ("/models", "replay"), ("/actions", "default"),
        ):  # fmt: skip
            page.goto(f"{system.settings.web_base()}{path}")
            expect(page.locator("body")).to_contain_text(words)
            page.screenshot(path=screenshots / f"{path.strip('/').split('?')[0].replace('/', '-')}.png", full_page=True)
        context.close()
    assert said == []
