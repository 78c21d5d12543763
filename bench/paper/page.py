"""docs/paper.md, made of what was kept: figures, assumptions, gaps. Nothing in it is put in by hand."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.paper import data, plot
from bench.paper.plans import BEYOND, CENTRAL, EPHEMERAL, LIMITED, PERSISTENT

PAGE = Path(__file__).parents[2] / "docs" / "paper.md"
_HEAD = """# The paper's figures

`make paper` runs them and writes this page; nothing in it is put in by hand. PostgreSQL, Redis, the dispatcher, leases
and messages are the real ones; instances are simulated and do nothing but take time. Phases that this machine can
measure are from real runs on it ([calibration.json](../bench/paper/calibration.json), made by
`python -m bench.paper.calibrate` from a ledger), hardware is the paper's, and everything else is an assumption that
stands below. Our curves are predictions: the paper's own points ([points.csv](../bench/paper/points.csv), with the
lines of its text) enter in four places alone, which are named.

**Time is scaled.** What instances do is divided by a factor (150 to 900) and multiplied again; what the control plane
takes is counted in real seconds, as it is: a task's time is submission + scheduling + whatever else the ledger has
beyond what was drawn, and factor * drawn. This is right because no task of any point waits for another one's end. The
factor bends one thing: claims take real time, so that downloads which share a link overlap a little less than in life.
"""
_TAKEN = """The paper's points that enter:

