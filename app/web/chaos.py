"""Reads the report of this user's last `make chaos`, which tests/chaos/report.py writes."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ValidationError


class ChaosCase(BaseModel):
    """The result of one case."""

    case: str
    about: str
    tasks: int
    ok: int
    lost: int
    duplicated: int
    unexpected: int
    recovered: int
    faults: int
    notes: list[str]


class ChaosReport(BaseModel):
    """A run of the suite."""

    at: datetime
    took_s: float
    cases: list[ChaosCase]


def file_of(home: Path) -> Path:
    """Returns the path of the report."""
    return home / "chaos.json"


def read(home: Path) -> ChaosReport | str:
    """Returns the newest report, or the reason why there is none."""
    try:
        return ChaosReport.model_validate_json(file_of(home).read_bytes())
    except FileNotFoundError:
        return "`make chaos` has left no report in this home"
    except (OSError, ValidationError):
        return f"expected a report of `make chaos` as {file_of(home).name} in the home, found something else"
