"""Defines the report format shared by test commands and the reader of their reports."""

from __future__ import annotations

TESTS_AS_JSON = ">>>>> Tests as JSON"
"""Marker line in a test command's output. After the last marker follows `{"tests": [{"name": …, "status": …}]}`."""