1. The time of one task alone (figure 3: {alone:g} min; figure 5's bars: {shared:g} min) sets the agent's mean time.
2. Cost at 2,000 tasks sets the prices: {small:.3f} USD an hour for a small instance, {central:.2f} for a central host.
3. MegaFlow's own use (line 153) sets what a task uses: {cores:g} cores and {memory:.2f} GB.
4. The images of line 35 set their size: {disk:.2f} GB on disk, {packed:.2f} GB packed at the ratio measured here.
"""


def page(kept: Mapping[str, Any]) -> str:
    """The page of what `control_record` kept."""
    samples, world = kept["samples"], kept["samples"]["world"]
    machine = kept["machine"]
    ran = (
        f"Last run at {kept['measured_at']} on {machine['cores']} cores and {machine['memory_bytes'] / 2**30:.0f} GiB"
        f" in {kept['took_s'] / 60:.0f} minutes, {kept['processors_busy_before']:.0%} of the processors busy before;"
        f" {sum(one['ran'] for one in samples['points']):,} tasks in {len(samples['points'])} points,"
        f" {sum(one['lost'] for one in samples['points'])} lost.\n"
    )
    parts = [
        _HEAD,
        ran,
        *_scaling(samples),
        *_full(samples, world),
        *_latency(samples),
        *_beyond(samples),
        *_assumed(world),
        *_gaps(),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _minutes(one: Mapping[str, float]) -> str:
    return f"{one['mean']:.1f} ({one['low']:.1f} to {one['high']:.1f})"


def _theirs(figure: str, series: str, x: float) -> str:
    found = [one for one in data.points(figure, series) if one.x == x]
    if not found:
        return ""
    low, high = found[0].low, found[0].high
    return f"{low:,g}" if low == high else f"{low:,g} to {high:,g}"


def _scaling(samples: Mapping[str, Any]) -> Iterator[str]:
    yield "## Figure 3: time and cost\n\n![Figure 3](../bench/results/paper-figure3.png)\n"
    yield "Mean time of a task in minutes (95 % interval of 100 bootstrap samples), its longest, and the job's cost.\n"
    yield "| approach | tasks | minutes | paper | longest | USD | paper |\n|---|---:|---:|---:|---:|---:|---:|"
    for series in (EPHEMERAL, CENTRAL):
        for one in plot.of(samples, series, "figure 3"):
            cells = (
                f"{one['tasks']:,}",
                _minutes(one["total_min"]),
                _theirs("3-time", series, one["tasks"]),
                f"{one['longest_min']:.0f}",
                f"{one['cost_usd']['mean']:,.2f}",
                _theirs("3-cost", series, one["tasks"]),
            )
            yield f"| {series} | {' | '.join(cells)} |"
    found = {series: plot.of(samples, series, "figure 3") for series in (EPHEMERAL, CENTRAL)}
    small, large = (found[EPHEMERAL][place]["total_min"]["mean"] for place in (0, -1))
    yield (
        f"\nFrom {found[EPHEMERAL][0]['tasks']:,} to {found[EPHEMERAL][-1]['tasks']:,} tasks the mean grows by"
        f" {100 * (large / small - 1):+.1f} %. A flat line can only be a mean: the longest of many tasks grows with"
        " their number, whatever the system does. For the same reason central is dearer here than in the paper: a host"
        " of 50 tasks is paid until the last of them ends, and the paper's cost means that all end together.\n"
    )
    same = [[one for one in found[series] if one["tasks"] == 2000 and one["cost_usd"]["mean"]] for series in found]
    if all(same):
        ours, theirs = (one[0]["cost_usd"]["mean"] for one in same)
        yield f"At 2,000 tasks ours costs {100 * (1 - ours / theirs):.1f} % less than central (paper: 31.6 %).\n"


def _full(samples: Mapping[str, Any], world: Mapping[str, Any]) -> Iterator[str]:
    yield "## Figure 4: how full hosts are\n\n![Figure 4](../bench/results/paper-figure4.png)\n"
    yield "| approach | of | mean % | peak % | peak at % of the time | paper, peak % |\n|---|---|---:|---:|---:|---:|"
    for series, curves in samples["utilisation"].items():
        for key, (mean, _, _) in curves.items():
            peak = max(mean)
            at = 100 * (mean.index(peak) + 0.5) / len(mean)
            theirs = max(one.middle for one in data.points(f"4-{key}", series))
            yield f"| {series} | {key} | {sum(mean) / len(mean):.1f} | {peak:.1f} | {at:.0f} | {theirs:g} |"
    share = 100 * world["central"]["slots"] * world["agent_memory_bytes"] / world["central"]["memory_bytes"]
    yield (
        "\nThe same tasks on both kinds of host cannot show what the paper shows: 50 tasks with MegaFlow's memory use"
        f" {share:.1f} % of a central host, the paper has 50 % (30 GB a task, more than a small instance has). We take"
        " it for page cache and images in memory, which a small instance does not have the room for.\n"
    )


def _latency(samples: Mapping[str, Any]) -> Iterator[str]:
    yield "## Figure 5: latency by phase, and start-up\n\n![Figure 5](../bench/results/paper-figure5.png)\n"
    yield "Minutes of a task at 1,000 at once; the agent's time is the same in all three.\n"
    names = ("submission", "scheduling", "boot", "image", "environment", "agent", "rest")
    yield f"| mode | {' | '.join(names)} | total | paper |\n|---|{'---:|' * (len(names) + 2)}"
    for series in (PERSISTENT, EPHEMERAL, CENTRAL):
        one = plot.latency(samples, series)
        if one is not None:
            cells = [f"{one['phases_min'][name]['mean']:.2f}" for name in names]
            theirs = _theirs("5-latency", series, 1000)
            yield f"| {series} | {' | '.join(cells)} | {_minutes(one['total_min'])} | {theirs} |"
    yield "\n| mode | tasks | start-up, minutes | paper |\n|---|---:|---:|---:|"
    for series in (PERSISTENT, EPHEMERAL, LIMITED, CENTRAL):
        for one in plot.of(samples, series, "" if series == PERSISTENT else "figure 3"):
            theirs = _theirs("5-startup", series, one["tasks"])
            yield f"| {series} | {one['tasks']:,} | {_minutes(one['startup_min'])} | {theirs} |"
    yield (
        "\nShared links alone explain the central curve. They do not explain the ephemeral one: on a link of its own an"
        " image takes as long at 1 as at 10,000 tasks. A registry whose bandwidth were the limit (the curve with the"
        " registry at its limit) would have start-up grow in proportion with the tasks, which figure 3's flat line"
        " excludes; the paper's 1 minute for one task also means images of a third of the size that its own total"
        " gives.\n"
    )


def _beyond(samples: Mapping[str, Any]) -> Iterator[str]:
    found = [one for one in samples["points"] if one["figure"] == BEYOND]
    theirs = data.point("3-cost", EPHEMERAL, 2000)
    yield "## Beyond: what 2,000 tasks need cost\n\n![Beyond](../bench/results/paper-beyond.png)\n"
    yield f"At the same prices and tasks. The paper: {theirs:,g} USD; the goal: half of it.\n"
    yield "| | USD | of the paper's | minutes of a task | longest | attempts | instances |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for one in found:
        usd = one["cost_usd"]["mean"]
        yield (
            f"| {one['series']} | {usd:,.0f} | {100 * usd / theirs:.0f} % | {_minutes(one['total_min'])} |"
            f" {one['longest_min']:.0f} | {one['attempts']:,} | {one['instances']:,} |"
        )
    yield (
        "\nTasks of one instance share its link, so that packing alone makes start-up longer; placement by image takes"
        " that back. `cached` is what the image benchmark measured with placement (`python -m bench.images`). Several"
        " tasks on one instance is a standing pool (`megaflow classes set standard --pool-min 0 --pool-max 500 --slots"
        " 4`): tasks are apart by their containers and limits, no longer by their machines.\n"
    )


def _assumed(world: Mapping[str, Any]) -> Iterator[str]:
    yield "## What enters\n"
    yield _TAKEN.format(
        alone=data.point("3-time", EPHEMERAL, 1),
        shared=data.point("5-latency", PERSISTENT, 1000),
        small=world["small"]["usd_per_hour"],
        central=world["central"]["usd_per_hour"],
        cores=world["agent_cores"],
        memory=world["agent_memory_bytes"] / 1e9,
        disk=world["image_bytes"] / 1e9,
        packed=world["packed_bytes"] / 1e9,
    )
    yield "Measured here:\n"
    yield (
        f"- An image of that size is unpacked in {world['unpack_s']:.0f} s with {world['unpack_cores']:.2f} cores;"
        f" an environment starts in {world['start_s']:.3f} s, a grading takes {world['grade_s']:.2f} s (demo tasks)."
    )
    yield (
        f"- {100 * world['cached']:.1f} % of the tasks of a standing pool find their image, placed by image"
        f" ({100 * world['cached_unplaced']:.1f} % without).\n"
    )
    yield "Assumed ([assumptions.toml](../bench/paper/assumptions.toml)):\n"
    yield "| | value | unit | from |\n|---|---:|---|---|"
    for part, named in data.assumptions().items():
        for name, one in named.items():
            yield f"| {part}: {name} | {one['value']:,g} | {one['unit']} | {one['from']} |"
    yield (
        "\nNot modelled: contention of disks and processors within a host, layers that images share, slow starts of"
        " single machines, retries of failed tasks (but for spot), what a model's replies have to do with the load.\n"
    )


def _gaps() -> Iterator[str]:
    yield "## The paper's gaps, decided\n"
    yield "| gap | what it is | what MegaFlow does | where |\n|---|---|---|---|"
    for name, one in tomllib.loads(data.GAPS.read_text()).items():
        where = ", ".join(f"[{place}](../{place})" for place in one["where"])
        yield f"| {name} | {one['gap']} | {one['decision']} | {where} |"
