"""Memory and processors of an attempt's environments as lines below its timeline, drawn from the recorded samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

HEIGHT = 40.0
_MOST_ROWS = 8000
_HEADROOM = 1.1


@dataclass(frozen=True, slots=True)
class UsageMark:
    """When a limit was met, in units of the drawing."""

    x: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class UsageLine:
    """One of the two drawings. lines: the points of a polyline for each environment. limit_y: of the dashed line."""

    name: str
    caption: str
    lines: tuple[str, ...]
    limit_y: float | None
    marks: tuple[UsageMark, ...]


@dataclass(frozen=True, slots=True)
class _Samples:
    """Of one environment, in seconds since the timeline's begin: (second, MiB, processors), and marks."""

    rows: Sequence[tuple[float, float | None, float | None]]
    marks: Sequence[tuple[float, str]]


class _Quantity(NamedTuple):
    name: str
    column: int  # of a row
    unit: str
    limit: float | None
    mark: str
    met: str  # what a mark says


def usage_lines(environment: Mapping[str, Any], begin_s: float, scale: float, width: float) -> list[UsageLine]:
    """Of what an attempt has recorded of its environments; none where nothing was sampled.

    begin_s: the timeline's, since 1970. scale: units of the drawing for a second.
    """
    found = environment.get("samples")
    samples = [_read(one, begin_s) for one in found.values()] if isinstance(found, Mapping) else []
    memory_bytes = _number(mapping_of(environment.get("memory")).get("limit_bytes"))
    memory = None if memory_bytes is None else memory_bytes / (1 << 20)
    cpus = _number(mapping_of(environment.get("cpu")).get("limit"))
    quantities = (
        _Quantity("Memory", 1, "MiB", memory, "killed", "killed for memory"),
        _Quantity("Processors", 2, "in use", cpus, "throttled", "held up by its limit"),
    )
    drawn = (_line(one, samples, scale, width) for one in quantities)
    return [one for one in drawn if one is not None]


def _line(quantity: _Quantity, samples: Sequence[_Samples], scale: float, width: float) -> UsageLine | None:
    several = [[(row[0], value) for row in one.rows if (value := row[quantity.column]) is not None] for one in samples]
    most = max((value for points in several for _, value in points), default=None)
    if most is None:
        return None
    limit = quantity.limit
    top = _HEADROOM * max(most, limit or 0.0, 0.001)

    def x(second: float) -> float:
        return round(min(max(0.0, second * scale), width), 1)

    def y(value: float) -> float:
        return round(HEIGHT * (1 - value / top), 1)

    lines = tuple(" ".join(f"{x(second)},{y(value)}" for second, value in points) for points in several)
    met = [second for one in samples for second, kind in one.marks if kind == quantity.mark]
    caption = f"{quantity.name}: at most {most:g} {quantity.unit}, " + (
        "no known limit" if limit is None else f"limit {limit:g}"
    )
    return UsageLine(
        quantity.name,
        f"{caption}; {len(met)} times {quantity.met}" if met else caption,
        lines,
        None if limit is None else y(limit),
        tuple(UsageMark(x(second), quantity.mark, quantity.met) for second in met),
    )


def _read(one: Any, begin_s: float) -> _Samples:
    """Whatever else is there is left out."""
    found = mapping_of(one)
    offset_s = (_number(found.get("since")) or 0.0) - begin_s
    rows = [
        (second + offset_s, memory, cores)
        for second, memory, cores in _numbers(found.get("rows"))
        if second is not None
    ]
    marks = [
        (float(mark[0]) + offset_s, str(mark[1]))
        for mark in _list(found.get("marks"))
        if isinstance(mark, list) and len(mark) == 2 and _number(mark[0]) is not None
    ]
    return _Samples(rows, marks)


def _numbers(rows: Any) -> Iterator[tuple[float | None, float | None, float | None]]:
    for row in _list(rows):
        if isinstance(row, list) and len(row) == 3:
            yield _number(row[0]), _number(row[1]), _number(row[2])


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 1e15 else None


def _list(value: Any) -> Sequence[Any]:
    return value[:_MOST_ROWS] if isinstance(value, list) else ()


def mapping_of(value: Any) -> Mapping[str, Any]:
    """It, or an empty one in place of anything else."""
    return value if isinstance(value, Mapping) else {}
