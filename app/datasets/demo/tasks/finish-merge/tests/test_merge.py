"""Is the merge finished, and does it keep both sides?"""

import subprocess
import sys
from pathlib import Path

import pytest

APP = Path.cwd()


def git(*arguments):
    return subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments], cwd=APP, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture()
def total():
    space = {}
    exec((APP / "prices.py").read_text(), space)
    return space["total"]


def test_the_merge_commit_joins_both_tips():
    subjects = [git("log", "-1", "--format=%s", parent) for parent in git("log", "-1", "--format=%P").split()]
    assert subjects == ["Discounts", "VAT and receipts"]
    assert git("rev-parse", "HEAD^2") == git("rev-parse", "vat")
    assert git("rev-parse", "--abbrev-ref", "HEAD") == "main"


def test_nothing_is_left_over():
    assert git("status", "--porcelain", "--untracked-files=no") == ""
    assert not (APP / ".git" / "MERGE_HEAD").exists()
    for name in ("prices.py", "CHANGES.md"):
        assert not any(marker in (APP / name).read_text() for marker in ("<<<<<<<", "=======", ">>>>>>>"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 999),
        ({"discount_percent": 10}, 900),
        ({"vat_percent": 19}, 1188),
        ({"discount_percent": 10, "vat_percent": 19}, 1071),
        ({"discount_percent": 33, "vat_percent": 7}, 716),
    ],
)
def test_the_discount_comes_before_the_tax(total, options, expected):
    assert total([(333, 3)], **options) == expected


def test_the_receipt_works_unchanged():
    done = subprocess.run([sys.executable, "receipt.py", "100", "2", "50", "1"], cwd=APP, capture_output=True, text=True)
    assert done.stdout == "total 297 cents\n"
    assert git("diff", "--name-only", "vat", "HEAD", "--", "receipt.py") == ""


def test_the_changes_keep_both_entries_in_order():
    entries = [line for line in (APP / "CHANGES.md").read_text().splitlines() if line.startswith("- ")]
    assert entries == [
        "- A discount can be given on a total.",
        "- VAT can be added to a total.",
        "- Prices are whole cents.",
    ]
