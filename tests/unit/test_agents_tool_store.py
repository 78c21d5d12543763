"""Where bundles are kept: a folder that others may share by a link."""

from __future__ import annotations

from pathlib import Path

from app.agents.installation.once import ToolStore


def test_a_bundle_is_made_at_the_folders_own_path_whoever_comes_by_a_link(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    links = [tmp_path / name for name in ("one", "two")]
    for link in links:
        link.symlink_to(kept)
    made: list[Path] = []
    places = [ToolStore(link).ensure("tool", "abc", lambda place: made.append(place)) for link in links]
    assert places == [kept / "tool-abc"] * 2
    assert made == [kept / "tool-abc"], "programs of a virtual environment name its path: a link may be gone tomorrow"
