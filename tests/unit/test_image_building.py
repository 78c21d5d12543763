"""A build whose cached step was removed by somebody else meanwhile is done once more; what fails for itself is not."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, cast

import pytest

from app.errors import ImageBuildFailed
from app.host.engine import Engine
from app.images import build_logs
from app.images.build import Builder
from app.images.build_limits import BuildLimits
from app.images.build_logs import BuildLog, BuildLogs
from app.models.spec import Resources
from app.settings import Settings


class _Told(Builder):
    """Answers what it is told to, one answer a build; remembers how much of the context was left to read."""

    def answering(self, *answers: str | None) -> _Told:
        self.answers, self.contexts = list(answers), cast("list[bytes]", [])
        return self

    def _follow(self, doing: str, params: dict[str, Any], context: IO[bytes], deadline: float) -> str | None:
        self.contexts.append(context.read())
        return self.answers.pop(0)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[BuildLog]:
    with closing(BuildLog(tmp_path / "log")) as found:
        yield found


def _builder(log: BuildLog, *answers: str | None) -> _Told:
    return _Told(cast(Engine, None), log, BuildLimits.of(Resources()), log.file.with_suffix(".turns")).answering(
        *answers
    )


@pytest.mark.parametrize("said", ['unable to find image "sha256:bba1"', "No such image: sha256:bba1"])
def test_a_cached_step_that_was_removed_is_made_again_from_the_whole_context(log: BuildLog, said: str) -> None:
    builder = _builder(log, said, None)
    builder.build("t", {}, io.BytesIO(b"context"), time.monotonic() + 10)
    assert builder.contexts == [b"context", b"context"]


def test_it_is_tried_twice_and_no_more(log: BuildLog) -> None:
    lost = 'unable to find image "sha256:bba1"'
    with pytest.raises(ImageBuildFailed, match="unable to find"):
        _builder(log, lost, lost, None).build("t", {}, io.BytesIO(), time.monotonic() + 10)


def test_a_recipe_that_fails_is_not_tried_again(log: BuildLog) -> None:
    builder = _builder(log, "The command '/bin/sh -c false' returned a non-zero code: 1", None)
    with pytest.raises(ImageBuildFailed, match="non-zero code"):
        builder.build("t", {}, io.BytesIO(), time.monotonic() + 10)
    assert len(builder.contexts) == 1


def test_a_build_may_take_what_its_task_may_and_what_compilers_need() -> None:
    small = BuildLimits.of(Resources(cpus=0.5, memory_bytes=64 << 20, pids=16, disk_bytes=64 << 20))
    assert small == BuildLimits(cpus=2.0, memory_bytes=2 << 30, pids=2048, disk_bytes=16 << 30)
    large = BuildLimits.of(Resources(cpus=8.0, memory_bytes=8 << 30, pids=9000, disk_bytes=99 << 30))
    assert large == BuildLimits(cpus=8.0, memory_bytes=8 << 30, pids=9000, disk_bytes=99 << 30)
    told = large.parameters
    assert (told["cpuquota"], told["cpuperiod"], told["memswap"]) == (800_000, 100_000, 8 << 30)
    assert json.loads(told["ulimits"]) == [{"Name": "core", "Soft": 0, "Hard": 0}]


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


def test_a_long_log_keeps_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_logs, "MOST_BYTES", 200)
    log = BuildLog(tmp_path / "log")
    for number in range(1000):
        log.write(f"line {number}\n")
        assert log.file.stat().st_size <= 200
    log.close()
    first, *_, last = (tmp_path / "log").read_text().splitlines()
    assert (first, last) == ("[... the beginning was left out ...]", "line 999")


def test_the_oldest_of_many_go(logs: BuildLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_logs, "KEEP", 3)
    files = [built(logs, TAG) for _ in range(5)]
    assert logs.files() == files[:1:-1]
    newest = built(logs, OTHER)
    assert logs.files() == [newest, files[4], files[3]]
