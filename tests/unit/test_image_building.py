"""A build whose cached step was removed by somebody else meanwhile is done once more; what fails for itself is not."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, cast

import pytest

from app.errors import ImageBuildFailed
from app.host.engine import Engine
from app.images.build import Builder
from app.images.build_limits import BuildLimits
from app.images.build_logs import BuildLog
from app.models.spec import Resources


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
