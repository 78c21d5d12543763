"""How many processes were refused: as either version of control groups counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.host.pids_watch import PidsWatch


def _group(folder: Path, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "pids.events").write_text(content)
    return folder


def test_what_all_its_groups_have_refused_is_added_up_and_followed(tmp_path: Path) -> None:
    own = _group(tmp_path / "own", "max 0\n")
    watch = PidsWatch([own, own / "nested"])
    assert watch.refused() == 0
    _group(own, "max 3\n")
    _group(own / "nested", "max 4\n")
    assert watch.refused() == 7


@pytest.mark.parametrize("content", ["", "max\n", "max many\n", "low 3\n"])
def test_where_nobody_counts_there_is_no_number(tmp_path: Path, content: str) -> None:
    assert PidsWatch([_group(tmp_path, content)]).refused() is None
    assert PidsWatch([tmp_path / "nowhere"]).refused() is None
    assert PidsWatch().refused() is None
