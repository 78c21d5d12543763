"""A producer and commands that reach an installation through its web server alone."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from app.client import MegaFlow, as_completed
from app.errors import (
    IdempotencyConflict,
    MegaFlowError,
    NotAllowed,
    NotRemote,
    NotSignedIn,
    OptionInvalid,
    QuotaExceeded,
    ServerUnavailable,
    SettingsInvalid,
    SpecInvalid,
    UnknownName,
    WaitTimeout,
)
from app.evaluation import Submission
from app.ledger import quotas, results, tasks, users
from app.ledger.users import Scope
from app.models.groups import Adaptive
from app.models.spec import EnvironmentKind, ModelChoice
from app.models.states import TaskState
from app.remote import RemoteInstallation
from app.settings import Settings
from tests.building import a_task, accepted
from tests.integration.command import CommandLine
from tests.integration.remote_fixture import NOWHERE, LosesAnswers, Site, site
from tests.integration.test_reports import NIGHT, Reports, reports
from tests.waiting import eventually, in_background

__all__ = ["reports", "site"]


def away(site: Site, token: str = "") -> Settings:
    """A client's settings, which name the server and no database that answers."""
    return Settings(home=site.settings.home, database_url=NOWHERE, server=site.url, token=token or site.token())


@pytest.fixture
def flow(site: Site) -> Iterator[MegaFlow]:
    with site.client() as found:
        yield found


# --- The Python client ----------------------------------------------------------------------------------------------


def test_a_producer_without_a_database_does_all_that_one_with_it_does(site: Site, flow: MegaFlow) -> None:
    handle = flow.enqueue(a_task("alone"), agent="nop", idempotency_key="k")
    assert flow.enqueue(a_task("alone"), agent="nop", idempotency_key="k").task_id == handle.task_id
    run = flow.enqueue_many([a_task("a"), a_task("b")], agent="nop", replicas=2, name="pair", priority=3)
    assert [one.name for one in run.handles] == ["a", "a", "b", "b"]
    assert (run.status().name, run.status().total, run.status().states) == ("pair", 4, {"pending": 4})
    assert run.handles[0].status() is TaskState.PENDING
    again = flow.run(run.id)
    assert [one.task_id for one in again.handles] == [one.task_id for one in run.handles]
    with pytest.raises(WaitTimeout):
        run.handles[0].result(timeout=0.2)
    run.handles[0].cancel()
    assert flow.wait_any([one.task_id for one in run.handles], 10) == [run.handles[0].task_id]
    assert flow.retry([run.handles[0].task_id]) == [run.handles[0].task_id]
    run.cancel()
    found = run.results(timeout=20)
    assert found == results.results(site.database, [one.task_id for one in run.handles])
    assert {one.task_id for one in as_completed(run.handles, 10)} == {one.task_id for one in run.handles}
    assert flow.wait_any([]) == []
    assert f"{site.url}/runs/{run.id}" in run._repr_html_()


def test_a_dataset_and_a_training_run_are_submitted_by_the_server(site: Site, flow: MegaFlow) -> None:
    run = flow.submit(Submission(dataset="demo", agent="nop", environment=EnvironmentKind.LOCAL, name="all"))
    assert len(run.handles) == run.status().total > 1
    training = flow.enqueue_many([a_task()], agent="nop", purpose="training", replicas=Adaptive(2, 4))
    assert (len(training.handles), flow.status(training.id).purpose) == (2, "training")


