"""A build whose cached step was removed by somebody else meanwhile is done once more; what fails for itself is not."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import IO, Any, cast

import pytest

from app.environments.engine import Engine
from app.environments.image_store.building import Builder
from app.errors import ImageBuildFailed


class _Told(Builder):
    """Answers what it is told to, one answer a build; remembers how much of the context was left to read."""

    def answering(self, *answers: str | None) -> _Told:
        self.answers, self.contexts = list(answers), cast("list[bytes]", [])
        return self

    def _follow(self, params: dict[str, Any], context: IO[bytes], written: IO[str], deadline: float) -> str | None:
        self.contexts.append(context.read())
        return self.answers.pop(0)


def _builder(folder: Path, *answers: str | None) -> _Told:
    return _Told(cast(Engine, None), folder / "log").answering(*answers)


@pytest.mark.parametrize("said", ['unable to find image "sha256:bba1"', "No such image: sha256:bba1"])
def test_a_cached_step_that_was_removed_is_made_again_from_the_whole_context(tmp_path: Path, said: str) -> None:
    builder = _builder(tmp_path, said, None)
    builder.build("t", {}, io.BytesIO(b"context"), time.monotonic() + 10)
    assert builder.contexts == [b"context", b"context"]


def test_it_is_tried_twice_and_no_more(tmp_path: Path) -> None:
    lost = 'unable to find image "sha256:bba1"'
    with pytest.raises(ImageBuildFailed, match="unable to find"):
        _builder(tmp_path, lost, lost, None).build("t", {}, io.BytesIO(), time.monotonic() + 10)


def test_a_recipe_that_fails_is_not_tried_again(tmp_path: Path) -> None:
    builder = _builder(tmp_path, "The command '/bin/sh -c false' returned a non-zero code: 1", None)
    with pytest.raises(ImageBuildFailed, match="non-zero code"):
        builder.build("t", {}, io.BytesIO(), time.monotonic() + 10)
    assert len(builder.contexts) == 1
