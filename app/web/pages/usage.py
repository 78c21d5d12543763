"""Memory and processors of an attempt's environments below its timeline, as data for the page's script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_MOST_ROWS = 8000
_HEADROOM = 1.1
_MARKS = {"killed": "killed for memory", "throttled": "held up by its limit of processors"}


@dataclass(frozen=True, slots=True)
class UsageChart:
    """A chart of memory or of processors. drawn: data for `static/chart.js`, as JSON."""

    name: str
    caption: str
    drawn: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Samples:
    """Samples of one environment, in seconds since the timeline's begin: (second, MiB, processors), and marks."""

    name: str
    rows: Sequence[tuple[float, float | None, float | None]]
    marks: Sequence[tuple[float, str]]


class _Quantity(NamedTuple):
    name: str
    column: int  # index in a row
    unit: str
    limit: float | None
    mark: str
    met: str  # meaning of a mark, for the caption


def usage_charts(environment: Mapping[str, Any], begin_s: float, seconds: float) -> list[UsageChart]:
    """Returns the charts of an attempt's environments; none if nothing was sampled.

    begin_s: begin of the timeline, since 1970. seconds: its length.
    """
    samples = [_read(*one, begin_s, seconds) for one in mapping_of(environment.get("samples")).items()]
    memory_bytes = number_of(mapping_of(environment.get("memory")).get("limit_bytes"))
    memory = None if memory_bytes is None else memory_bytes / (1 << 20)
    cpus = number_of(mapping_of(environment.get("cpu")).get("limit"))
    quantities = (
        _Quantity("Memory", 1, "MiB", memory, "killed", "killed for memory"),
        _Quantity("Processors", 2, "in use", cpus, "throttled", "held up by its limit"),
    )
    drawn = (_chart(one, samples, seconds) for one in quantities)
    return [one for one in drawn if one is not None]


def limits_met(environment: Mapping[str, Any], begin_s: float, seconds: float) -> Iterator[tuple[float, str]]:
    """Yields when the attempt's own limits delayed it or ended a process: seconds since its begin, and the event."""
    for name, samples in mapping_of(environment.get("samples")).items():
        for second, mark in _read(name, samples, begin_s, seconds).marks:
            yield second, f"{name}: {_MARKS.get(mark, mark)}"


def _chart(quantity: _Quantity, samples: Sequence[_Samples], seconds: float) -> UsageChart | None:
    column, limit = quantity.column, quantity.limit
    points = [[(row[0], value) for row in one.rows if (value := row[column]) is not None] for one in samples]
    most = max((value for line in points for _, value in line), default=None)
    if most is None:
        return None
    marks = [mark for one in samples for mark in one.marks if mark[1] == quantity.mark]
    caption = f"{quantity.name}: at most {most:g} {quantity.unit}, " + (
        "no known limit" if limit is None else f"limit {limit:g}"
    )
    lines = [{"name": one.name, "points": line} for one, line in zip(samples, points, strict=True)]
    top = _HEADROOM * max(most, limit or 0.0, 0.001)
    return UsageChart(
        quantity.name,
        f"{caption}; {len(marks)} times {quantity.met}" if marks else caption,
        {"seconds": seconds, "unit": quantity.unit, "top": top, "limit": limit, "lines": lines, "marks": marks},
    )


def _read(name: str, one: Any, begin_s: float, seconds: float) -> _Samples:
    """Reads the samples of one environment; leaves out anything malformed."""
    samples = mapping_of(one)
    offset_s = (number_of(samples.get("since")) or 0.0) - begin_s

    def within(second: float) -> float:
        return min(max(0.0, round(second + offset_s, 1)), seconds)

    rows = [
        (within(second), memory, cores) for second, memory, cores in _numbers(samples.get("rows")) if second is not None
    ]
    marks = [
        (within(float(mark[0])), str(mark[1]))
        for mark in _list(samples.get("marks"))
        if isinstance(mark, list) and len(mark) == 2 and number_of(mark[0]) is not None
    ]
    return _Samples(name, sorted(rows, key=lambda row: row[0]), marks)


def _numbers(rows: Any) -> Iterator[tuple[float | None, float | None, float | None]]:
    for row in _list(rows):
        if isinstance(row, list) and len(row) == 3:
            yield number_of(row[0]), number_of(row[1]), number_of(row[2])


def number_of(value: Any) -> float | None:
    """Returns a number of at least 0; None for anything else."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1e15 else None


def _list(value: Any) -> Sequence[Any]:
    return value[:_MOST_ROWS] if isinstance(value, list) else ()


def mapping_of(value: Any) -> Mapping[str, Any]:
    """Returns a mapping as it is, and an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}