def test_what_the_server_refuses_is_raised_by_its_name(site: Site, flow: MegaFlow) -> None:
    with pytest.raises(UnknownName, match="did you mean nop"):
        flow.enqueue(a_task(), agent="nob")
    with pytest.raises(OptionInvalid, match="needs a model"):
        flow.enqueue(a_task(), agent="mini-swe-agent")
    with pytest.raises(SpecInvalid, match="nothing was"):
        flow.enqueue_many([], agent="nop")
    flow.enqueue(a_task("x"), agent="nop", idempotency_key="one")
    with pytest.raises(IdempotencyConflict):
        flow.enqueue(a_task("y"), agent="nop", idempotency_key="one")
    with pytest.raises(OptionInvalid, match="position"):
        list(flow.events("nonsense"))
    quotas.set_quota(site.database, "bob", pending=1)
    with site.client("bob", Scope.SUBMIT) as bob:
        begun = time.monotonic()
        with pytest.raises(QuotaExceeded):
            bob.enqueue_many([a_task("a"), a_task("b")], agent="nop")
        assert time.monotonic() - begun < 20  # and it was not asked again for a minute
        with pytest.raises(UnknownName):
            bob.status(flow.enqueue(a_task(), agent="nop").run_id)
        with pytest.raises(NotAllowed):
            bob.installation.set_limit("image_builds", 1)
    with site.client("carol", Scope.READ) as carol, pytest.raises(NotAllowed, match="submit"):
        carol.enqueue(a_task(), agent="nop")
    with MegaFlow(flow.settings, server=site.url, token="mf_wrong") as stranger, pytest.raises(NotSignedIn):
        stranger.status(flow.enqueue(a_task(), agent="nop").run_id)


def test_what_has_no_remote_form_says_so(flow: MegaFlow) -> None:
    run = flow.enqueue_many([a_task()], agent="nop")
    submission = Submission(dataset="demo", agent="nop")
    for call in (
        lambda: flow.database,
        lambda: flow.experience(run, policy="p", consumer="c"),
        lambda: flow.check_model("m"),
        lambda: flow.trial(submission),
        lambda: flow.submit(submission.model_copy(update={"model": ModelChoice(name="m")}), check=flow.check_model),
    ):
        with pytest.raises(NotRemote, match="server http"):
            call()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://u:p@h:1", "http://h:1/path", "http://h:x", "h:1"])
def test_a_url_that_is_no_server_is_refused_at_once(url: str, settings: Settings) -> None:
    with pytest.raises(SettingsInvalid):
        MegaFlow(settings, server=url, token="t")
    with pytest.raises(NotSignedIn):
        MegaFlow(settings, server="http://127.0.0.1:1")


# --- A server that goes away ----------------------------------------------------------------------------------------


def test_a_lost_answer_submits_once(site: Site) -> None:
    with closing(LosesAnswers(site.port, 2)) as between, site.client(url=between.url) as flow:
        run = flow.enqueue_many([a_task("a"), a_task("b")], agent="nop")
        assert between.requests >= 3  # more on a busy machine
        assert [one.id for one in flow.installation.runs(10)] == [run.id]
        between.requests = 0
        with pytest.raises(ServerUnavailable):
            flow.retry([run.handles[0].task_id])  # asking twice would say something else
        assert between.requests == 1


def test_a_wait_outlives_a_killed_server(site: Site, flow: MegaFlow) -> None:
    run = flow.enqueue_many([a_task("a"), a_task("b")], agent="nop")
    site.end()
    site.start_process()
    ended: list[str] = []
    begun = threading.Event()

    def watch(_stop: threading.Event) -> None:
        begun.set()
        ended.extend(handle.name for handle in as_completed(run.handles, 90))

    with in_background(watch):
        begun.wait(5)
        time.sleep(0.5)
        site.end()
        tasks.cancel(site.database, [run.handles[1].task_id])  # while the server is away
        site.start_process()
        eventually(lambda: ended == ["b"])
        tasks.cancel(site.database, [run.handles[0].task_id])
        eventually(lambda: len(ended) == 2)
    assert ended == ["b", "a"]


