"""A toy framework (a shell script) run as every framework is, on the worker and in real environments: all endings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import SecretStr

from app.agents.base import AgentJob, AgentReport, ModelEndpoint
from app.agents.framework import AgentEnding, Ended, FrameworkBundle, FrameworkCommand, FrameworkPaths, Placement
from app.agents.running import FrameworkAgent
from app.environments import provider_for
from app.environments.contract import Environment
from app.environments.tools import tool_inside
from app.errors import AgentUnsuitable
from app.models.endings import EndReason
from app.models.model_calls import Dialect
from app.models.shell import Shell
from app.models.spec import EnvironmentKind, EnvironmentSpec, Limits, Resources
from app.settings import Settings
from app.workers.lease import StopToken
from tests.contract.environment_fixtures import CONTEXT, prepared_folder, tags_of
from tests.waiting import eventually

TOKEN = "mf-0123456789abcdef-secret"
LONG_S = 120.0
MEMORY_BYTES = 96 << 20

SCRIPT = """\
#!/bin/sh
say() { echo "$1"; echo "$1" >&2; }
case $1 in
ok) read -r first; say "heard $first"; echo "$TOY_KEY" | tee kept-key "$HOME_OF_TOY/key"; cat "$HOME_OF_TOY/given/it"
    echo "$PWD" >"$HOME_OF_TOY/where"; ln -s /etc/passwd "$HOME_OF_TOY/link"; echo fine >"$HOME_OF_TOY/result";;
code) say sorry; exit 7;;
crash) kill -SEGV $$;;
hang) trap 'echo told >"$HOME_OF_TOY/told"; exit 9' TERM
    setsid sh -c 'trap "" TERM HUP INT; echo $$ >"$1"; while :; do sleep 1; done' sh "$HOME_OF_TOY/grandchild" &
    while [ ! -s "$HOME_OF_TOY/grandchild" ]; do sleep 0.05; done
    say hanging; while :; do sleep 0.1; done;;
deaf) trap '' TERM; say hanging; while :; do sleep 1; done;;
pid) echo $$ >"$HOME_OF_TOY/pid"; say hanging; exec sleep 1000;;
memory) say hanging; exec tail -f -c +0 /dev/zero | tail -n 1;;
much) i=0; while [ $i -lt 100 ]; do head -c 1048575 /dev/zero | tr '\\0' x; echo; i=$((i+1)); done; echo the end;;
kills-itself) echo fine >"$HOME_OF_TOY/result"; sh -c 'kill -9 $PPID'; sleep 1000;;
says-killed) exit 137;;
says-interrupted) exit 130;;
hostile) cd "$HOME_OF_TOY"; echo fine >result; mkdir LEFT-OUT.txt; echo x >LEFT-OUT.txt/x
    head -c 73400320 /dev/zero >big
    i=0; while [ $i -lt 200 ]; do mkdir dddddddddddddddddddd && cd dddddddddddddddddddd || break; i=$((i+1)); done
    mkdir -p "$HOME_OF_TOY/shut"; echo x >"$HOME_OF_TOY/shut/in"; chmod 555 "$HOME_OF_TOY/shut";;
