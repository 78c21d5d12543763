"""The rules of the datasets of rows, by name."""

from __future__ import annotations

from collections.abc import Mapping

from app.datasets.base import RowAdapter
from app.datasets.swebench import SweBenchRows

ADAPTERS: Mapping[str, RowAdapter] = {
    name: SweBenchRows(name)  # type: ignore[misc]
    for name in ("own", "swe-bench", "swe-rebench", "swe-bench-live")
}