def test_events_go_on_where_a_killed_server_left_them(site: Site, flow: MegaFlow) -> None:
    run = accepted(site.database, 3)
    site.end()
    site.start_process()
    stop, found, outages = threading.Event(), [], []
    asked = {"follow": True, "kinds": ("task.cancel_requested",), "run_id": run.run_id, "stop": stop}
    with in_background(lambda _stop: found.extend(flow.events("now", outage=outages.append, **asked))):
        time.sleep(1.5)  # connected, and nothing has come yet
        for number, task_id in enumerate(run.task_ids):
            if number % 2:
                site.end()
            tasks.cancel(site.database, [task_id])
            if number % 2:
                site.start_process()
            eventually(lambda wanted=number + 1: len(found) == wanted)
        begun = time.monotonic()
        stop.set()
    assert time.monotonic() - begun < 5
    assert [one.event.task_id for one in found] == list(run.task_ids)
    assert outages
    whole = list(flow.events("start", run_id=run.run_id))
    with MegaFlow(site.settings, site.database) as local:
        assert whole == list(local.events("start", run_id=run.run_id))
    assert list(flow.events(whole[2].position, run_id=run.run_id)) == whole[3:]


def test_a_server_that_stays_away_is_an_error_in_bounded_time(site: Site, flow: MegaFlow) -> None:
    run = flow.enqueue_many([a_task()], agent="nop")
    assert isinstance(flow.installation, RemoteInstallation)
    flow.installation.server.patience_s = 0.5
    site.end()
    for call in (
        lambda: flow.wait_any([run.handles[0].task_id], 30),
        lambda: next(flow.events("start", follow=True)),
        lambda: flow.enqueue(a_task(), agent="nop"),
    ):
        with pytest.raises(ServerUnavailable, match="megaflow up"):
            call()


# --- Commands -------------------------------------------------------------------------------------------------------


COMMANDS = (
    "runs --json", "runs --limit 1", "status night --json", "status night", "show night/click-1 --json",
    "show night/click-4", "logs night/click-1", "artifacts night/click-1", "report night --allow-loss --json",
    "report night --allow-loss", "compare night other --json", "compare night other --power 0.1", "compare night no",
    "explain night/click-1 --json", "explain night --json", "usage --json", "usage night", "usage --by user",
    "limits --json", "events", "events --kind attempt.", "limits set model_requests:user:bob 7", "status nonsense",
    "show night", "pause night --reason x --json", "pause night", "cancel night", "report night", "limits set x 1",
    "show click-1#7", "artifacts other/click-5 --json", "retry other --failed", "diagnose night",
    "diagnose other --json", "quota set bob --running 3", "quota set bob --running nine", "quota", "quota --json",
    "quota clear carol", "schedule list", "schedule list --json", "schedule remove hourly",
    "schedule add nightly often demo -a nop", "schedule add weekly '0 3 * * 1' demo -a nop --limit 1",
)  # fmt: skip


def test_commands_print_the_same_through_a_server(
    site: Site, reports: Reports, megaflow: CommandLine, tmp_path: Path
) -> None:
    reports.run("night", NIGHT)
    reports.run("other", NIGHT, version="2")
    remote = away(site)

    def said(settings: Settings, *words: object) -> tuple[str, ...]:
        megaflow.use(settings)
        try:
            return ("", _timeless(megaflow(*words)))
        except (MegaFlowError, SystemExit) as error:
            return (type(error).__name__, str(error), megaflow.last.output)

    for command in (
        "pause night --reason x",
        "limits set model_tokens:user:bob 7",
        "limits clear model_tokens:user:bob",
        "quota set a/b --pending 2",
        "quota clear a/b",
        "quota set carol --pending 2",
        "quota clear carol",
        "schedule add daily '0 3 * * *' demo -a nop --limit 1",
        "schedule add weekly '0 3 * * 1' demo -a nop --limit 1",
        "schedule remove daily --reason 'too dear'",
    ):
        assert said(remote, *shlex.split(command))[0] == "", command
    trail = {one.action: one.reason for one in users.actions(site.database)}
    assert trail["schedule.removed"] == "too dear"
    assert {"quota.cleared", "schedule.added"} <= set(trail)
    for command in COMMANDS:
        here, there = (said(settings, *shlex.split(command)) for settings in (site.settings, remote))
        if command == "retry other --failed":
            assert "1 task(s) back" in here[1]
            continue
        assert _elsewhere(there) == _elsewhere(here), command
    assert "resumed" in said(remote, "resume", "night")[1]
    said(remote, "artifacts", "night/click-1", "--get", tmp_path / "got")
    assert '"key": ' in said(remote, "artifacts", "night/click-1", "--json", "--get", tmp_path / "got")[1]
    assert (tmp_path / "got/1/patch").read_bytes().startswith(b"--- a/x")


