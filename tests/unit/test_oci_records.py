"""Records of environments: what others may conclude from one that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.host.environment_records import Record, Records


@pytest.fixture
def records(tmp_path: Path) -> Records:
    found = Records(tmp_path)
    found.write(Record("a", {"megaflow": "mine"}, "x", "y", ("layer",)))
    return found


def test_what_a_newer_version_adds_is_passed_over(records: Records) -> None:
    file = records.place("a") / "record.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "colour": "red"}))
    (record,) = records.all()
    assert (record.installation, record.layers) == ("mine", ("layer",))


def test_a_record_that_cannot_be_read_now_is_not_taken_for_nobodys(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many_files(self: Path) -> bytes:
        raise OSError(24, "Too many open files", str(self))

    monkeypatch.setattr("app.host.environment_records._YOUNG_S", -1.0)
    monkeypatch.setattr(Path, "read_bytes", too_many_files)
    assert list(records.all()) == []
    with pytest.raises(OSError, match="Too many"):
        records.layers_in_use()
