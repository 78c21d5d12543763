"""What makes environments quick is brought once, on a home that does not exist yet, and what is missing is said."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from app.settings import Settings
from app.stack import packages, tools


def test_what_is_missing_is_brought_once_and_named_when_it_cannot_be(
    home_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def refuse(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 100)

    monkeypatch.setattr(tools, "PACKAGES", {"no-such-program": ("no-such-package",)})
    monkeypatch.setattr(packages.subprocess, "run", refuse)
    monkeypatch.setattr(tools.shutil, "which", lambda name: None if name == "no-such-program" else f"/usr/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    settings, said = Settings(home=home_folder), list[str]()
    assert tools.ensure_tools(settings, may_install=True, report=said.append) == ("no-such-program",)
    assert [command[1] for command in calls] == ["install", "update", "install"]
    assert "no-such-package" in said[0]
    tools.ensure_tools(settings, may_install=True, report=said.append)
    assert len(calls) == 3, "an index that is out of reach is not asked at every start"
