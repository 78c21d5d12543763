"""The files that a run of the figures starts from: the paper's points, assumptions, and what was measured here."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

FOLDER = Path(__file__).parent
POINTS, ASSUMPTIONS, GAPS = FOLDER / "points.csv", FOLDER / "assumptions.toml", FOLDER / "gaps.toml"
CALIBRATION = FOLDER / "calibration.json"


@dataclass(frozen=True, slots=True)
class PaperPoint:
    """A figure's point as the paper's text gives it: from `low` to `high`; `line`: of the text."""

    figure: str
    series: str
    x: float
    low: float
    high: float
    unit: str
    line: int
    words: str

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


def points(figure: str = "", series: str = "") -> list[PaperPoint]:
    """Those of a figure and a series, or all."""
    with POINTS.open() as lines:
        rows = [
            PaperPoint(r["figure"], r["series"], float(r["x"]), float(r["low"]), float(r["high"]), r["unit"],
                       int(r["line"]), r["words"])
            for r in csv.DictReader(lines)
        ]  # fmt: skip
    return [row for row in rows if row.figure.startswith(figure) and row.series.startswith(series)]


def point(figure: str, series: str, x: float) -> float:
    """The middle of one point. Raises: ValueError: the paper has none."""
    found = [one.middle for one in points(figure, series) if one.x == x]
    if not found:
        raise ValueError(f"expected a point of {figure}, {series} at {x:g} in {POINTS.name}")
    return found[0]


def assumptions() -> dict[str, dict[str, dict[str, Any]]]:
    """Every assumption by part and name: its value, its unit and where it is from."""
    return tomllib.loads(ASSUMPTIONS.read_text())


@dataclass(frozen=True, slots=True)
class HostKind:
    """One kind of machine. `usd_per_hour` follows from the paper's own cost at 2,000 tasks."""

    cores: float
    memory_bytes: float
    link_bps: float
    slots: int
    most: int
    usd_per_hour: float


@dataclass(frozen=True, slots=True)
class World:
    """All that the figures are made of, in seconds, bytes and dollars."""

    central: HostKind
    small: HostKind
    image_bytes: float  # on disk
    packed_bytes: float  # as it is downloaded
    unpack_s: float
    unpack_cores: float
    start_s: float  # an environment, on docker
    grade_s: float
    boot_s: float
    spread: float
    cached: float  # share of tasks of a standing pool that find their image, placed by image
    cached_unplaced: float
    agent_cores: float
    agent_memory_bytes: float
    registry_links: float
    spot_price: float
    spot_interruptions_per_hour: float
    packed_slots: int

    def pull_s(self, kind: HostKind) -> float:
        """One image, alone on the link of such a host."""
        return 8 * self.packed_bytes / kind.link_bps

    def agent_s(self, total_min: float, *, boots: bool, cached: bool) -> float:
        """The mean time of an agent with which one task alone takes `total_min` minutes on a small instance."""
        image_s = 0.0 if cached else self.pull_s(self.small) + self.unpack_s
        return 60 * total_min - image_s - self.start_s - self.grade_s - (self.boot_s if boots else 0.0)

    def median_s(self, mean_s: float) -> float:
        """Of the log-normal with this mean and our spread."""
        return mean_s / math.exp(self.spread**2 / 2)


def world() -> World:
    """Of the three files. Raises: OSError, KeyError: one is missing, or a value in it."""
    told = {part: {name: one["value"] for name, one in named.items()} for part, named in assumptions().items()}
    measured = json.loads(CALIBRATION.read_text())
    docker, unpacked = measured["environments"]["docker"], measured["unpacking"]
    images = _images()
    disk_bytes = told["images"]["disk_bytes"] / told["images"]["count"]
    central = HostKind(**told["central"], usd_per_hour=_price("central", told["central"]["slots"]))
    small = HostKind(**told["small"], usd_per_hour=_price("ephemeral", told["small"]["slots"]))
    return World(
        central=central,
        small=small,
        image_bytes=disk_bytes,
        packed_bytes=disk_bytes * unpacked["packed_bytes"] / unpacked["disk_bytes"],
        unpack_s=disk_bytes / unpacked["disk_bytes"] * min(unpacked["took_s"]),  # the least disturbed
        unpack_cores=fmean(unpacked["cpu_s"]) / fmean(unpacked["took_s"]),
        start_s=median(docker["start_s"]),
        grade_s=median(docker["grade_s"]),
        boot_s=told["instances"]["boot_s"],
        spread=told["tasks"]["spread"],
        cached=images["four hosts, tasks placed by image"],
        cached_unplaced=images["the same queue feeds four hosts"],
        agent_cores=point("4-cpu", "ephemeral", 0.5) / 100 * small.cores,
        agent_memory_bytes=point("4-memory", "ephemeral", 0.5) / 100 * small.memory_bytes,
        registry_links=told["instances"]["registry_links"],
        spot_price=told["spot"]["price"],
        spot_interruptions_per_hour=told["spot"]["interruptions_per_hour"],
        packed_slots=told["packing"]["slots"],
    )


def _price(series: str, slots: int) -> float:
    """USD an hour of one host, as the paper's cost at 2,000 tasks and its time then imply."""
    tasks = 2000
    minutes = point("3-time", series, tasks if series == "central" else 10000)
    return point("3-cost", series, tasks) / (tasks / slots * minutes / 60)


def _images() -> dict[str, float]:
    """The share of tasks that found their image, by part of the image benchmark (`python -m bench.images`)."""
    found = json.loads((FOLDER.parent / "results" / "images.json").read_text())
    shares = {}
    for part, kept in found.items():
        values = {row["metric"]: row["value"] for row in kept["rows"]}
        shares[part] = 1 - values["MegaFlow: pulls"] / values["tasks"]
    return shares
