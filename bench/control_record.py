"""What the control plane's benchmark keeps: one file, a part of which is replaced when that part runs again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import record
from bench.record import Row


@dataclass(frozen=True, slots=True)
class Part:
    """One part's figures, what they were made of, and the versions of what it ran on."""

    rows: list[Row]
    samples: Mapping[str, Any]
    """Anything that JSON or a dataclass can hold: the plots are made of it, and of nothing else."""
    versions: dict[str, str] = field(default_factory=dict)


def keep(path: Path, name: str, part: Part, *, busy: float, took_s: float) -> None:
    """Put the part into the file, in place of its earlier self. `busy`: share of the processors that others used."""
    whole = load(path)
    whole[name] = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": record.machine(part.versions).value,
        "processors_busy_before": round(busy, 3),
        "took_s": round(took_s, 1),
        "rows": [asdict(item) for item in part.rows],
        "samples": _plain(part.samples),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")


def load(path: Path) -> dict[str, Any]:
    """Every part that was kept, by name."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _plain(value: Any) -> Any:
    """Dataclasses as objects, floats with four significant digits: more would be noise."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