def _elsewhere(said: tuple[str, ...]) -> tuple[str, ...]:
    """Without where the evidence is, which a server shows on its pages."""
    return tuple(re.sub(r"evidence: \S+", "evidence:", one) for one in said)


def _timeless(text: str) -> str:
    return re.sub(r"[0-9.]+s ago|\d+m\d+s ago|\"seconds\": [0-9.]+", "…", text)


@pytest.mark.extra
def test_exports_are_the_same_files_through_a_server(site: Site, reports: Reports, tmp_path: Path) -> None:
    reports.run("night", NIGHT)
    for form in ("predictions", "csv", "harbor"):
        told = []
        for name, server in (("ours", True), ("theirs", False)):
            done = site.command("export", "night", "--format", form, "--to", tmp_path / f"{name}-{form}", server=server)
            assert done.returncode == 0, done.stderr
            told.append(done.stdout.replace("ours-", "").replace("theirs-", ""))
        assert told[0] == told[1]
        ours, theirs = (_files(tmp_path / f"{name}-{form}") for name in ("ours", "theirs"))
        assert ours.keys() == theirs.keys()
        if form != "harbor":
            assert ours == theirs
    refused = site.command("export", "night", "--format", "csv", "--to", tmp_path / "ours-csv")
    assert (refused.returncode, "exist" in refused.stderr) == (65, True)


def _files(place: Path) -> dict[str, bytes]:
    if place.is_file():
        return {"": place.read_bytes()}
    return {str(one.relative_to(place)): one.read_bytes() for one in place.rglob("*") if one.is_file()}


def test_a_run_is_submitted_watched_and_ended_by_commands(site: Site, megaflow: CommandLine) -> None:
    token = site.token("alice", Scope.ADMINISTER)
    made = site.command("submit", "demo", "-a", "nop", "--environment", "local", "--json", token=token)
    assert made.returncode == 0, made.stderr
    run = json.loads(made.stdout)
    assert run["page"] == f"{site.url}/runs/{run['run_id']}"
    megaflow.use(away(site, token))
    assert megaflow.json("runs")[0]["user_name"] == "alice"
    assert f"asked {len(run['tasks'])} task(s) to end" in megaflow("cancel", run["run_id"])
    watched = megaflow.json("status", run["run_id"], "--watch")
    assert watched["runs"][0]["states"] == {"cancelled": len(run["tasks"])}
    assert f"{len(run['tasks'])} task(s) back in line" in megaflow("retry", run["run_id"], "--cancelled")
    megaflow.use(away(site, site.token("bob", Scope.SUBMIT)))
    with pytest.raises(MegaFlowError, match="only administrators"):
        megaflow("submit", "/etc", "-a", "nop")


def test_a_command_without_a_remote_form_says_so_in_one_line(site: Site) -> None:
    done = site.command("users", "list")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (64, "", 1), done.stderr
    assert "`megaflow users` has no form for a server" in done.stderr


def test_the_settings_name_the_server_too(site: Site) -> None:
    accepted(site.database, 1)
    variables = {
        "MEGAFLOW_SERVER": site.url,
        "MEGAFLOW_TOKEN": site.token(),
        "MEGAFLOW_DATABASE_URL": "postgresql://x@127.0.0.1:1/x",
    }

    def said(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "megaflow", *words]
        return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=60)

    done = said("runs", "--json")
    assert (done.returncode, len(json.loads(done.stdout))) == (0, 1), done.stderr
    refused = said("up")
    assert (refused.returncode, "the variable MEGAFLOW_SERVER" in refused.stderr) == (64, True)


def test_no_process_of_an_installation_gets_a_clients_settings() -> None:
    variables = Settings(server="http://127.0.0.1:1", token="secret").variables()
    assert not {"MEGAFLOW_SERVER", "MEGAFLOW_TOKEN"} & variables.keys()
