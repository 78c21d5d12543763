"""Logs of builds: bounded while they are written, one for each build, found by what people call them, removed."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app.errors import UnknownName
from app.images import build_logs
from app.images.build_logs import BuildLog, BuildLogs
from app.settings import Settings

TAG = "megaflow/task:" + "ab" * 12
OTHER = "megaflow/task:" + "cd" * 12


@pytest.fixture
def logs(tmp_path: Path) -> BuildLogs:
    return BuildLogs(Settings(home=tmp_path))


def built(logs: BuildLogs, tag: str, *said: str) -> Path:
    with logs.begun(tag) as log:
        for text in said:
            log.write(text)
    return log.file


def test_a_log_keeps_its_beginning_and_its_end_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_logs, "HEAD_BYTES", 100)
    monkeypatch.setattr(build_logs, "TAIL_BYTES", 200)
    log = BuildLog(tmp_path / "log")
    whole = b""
    for number in range(1000):
        line = f"line {number}\n"
        log.write(line)
        whole += line.encode()
        assert log.file.stat().st_size < 100 + 3 * 200 + 100
    log.close()
    head, gap, tail = (tmp_path / "log").read_bytes().partition(b"\n[... ")
    missing, _, tail = tail.partition(b" bytes left out ...]\n")
    assert gap
    assert head == whole[:100]
    assert whole.endswith(tail)
    assert len(tail) >= 200
    assert int(missing) == len(whole) - len(head) - len(tail)


def test_a_log_is_found_by_the_image_its_beginning_or_its_own_name(logs: BuildLogs) -> None:
    older = built(logs, TAG)
    newer = built(logs, TAG)
    built(logs, OTHER)
    assert {logs.of(name) for name in (TAG, "ab" * 12, "abab")} == {newer}
    assert logs.of(older.stem) == older
    for name in ("ab", "abac", ""):
        with pytest.raises(UnknownName, match=f"unknown build log '{name}'; known: {'ab' * 12}, {'cd' * 12}"):
            logs.of(name)


def test_the_old_and_the_many_go(logs: BuildLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_logs, "KEEP", 3)
    files = [built(logs, TAG) for _ in range(5)]
    assert logs.files() == files[:1:-1]
    folder = files[0].parent
    past = datetime.now(UTC) - timedelta(seconds=build_logs.KEEP_S + 60)
    old = files[-1].rename(folder / f"{'ab' * 12}.{past:%Y%m%d-%H%M%S-%f}.log")
    odd = folder / "megaflow-task-abc.log"
    odd.write_text("from before logs had a time")
    os.utime(odd, (time.time(), time.time()))
    newest = built(logs, OTHER)
    assert logs.files() == [newest, files[3], files[2]]
    assert not old.exists()
    assert not odd.exists()
