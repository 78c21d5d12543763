"""What a benchmark leaves: rows of one shape, and what machine they were measured on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import psutil

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("celery", "kombu", "psycopg", "sqlalchemy", "redis", "docker")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `holds` says whether it meets `goal`; both are None where nobody set one."""

    metric: str
    value: Any
    unit: str
    goal: float | None = None
    holds: bool | None = None


def row(
    metric: str, value: float, unit: str, *, goal: float | None = None, better: Literal["more", "less"] = "more"
) -> Row:
    """A rounded figure, held against its goal when it has one."""
    if goal is None:
        return Row(metric, _rounded(value), unit)
    return Row(metric, _rounded(value), unit, goal, value >= goal if better == "more" else value <= goal)


def machine(server_versions: dict[str, str]) -> Row:
    """Where this was measured. Host and user are left out: they say nothing about speed."""
    found = {
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        **server_versions,
    }
    return Row("machine", found, "")


def write(name: str, rows: Iterable[Row]) -> Path:
    """Write `results/<name>.json`; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps([asdict(item) for item in rows], indent=2) + "\n")
    return path


def _rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")
