"""The documents: links lead to files, and what is generated is fresh."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    file
    for pattern in ("*.md", "docs/**/*.md", "app/**/*.md", "bench/**/*.md")
    for file in ROOT.glob(pattern)
    if "datasets/demo/tasks" not in file.as_posix()
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_links_lead_to_files(document: Path) -> None:
    targets = [link.partition("#")[0] for link in _LINK.findall(document.read_text()) if "://" not in link]
    assert [one for one in targets if one and not (document.parent / one).exists()] == []


def test_the_reference_is_fresh() -> None:
    command = [sys.executable, "scripts/reference.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
