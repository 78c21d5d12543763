"""The documents: links lead to files, and what is generated is fresh."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import standing
from bench.record import RESULTS

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


def test_the_two_maps_of_files_agree_and_name_files_that_exist() -> None:
    agents, contributing = ((ROOT / name).read_text().splitlines() for name in ("AGENTS.md", "CONTRIBUTING.md"))
    rows = [line for line in agents if line.startswith("| ")]
    named = re.findall(r"`((?:app|migrations)/[^`]*)`", "\n".join(rows))
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists()] == []
    ten = [line for line in contributing if line.startswith("| Wh")]
    assert len(ten) == 10
    assert set(ten) <= set(rows)


def test_the_reference_is_fresh() -> None:
    command = [sys.executable, "scripts/reference.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_the_page_of_goals_says_what_the_results_beside_it_say() -> None:
    assert (RESULTS / standing.PAGE).read_text() == standing.page(RESULTS), "run `python -m bench.standing`"


_KIND = re.compile(r"""(?:Fact\(|SELECT |kind = |EndReason\.[A-Z]+: )["']((?:task|attempt|audit|run)\.[a-z_]+)["']""")
_BY_PEOPLE = {"run.paused", "run.resumed", "run.budget_set"}


def test_operations_names_every_kind_of_event() -> None:
    code = "\n".join(file.read_text() for part in ("ledger", "scheduling") for file in ROOT.glob(f"app/{part}/*.py"))
    kinds = {*_KIND.findall(code)} - _BY_PEOPLE
    assert {"task.added", "task.expired", "attempt.grading_put_back", "audit.cleared"} <= kinds
    said = (ROOT / "docs/howto/operations.md").read_text()
    assert [kind for kind in sorted(kinds) if f"`{kind}`" not in said] == []


def _reference() -> dict[str, str]:
    """Every command of the reference, with what is said of it."""
    parts = re.split(r"^## `megaflow ([a-z -]+)`$", (ROOT / "docs/reference/cli.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


_COMMAND = re.compile(r"(?:^|[`(/ ])megaflow ([a-z][a-z-]*)((?: [^ `\n#|&>]+)*)", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`|^```sh\n.*?^```", re.MULTILINE | re.DOTALL)


def _exists(reference: dict[str, str], name: str, words: list[str]) -> bool:
    """Whether there is such a command, or subcommand, with these options."""
    is_group = any(one.startswith(f"{name} ") for one in reference)
    if is_group and words and re.fullmatch("[a-z-]+", words[0]) and not words[0].startswith("-"):
        name = f"{name} {words[0]}"
    options = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--help"]
    return name in reference and all(f"`{one}" in reference[name] for one in options)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_commands_and_options_that_are_named_exist(document: Path) -> None:
    if document.name == "CHANGELOG.md":
        pytest.skip("it names what there was")
    reference = _reference()
    found = [each for code in _CODE.findall(document.read_text()) for each in _COMMAND.findall(code)]
    assert [f"megaflow {name}{rest}" for name, rest in found if not _exists(reference, name, rest.split())] == []