leaves) sleep 1000 >/dev/null 2>&1 & echo left;;
holds) sleep 1000 & echo left;;
esac
"""


@dataclass
class Toy:
    """Runs one scene of the script."""

    folder: Path
    scene: str
    placement: Placement = Placement.OUTSIDE
    needs_model: bool = True
    program: str = "bin/toy"
    unsuited: bool = False

    name: ClassVar[str] = "toy"
    version: ClassVar[str] = "1"
    dialect: ClassVar[Dialect] = Dialect.CHAT
    endings: ClassVar[dict[str, EndReason]] = {"fine": EndReason.SUBMITTED}

    def install(self) -> FrameworkBundle:
        return FrameworkBundle("toy", self.folder)

    def suits(self, shell: Shell) -> None:
        if self.unsuited:
            raise AgentUnsuitable("expected another C library")

    def command(self, job: AgentJob, place: FrameworkPaths) -> FrameworkCommand:
        return FrameworkCommand(
            (f"{place.tool}/{self.program}", self.scene),
            env={"TOY_KEY": TOKEN, "HOME_OF_TOY": place.home},
            files={"given/it": b"what was given\n"},
            stdin=f"{job.description}\nmore\n".encode(),
        )

    def ending(self, ended: Ended) -> AgentEnding:
        fine = (ended.home / "result").exists()
        reason = EndReason.SUBMITTED if fine else EndReason.AGENT_ERROR
        return AgentEnding(reason, f"code {ended.returncode}", steps=3, usage={"turns": 3.0})


@dataclass
class Stage:
    """Where a toy runs."""

    environment: Environment
    folder: Path
    scratch: Path
    inside: str | None  # where the environment sees the folder; None: the toy runs outside
    spec: EnvironmentSpec

    def toy(self, scene: str, **more: Any) -> Toy:
        return Toy(self.folder, scene, Placement.INSIDE if self.inside else Placement.OUTSIDE, **more)

    def job(self, limit_s: float, waited_s: Callable[[], float] = lambda: 0.0) -> AgentJob:
        return AgentJob(
            task_name="toy",
            description="a task",
            workdir=self.spec.workdir,
            limits=Limits(agent_timeout_s=limit_s),
            model=ModelEndpoint("http://engine.test/v1", "some-model", SecretStr(TOKEN)),
            solution=None,
            solution_files=None,
            scratch=self.scratch,
            model_inside_url="http://127.0.0.1:1/v1",
            tools_inside={"toy": self.inside} if self.inside else {},
            waited_s=waited_s,
        )

    def run(
        self,
        scene: str,
        *,
        limit_s: float = LONG_S,
        cancel: StopToken | None = None,
        waited_s: Callable[[], float] = lambda: 0.0,
        **more: Any,
    ) -> AgentReport:
        agent = FrameworkAgent(self.toy(scene, **more))
        return agent.run(self.job(limit_s, waited_s), self.environment, cancel or StopToken())

    def start(self, scene: str, **more: Any) -> Future[AgentReport]:
        """In the background; the scene runs when this returns."""
        running = ThreadPoolExecutor(1).submit(self.run, scene, **more)
        while not running.done() and b"hanging" not in self.seen:
            time.sleep(0.02)
        return running

    @property
    def seen(self) -> bytes:
        """What can be watched while it runs."""
        file = self.scratch / "agent.log"
        return file.read_bytes() if file.exists() else b""


WHERE = ("outside", "local", "docker", "oci")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"), installation="test-running")


@pytest.fixture(scope="module")
def bundle(settings: Settings) -> Path:
    folder = settings.home / "tools" / "toy-1"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "toy").write_text(SCRIPT)
    (folder / "bin" / "toy").chmod(0o755)
    return folder


@pytest.fixture(params=[pytest.param(one, marks=pytest.mark.docker if one in WHERE[2:] else ()) for one in WHERE])
def stage(request: pytest.FixtureRequest, settings: Settings, bundle: Path, tmp_path: Path) -> Iterator[Stage]:
    where = request.param
    if where in ("outside", "local"):
        kind, spec = EnvironmentKind.LOCAL, prepared_folder(request)
    else:
        kind = EnvironmentKind.DOCKER if where == "docker" else EnvironmentKind.OCI
        resources = Resources(memory_bytes=MEMORY_BYTES)
        spec = EnvironmentSpec(image=request.getfixturevalue("base_image_tag"), resources=resources)
    wanted = spec.model_copy(update={"tools": () if where == "outside" else ("toy",)})
    by = settings.model_copy(update={"container_runtime": "docker"}) if where == "docker" else settings
    provider = provider_for(kind, by, lambda _: CONTEXT, tools=lambda _: bundle)
    environment = provider.create(wanted, tags_of(settings.installation), timeout_s=60)
    inside = None if where == "outside" else tool_inside(kind, "toy", bundle)
    yield Stage(environment, bundle, tmp_path / "scratch", inside, spec)
    environment.destroy()


def files_of(report: AgentReport) -> dict[str, str]:
    assert report.files is not None
    return {
        str(file.relative_to(report.files)): file.read_text()
        for file in report.files.rglob("*")
        if file.is_file() and file.stat().st_size < 1 << 20
    }


# --- It ends by itself ----------------------------------------------------------------------------------------------


def test_a_good_end_brings_outputs_and_files_without_the_key(stage: Stage) -> None:
    report = stage.run("ok")
    assert (report.end_reason, report.detail, report.steps) == (EndReason.SUBMITTED, "code 0", 3)
    assert report.usage == {"turns": 3.0}
    assert report.log is not None
    said = report.log.read_text()
    assert said.count("heard a task") == 2, "both streams are in the log"
    assert (stage.scratch / "stderr").read_text() == "heard a task\n"
    assert "what was given" in (stage.scratch / "stdout").read_text()
    files = files_of(report)
    assert files["result"] == "fine\n"
    assert files["given/it"] == "what was given\n"
    assert "link" not in files
    assert len(files["key"]) == len(TOKEN) + 1
    for kept in (said, *files.values()):
        assert TOKEN not in kept
    if stage.inside:
        assert files["where"].strip().endswith(stage.spec.workdir)
        assert stage.environment.run("cat kept-key", timeout_s=20).ok, "it began in the task's folder"
        assert (
            stage.environment.run("git status --porcelain 2>/dev/null; ls -A", timeout_s=20).text().count("mega") == 0
        )


@pytest.mark.parametrize(("scene", "code"), [("code", 7), ("crash", -signal.SIGSEGV)])
def test_how_it_ends_by_itself_is_the_adapters_to_tell(stage: Stage, scene: str, code: int) -> None:
    report = stage.run(scene)
    assert (report.end_reason, report.detail) == (EndReason.AGENT_ERROR, f"code {int(code)}")


def test_what_holds_the_output_open_does_not_hold_us(stage: Stage) -> None:
    assert stage.run("holds", limit_s=60).detail == "code 0"


def test_what_it_leaves_lives_on_inside_and_never_outside(stage: Stage) -> None:
    before = stage.environment.stats().processes if stage.inside else len(sleepers())
    assert stage.run("leaves").detail == "code 0"
    after = stage.environment.stats().processes if stage.inside else len(sleepers())
    assert after == before + (1 if stage.inside else 0)


def sleepers() -> list[str]:
    """Processes of the scene `leaves` on this host."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if command.read_bytes() == b"sleep\x001000\x00":
                found.append(command.parent.name)
        except OSError:
            continue
    return found


