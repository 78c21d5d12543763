"""What a test command and the reader of its report agree upon."""

from __future__ import annotations

TESTS_AS_JSON = ">>>>> Tests as JSON"
"""Alone in a line of a test command's output; below the last of them stands `{"tests": [{"name": …, "status": …}]}`."""
