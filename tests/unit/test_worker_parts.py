"""Small parts of the worker: how an attempt hears that it must stop, and how evidence is kept."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import zstandard

from app.agents.base import AgentReport
from app.artifacts import open_store
from app.artifacts.folder import FolderStore
from app.errors import EnvironmentOverLimit
from app.grading.base import Grade
from app.models.endings import EndReason
from app.models.outcome import AgentResult, ArtifactKind, Verdict
from app.settings import Settings
from app.workers import grader
from app.workers.attempt_context import AttemptProgress
from app.workers.evidence import Evidence
from app.workers.lease import StopToken
from app.workers.services import agent_options


def test_a_callback_is_called_once_when_told_to_stop_and_at_once_when_late() -> None:
    token, heard = StopToken(), []
    token.on_cancel(lambda: heard.append("early"))
    token.stop(EndReason.CANCELLED)
    token.stop(EndReason.LOST)
    token.on_cancel(lambda: heard.append("late"))
    assert heard == ["early", "late"]
    assert token.reason is EndReason.CANCELLED


def test_every_kind_of_evidence_is_stored_or_its_absence_explained(tmp_path: Path) -> None:
    evidence = Evidence()
    log = tmp_path / "agent.log"
    log.write_text("hello")
    evidence.of_agent(AgentReport(EndReason.SUBMITTED, log=log))
    evidence.patch(b"")
    stored = {a.kind: a for a in evidence.store(open_store(f"file://{tmp_path}/store"), "runs/r/t/1", redact=[])}
    assert set(stored) == set(ArtifactKind) - {ArtifactKind.HANDED_OVER, ArtifactKind.STEP_DIFFS}
    assert stored[ArtifactKind.AGENT_LOG].size_bytes == 5
    assert stored[ArtifactKind.PATCH].size_bytes == 0
    assert stored[ArtifactKind.TRAJECTORY].missing == "this agent called no model"
    assert stored[ArtifactKind.COMMAND_LOGS].missing == "the attempt did not get that far"
    assert stored[ArtifactKind.VERDICT].missing == "the attempt did not get that far"


def test_secrets_are_blotted_out_of_what_is_stored(tmp_path: Path) -> None:
    evidence = Evidence()
    evidence.grade(Grade(Verdict(reward=1.0, counts=True), report=b"key sk-123 leaked"))
    store = open_store(f"file://{tmp_path}/store")
    stored = {a.kind: a for a in evidence.store(store, "runs/r/t/1", redact=["sk-123"])}
    key = stored[ArtifactKind.TEST_REPORT].key
    assert key is not None
    assert store.get(key) == b"key [redacted] leaked"


def test_an_agents_own_files_are_kept_without_secrets_and_what_is_too_large_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.workers.evidence._MOST_FILES_BYTES", 1000)
    home = tmp_path / "home"
    (home / "state").mkdir(parents=True)
    (home / "state" / "session.jsonl").write_text("the key mf-123 was used")
    (home / "large.bin").write_bytes(b"x" * 2000)
    (home / os.fsdecode(b"odd\xff")).write_bytes(b"x" * 3000)
    (home / "link").symlink_to("/etc/passwd")
    evidence = Evidence()
    evidence.of_agent(AgentReport(EndReason.SUBMITTED, files=home))
    store = open_store(f"file://{tmp_path}/store")
    stored = {a.kind: a for a in evidence.store(store, "runs/r/t/1", redact=["mf-123"])}
    key = stored[ArtifactKind.AGENT_FILES].key
    assert key is not None
    with tarfile.open(fileobj=io.BytesIO(zstandard.decompress(store.get(key)))) as archive:
        found = {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
    assert found == {
        "state/session.jsonl": b"the key [redacted] was used",
        "LEFT-OUT.txt": b"large.bin: 2000 bytes\nodd?: 3000 bytes",
    }


@pytest.mark.parametrize("library", ["urllib", "httpx", "requests"])
def test_no_agent_is_sent_to_the_gateway_by_a_proxy(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of the libraries themselves, in a process with an agent's environment."""
    for name in ("NO_PROXY", "no_proxy", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://proxy.example.org:3128")
    monkeypatch.setenv("NO_PROXY", "inner.example.org")
    env = agent_options(Settings(home=tmp_path, gateway_url="http://gateway:8766")).process_env
    hosts = ["gateway:8766", "127.0.0.1:8766", "localhost:1", "inner.example.org", "elsewhere.example.org"]
    ways = {
        "urllib": "import urllib.request as r; by = lambda host: not r.proxy_bypass(host)",
        "httpx": "import httpx; c = httpx.Client()\n"
        "by = lambda host: c._transport_for_url(httpx.URL('http://' + host)) is not c._transport",
        "requests": "from requests.utils import get_environ_proxies as g; by = lambda host: bool(g('http://' + host))",
    }
    program = f"{ways[library]}\nprint(*(host for host in {hosts!r} if by(host)))"
    done = subprocess.run([sys.executable, "-c", program], env=dict(env), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["elsewhere.example.org"]


def test_no_proxy_for_anything_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    env = agent_options(Settings(home=tmp_path)).process_env
    assert env["NO_PROXY"] == env["no_proxy"] == "*"


def test_artifacts_are_stored_at_the_same_time_and_recorded_in_order(tmp_path: Path) -> None:
    class Meeting(FolderStore):
        together = threading.Barrier(2)

        def put(self, key: str, content: bytes) -> str:
            self.together.wait(20)  # would raise, if one came after the other
            return super().put(key, content)

    evidence = Evidence()
    evidence.patch(b"x")
    evidence.grade(Grade(Verdict(reward=1.0, counts=True), report=b"y"))
    evidence.terminal.begin("agent", "ls")
    found = evidence.store(Meeting(tmp_path), "runs/r/t/1", redact=[])
    assert [one.kind for one in found] == list(evidence.kinds)
    assert sum(one.key is not None for one in found) == 4


def test_a_submission_that_fills_the_disk_while_it_is_graded_apart_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def grade(progress: AttemptProgress) -> AttemptProgress:
        raise EnvironmentOverLimit("the environment was ended: it took more disk than it may")

    stored: list[AttemptProgress] = []
    monkeypatch.setattr(grader.grading, "grade", grade)
    monkeypatch.setattr(grader.attempt, "store", lambda progress: stored.append(progress) or progress)
    monkeypatch.setattr(grader.attempt, "record", lambda progress: progress.report.end_reason)
    context, claim = MagicMock(), MagicMock(result=AgentResult(end_reason=EndReason.SUBMITTED))
    context.claimed.spec.rewards, context.journal.shells = {}, []
    assert grader._grade(context, claim) == "submitted"
    [progress] = stored
    assert progress.grade is not None
    verdict = progress.grade.verdict
    assert (verdict.reward, verdict.counts) == (0.0, True)
    assert "more disk" in verdict.detail