# --- It is ended ----------------------------------------------------------------------------------------------------


def test_at_a_timeout_the_whole_tree_goes_and_its_files_come(stage: Stage) -> None:
    before = stage.environment.stats().processes
    report = stage.run("hang", limit_s=2.0)
    assert report.end_reason is EndReason.AGENT_TIMEOUT
    files = files_of(report)
    assert files["told"] == "told\n", "it was asked first"
    assert "hanging" in stage.seen.decode()
    if stage.inside:
        assert stage.environment.stats().processes == before
    else:
        assert not Path("/proc", files["grandchild"].strip()).exists()


def test_a_cancel_ends_it(stage: Stage) -> None:
    token = StopToken()
    running = stage.start("hang", cancel=token)
    before = len(stage.seen)
    token.stop(EndReason.CANCELLED)
    report = running.result(timeout=60)
    assert report.end_reason is EndReason.CANCELLED
    assert before > 0
    if not stage.inside:
        grandchild = (stage.scratch / "home" / "grandchild").read_text().strip()
        assert not Path("/proc", grandchild).exists()


def test_a_signal_of_somebody_else_is_infrastructure_outside_and_may_be_its_own_inside(stage: Stage) -> None:
    running = stage.start("pid")
    if stage.inside:
        stage.environment.run('kill -9 "$(cat "${PWD%/testbed}/var/tmp/megaflow-agent/home/pid")"', timeout_s=30)
    else:
        os.kill(int((stage.scratch / "home" / "pid").read_text()), signal.SIGKILL)
    report = running.result(timeout=60)
    reason = EndReason.AGENT_ERROR if stage.inside else EndReason.INFRASTRUCTURE
    assert (report.end_reason, "signal 9" in report.detail) == (reason, True)


@pytest.mark.parametrize("scene", ["kills-itself", "says-killed", "says-interrupted"])
def test_inside_no_agent_can_have_its_attempt_done_again(stage: Stage, scene: str) -> None:
    if not stage.inside:
        pytest.skip("outside its commands do not reach it")
    assert stage.run(scene).end_reason is EndReason.AGENT_ERROR


def test_of_a_worker_that_is_killed_nothing_lives_on(bundle: Path, tmp_path: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(bundle), str(tmp_path)], cwd=Path(__file__).parents[2])
    file = tmp_path / "scratch" / "home" / "grandchild"
    eventually(lambda: file.exists() and bool(file.read_text().strip()))
    grandchild = Path("/proc", file.read_text().strip())
    assert grandchild.exists()
    worker.kill()
    worker.wait()
    eventually(lambda: not grandchild.exists())


WORKER = """
import sys
from pathlib import Path
from tests.integration.test_running_frameworks import EnvironmentSpec, Stage
bundle, folder = map(Path, sys.argv[1:])
stage = Stage(None, bundle, folder / "scratch", None, EnvironmentSpec(image="none"))
stage.run("hang")
"""


def test_a_framework_that_took_all_memory_is_told_from_one_that_was_killed(stage: Stage) -> None:
    if stage.environment.describe()["kind"] == "local":
        pytest.skip("no limit of memory")
    report = stage.run("memory", program="bin/toy")
    assert (report.end_reason, "memory" in report.detail) == (EndReason.RESOURCE_LIMIT, True)


# --- It writes much -------------------------------------------------------------------------------------------------


def test_what_is_left_to_break_us_is_collected_all_the_same(stage: Stage) -> None:
    report = stage.run("hostile")
    assert report.end_reason is EndReason.SUBMITTED
    files = files_of(report)
    assert files["result"] == "fine\n"
    assert files["shut/in"] == "x\n"
    assert "big" in files["LEFT-OUT.txt"]


def test_when_all_processes_inside_are_killed_it_is_told_as_a_signal(stage: Stage) -> None:
    if stage.environment.describe()["kind"] == "local":
        pytest.skip("it would end this host's")
    running = stage.start("pid")
    stage.environment.run("kill -9 -1", timeout_s=30)
    report = running.result(timeout=60)
    assert report.end_reason is (EndReason.AGENT_ERROR if stage.inside else EndReason.INFRASTRUCTURE)
    assert stage.environment.run("true", timeout_s=30).ok
