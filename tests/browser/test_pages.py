"""The pages in a real browser: live, by keyboard, narrow, dark, without script, and for people who use a reader."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

from app.experience.maker import SampleMaker
from app.ledger import experience, model_replicas, names, pressure, tasks
from app.ledger.database import sql
from app.ledger.model_replicas import NewReplica
from app.ledger.pressure import EngineLoad
from app.ledger.users import Scope
from app.models.spec import Mode
from app.web.bundle import write_bundle
from tests.browser.conftest import OpenPage, Site, heard
from tests.building import accepted, claimed, new_id, ready_instance
from tests.integration.test_experience import _ended, _run
from tests.integration.test_reports import recording
from tests.integration.web_fixture import second_of
from tests.waiting import eventually

pytestmark = [pytest.mark.extra, pytest.mark.timeout(300)]


def _pages(site: Site) -> list[str]:
    task_id = names.find(site.database, "tasks", f"{site.night}/click-1")
    run, base = f"/runs/{site.night}", f"/attempts/{site.reports.attempt(site.night).id}"
    return [
        "/", "/runs", "/tasks", run, f"{run}/explain", f"{run}/cleanup", f"{run}/experience", f"{run}/report",
        f"/tasks/{task_id}", base, f"{base}/trajectory", f"{base}/terminal", f"{base}/files/patch",
        f"/compare?first={site.night}&second={site.night}", "/models", "/quarantine", "/actions", "/submit",
    ]  # fmt: skip


def _busy(site: Site) -> UUID:
    """Have tasks wait and run on a host, an engine, and a training run, whose id this is, with groups of all states."""
    claim = claimed(site.database)
    accepted(site.database, 3)
    ready_instance(site.database, Mode.EPHEMERAL)
    with site.database.begin() as connection:
        sql(connection, "UPDATE instances SET host = 'host-b' WHERE id = :id", {"id": claim.instance_id})
    model_replicas.add(site.database, NewReplica("writer", "http://writer.test/v1", policy_version="v7"))
    load = EngineLoad("http://writer.test/v1", ("writer",), inside=7, waiting=2, queued=3, refused=4, kv_use=0.93)
    pressure.report_engines(site.database, "gateway", [load])
    run_id = _run(site.database)
    for group in (new_id(), new_id(), new_id()):
        for replica in (0, 1):
            task_id = _ended(site.database, site.reports.store, run_id, group, reward=float(replica))
            values = {"replica": replica, "id": task_id}
            with site.database.begin() as connection:
                sql(connection, "UPDATE tasks SET replica = :replica WHERE id = :id", values)
    SampleMaker(site.database, site.reports.store, lambda _: None).pass_once()
    leased = experience.next_batch(site.database, run_id, "trainer-1", groups=1, lease_s=300)
    assert leased is not None
    return run_id


def test_the_fleet_and_experience_of_a_busy_installation(site: Site, open_page: OpenPage) -> None:
    run_id = _busy(site)
    page = open_page("/")
    host = page.locator("#hosts + table").get_by_role("row", name="host-b")
    expect(host).to_contain_text("1 process")
    expect(page.get_by_role("row", name="default persistent standard")).to_contain_text("3")
    expect(page.locator("h2:text-is('Instances') + table").get_by_role("row")).to_have_count(4)  # with night's
    host.get_by_role("link").click()
    expect(page.locator("tbody").get_by_role("link", name="example-0")).to_be_visible()
    page.goto(f"{site.url}/runs/{run_id}/experience")
    expect(page.locator("main")).to_contain_text("Policy policy, trainer trainer-1.")
    groups = page.locator("h2:text-is('Groups') + table")
    for state, count in (("ready", "2"), ("leased", "1")):
        expect(groups.get_by_role("row", name=state)).to_contain_text(count)
    expect(page.locator("table", has_text="versions behind").get_by_role("link")).to_have_text("2")
    groups.get_by_role("row", name="leased").get_by_role("link").click()
    expect(page.locator("#groups + ul").get_by_role("link")).to_have_count(1)


def test_a_failed_tasks_cause_is_two_clicks_away(site: Site, open_page: OpenPage) -> None:
    page = open_page(f"/runs/{site.night}")
    page.get_by_role("link", name="1", exact=True).first.focus()
    page.locator(".figure", has_text="not scored").get_by_role("link").click()
    page.get_by_role("link", name="click-5").click()
    expect(page.locator("pre.cause")).to_contain_text("no image 17")


def test_a_click_on_the_strip_opens_its_attempt(site: Site, open_page: OpenPage) -> None:
    page = open_page(f"/runs/{site.night}")
    strip = page.locator("canvas.strip")
    expect(strip).to_be_visible()
    strip.click(position={"x": 4, "y": 4})
    expect(page.get_by_role("heading", level=1)).to_contain_text("attempt 1")
    expect(page.locator("main")).to_contain_text("click-1")


def _tab_to(page: Page, target: Locator) -> None:
    """Press Tab until it has the focus."""
    for _ in range(120):
        page.keyboard.press("Tab")
        if target.evaluate("one => document.activeElement === one"):  # found anew: a live update replaces it
            return
    raise AssertionError(f"Tab does not lead to {target}")


def test_the_keyboard_alone_leads_from_the_runs_to_an_attempt(site: Site, open_page: OpenPage) -> None:
    page = open_page("/runs")
    for target, heading in (
        (page.get_by_role("link", name="night"), "night"),
        (page.locator("tbody").get_by_role("link", name="click-5"), "click-5"),
        (page.locator("tbody").get_by_role("link", name="1", exact=True), "attempt 1"),
    ):
        _tab_to(page, target)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_contain_text(heading)


def test_arrow_keys_choose_a_cell_of_the_strip_and_enter_opens_it(site: Site, open_page: OpenPage) -> None:
    second_of(site.database, names.find(site.database, "tasks", f"{site.night}/click-4"))
    page = open_page(f"/runs/{site.night}")
    _tab_to(page, page.locator("canvas.strip"))
    told = page.locator("[data-cell]")
    expect(told).to_have_text("Cell 1 of 6: task 1, attempt 1, solved. Enter opens it.")
    for key, found in (
        ("End", "6 of 6: task 5, attempt 1, not scored"),
        ("ArrowLeft", "5 of 6: task 4, attempt 2, suspect"),
        ("ArrowLeft", "4 of 6: task 4, attempt 1, not scored"),
        ("ArrowUp", "4 of 6"),
    ):
        page.keyboard.press(key)
        expect(told).to_contain_text(f"Cell {found}")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("attempt 1")
    expect(page.locator("main")).to_contain_text("click-4")


def test_a_live_update_leaves_the_focus_on_the_strip(site: Site, open_page: OpenPage) -> None:
    run = accepted(site.database, 4)
    page = open_page(f"/runs/{run.run_id}")
    _tab_to(page, page.locator("canvas.strip"))
    page.keyboard.press("ArrowRight")
    tasks.cancel(site.database, run.task_ids)
    expect(page.locator("[data-cell]")).to_have_text(
        "Cell 2 of 4: task 2, attempt 1, cancelled. Enter opens it.", timeout=5000
    )
    expect(page.locator("canvas.strip")).to_be_focused()


def test_a_bundle_opens_without_a_server(site: Site, chromium: Browser, screenshots: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread:  # this one has Playwright's event loop
        thread.submit(write_bundle, site.settings, site.database, site.night, tmp_path / "night", print).result()
    context = chromium.new_context(offline=True)
    page = context.new_page()
    said = heard(page)
    page.on("requestfailed", lambda one: "ABORTED" in (one.failure or "") or said.append(f"{page.url}: {one.url}"))
    page.goto((tmp_path / "night" / "index.html").as_uri())
    expect(page.get_by_role("heading", level=1)).to_have_text("night")
    assert page.evaluate("document.querySelector('canvas.strip').width") > 1
    solved = "getComputedStyle(document.querySelector('.outcome.solved'), '::before').backgroundColor"
    assert page.evaluate(solved) == "rgb(31, 122, 77)"
    page.screenshot(path=screenshots / "run.png", full_page=True)
    page.locator("tbody").get_by_role("link", name="click-1").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("click-1")
    page.get_by_role("link", name="what the agent did").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Trajectory")
    for file in sorted((tmp_path / "night").glob("*/**/*.html")):
        page.goto(file.as_uri())
    context.close()
    assert said == []


def test_what_changes_is_shown_without_a_reload(site: Site, open_page: OpenPage) -> None:
    run = accepted(site.database, 4)
    page = open_page(f"/runs/{run.run_id}")
    expect(page.locator(".legend").first).to_contain_text("waiting 4")
    tasks.cancel(site.database, run.task_ids)
    expect(page.locator(".legend").first).to_contain_text("cancelled 4", timeout=5000)
    assert page.evaluate("document.querySelector('canvas.strip').width") > 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_and_have_no_accessibility_fault(
    site: Site, open_page: OpenPage, screenshots: Path, scheme: str
) -> None:
    training = _busy(site)
    page = open_page("/", viewport={"width": 390, "height": 800}, color_scheme=scheme, bypass_csp=True)
    for number, path in enumerate([*_pages(site), f"/runs/{training}/experience?state=ready"]):
        page.goto(site.url + path)
        page.screenshot(path=screenshots / f"page-{number}.png", full_page=True)
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{path} is {wide} px too wide"
        assert _faults(page) == [], path


def _faults(page: Page) -> list[tuple[str, str]]:
    """Of accessibility, each with what has it."""
    return [(one["id"], one["nodes"][0]["html"][:80]) for one in Axe().run(page).response["violations"]]


def _terminal(site: Site, content: bytes) -> str:
    return site.reports.keep(site.night, "terminal", content) + "/terminal"


def test_a_recording_is_played(site: Site, open_page: OpenPage) -> None:
    page = open_page(_terminal(site, recording("ls -l", "make test")))
    player = page.locator(".ap-player")
    expect(player).to_be_visible()
    expect(page.locator("details#text")).not_to_have_attribute("open", "")
    page.locator(".ap-playback-button").click()
    expect(player).to_contain_text("make test", timeout=15_000)
    expect(player).to_contain_text("done")
    assert _faults(page) == []


def test_sequences_with_the_largest_numbers_that_are_played_do_no_harm(site: Site, open_page: OpenPage) -> None:
    many = ["x\x1b[999b\x1b[999;999H\x1b[8;999;999t\x1b[?1049h\x1b[999L\x1b[?1049l\x1b[999S" * 160, "\n" * (500 << 10)]
    header = {"version": 2, "width": 200, "height": 100, "timestamp": 1}
    events = [[0.1, "o", one] for one in (many[0], *[many[1]] * 4, "\x1bcthe end")]
    content = "\n".join(json.dumps(one) for one in (header, *events))
    page = open_page(_terminal(site, content.encode()))
    page.locator(".ap-playback-button").click(timeout=60_000)
    expect(page.locator(".ap-player")).to_contain_text("the end", timeout=60_000)


def test_each_steps_diff_is_folded_below_the_step(site: Site, open_page: OpenPage) -> None:
    attempt = site.reports.attempt(site.night)
    steps = [
        {"source": "agent", "step_id": n, "message": f"step {n}", "timestamp": f"2026-01-01T00:0{n}:00+00:00"}
        for n in (1, 2)
    ]
    begun = datetime(2026, 1, 1, 0, 1, tzinfo=UTC).timestamp()
    entry = {"at": begun + 5, "diff": "diff --git a/one.py b/one.py\n+one <b>bold</b>\n"}
    site.reports.keep(site.night, "trajectory", json.dumps({"steps": steps}).encode())
    site.reports.keep(site.night, "step_diffs", json.dumps(entry).encode())
    with site.database.begin() as connection:
        values = {"id": attempt.id, "key": f"runs/{site.night}/{attempt.id}/step_diffs"}
        sql(connection, "INSERT INTO artifacts (attempt_id, kind, key) VALUES (:id, 'step_diffs', :key)", values)
    page = open_page(f"/attempts/{attempt.id}/trajectory")
    added = page.locator(".step.agent").first.locator(".added")
    expect(added).to_be_hidden()
    page.get_by_text("after this step: 1 file changed").click()
    expect(added).to_have_text("+one <b>bold</b>")


def _sampled(site: Site) -> str:
    """The path of an attempt whose memory and processors were sampled."""
    attempt = site.reports.attempt(site.night)
    rows = [[10, 100, 0.5], [20, 4000, 2.0], [30, 3000, 1.0]]
    samples = {"agent": {"since": time.time(), "rows": rows, "marks": [[15, "killed"]]}}
    with site.database.begin() as connection:
        statement = (
            "UPDATE attempts SET environment = environment || jsonb_build_object('samples', CAST(:samples AS jsonb)),"
            " finished_at = finished_at + interval '1 minute' WHERE id = :id"
        )
        sql(connection, statement, {"samples": json.dumps(samples), "id": attempt.id})
    return f"/attempts/{attempt.id}"


_PAINTED = """() => {
  const wanted = getComputedStyle(document.documentElement).getPropertyValue("--running").trim();
  const rgb = [1, 3, 5].map((at) => parseInt(wanted.slice(at, at + 2), 16));
  const canvas = document.querySelector("figure.chart canvas");
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const found = copy.getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let at = 0; at < found.length; at += 4) count += rgb.every((part, index) => found[at + index] === part);
  return count;
}"""


def test_memory_and_processors_are_charts_in_the_pages_colours(
    site: Site, open_page: OpenPage, screenshots: Path
) -> None:
    page = open_page(_sampled(site), viewport={"width": 390, "height": 800}, color_scheme="light")
    expect(page.locator("figure.chart .uplot canvas")).to_have_count(2)
    expect(page.get_by_role("img", name="Memory: at most 4000 MiB")).to_be_visible()
    assert page.evaluate(_PAINTED) > 0
    page.emulate_media(color_scheme="dark")
    eventually(lambda: page.evaluate(_PAINTED) > 0, within_s=10)
    page.set_viewport_size({"width": 800, "height": 800})
    eventually(lambda: page.evaluate("document.querySelector('.uplot').clientWidth") > 390, within_s=10)
    page.set_viewport_size({"width": 390, "height": 800})
    eventually(lambda: page.evaluate("document.documentElement.scrollWidth") <= 390, within_s=10)
    page.screenshot(path=screenshots / "charts.png", full_page=True)
    page.get_by_text("Memory in numbers").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("cell", name="4000.0")).to_be_visible()
    assert _faults(page) == []
    page.goto(site.url + f"/runs/{site.night}")
    assert page.evaluate("typeof uPlot") == "undefined", "a page without charts loads it"


def test_charts_are_numbers_without_script(site: Site, open_page: OpenPage) -> None:
    page = open_page(_sampled(site), java_script_enabled=False)
    page.get_by_text("Memory in numbers").click()
    expect(page.get_by_role("cell", name="4000.0")).to_be_visible()


def test_pages_work_without_script_and_by_keyboard(site: Site, open_page: OpenPage) -> None:
    page = open_page(f"/runs/{site.night}", java_script_enabled=False)
    page.get_by_label("Outcome").select_option("suspect")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("tbody").get_by_role("link", name="click-4")).to_be_visible()
    assert page.url.endswith("outcome=suspect&agent=&name=#tasks") or "outcome=suspect" in page.url
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()


def test_a_reader_sees_no_way_to_change_anything(site: Site, open_page: OpenPage) -> None:
    page = open_page("/", user="alice", scope=Scope.READ)
    expect(page.get_by_role("link", name="Submit")).to_have_count(0)
    expect(page.get_by_text("night")).to_have_count(0)
    other = open_page("/runs", user="bob", scope=Scope.SUBMIT)
    expect(other.get_by_role("link", name="Submit")).to_be_visible()


def test_a_run_is_submitted_and_cancelled_from_the_page(site: Site, open_page: OpenPage) -> None:
    page = open_page("/submit")
    page.get_by_label("Dataset").fill("no-such-dataset")
    page.get_by_label("Agent").fill("nop")
    with page.expect_response("**/submit") as refused:
        page.get_by_role("button", name="Submit").click()
    assert refused.value.status == 422
    expect(page.get_by_role("alert")).to_contain_text("no-such-dataset")
    page.get_by_label("Dataset").fill("demo")
    page.get_by_label("Name").fill("from the page")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("from the page")
    acts = (
        ("Pause", "full disk", "paused"),
        ("Resume", "", "resumed"),
        ("Cancel the run", "wrong dataset", "cancelled"),
    )
    for button, reason, done in acts:
        act = page.locator("form.act", has=page.get_by_role("button", name=button))
        if reason:
            act.get_by_placeholder("why").fill(reason)
        act.get_by_role("button").click()
        row = page.locator("h2:text-is('Done by users') + table").get_by_role("row").nth(1)
        expect(row).to_contain_text(f"run.{done}{reason}")
    expect(page.locator(".legend").first).to_contain_text("cancelled")
    page.goto(f"{site.url}/")
    page.get_by_label("Limit").fill(page.get_by_label("Limit").get_attribute("placeholder") or "")
    page.get_by_label("Capacity").fill("3")
    page.get_by_label("Why").fill("slow disk")
    page.get_by_role("button", name="Set").click()
    page.goto(f"{site.url}/actions")
    expect(page.get_by_role("row", name="image_builds:*")).to_contain_text("slow disk")


def test_the_first_page_loads_little_script(site: Site, chromium: Browser) -> None:
    context = chromium.new_context()
    page, sizes = context.new_page(), []
    page.on("requestfinished", lambda request: sizes.append((request.url, request.sizes()["responseBodySize"])))
    page.goto(site.link(f"/runs/{site.night}"))
    expect(page.locator("canvas.strip")).to_be_visible()  # drawn by the last of them
    script = sum(size for url, size in sizes if url.endswith(".js"))
    context.close()
    assert 0 < script <= 60_000, sizes
