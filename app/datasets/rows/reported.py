"""Test commands that print their own report as JSON: for datasets whose rows bring a parser as a program.

A row's program is never run on a host: it runs in the task's container, after the tests, and what it found is the last
thing that the command prints. The reports are read by `app.grading.dataset_reports`.
"""

from __future__ import annotations

import hashlib

from app.models.reports import TESTS_AS_JSON


def written(path: str, content: str) -> str:
    """The command that writes a file, whatever is in it."""
    end = f"END_{hashlib.sha256(content.encode('utf-8', 'replace')).hexdigest()[:24]}"
    line = "" if content.endswith("\n") else "\n"
    return f"cat >{path} <<'{end}'\n{content}{line}{end}"


def printed(path: str) -> str:
    """The command that prints a report, and leaves with the code that the one before left with."""
    return f"code=$?\necho\necho '{TESTS_AS_JSON}'\ncat {path}\nexit $code"
