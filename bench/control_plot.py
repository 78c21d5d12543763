"""The pictures beside the control plane's figures, drawn from what the file holds and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("agg")  # no screen here

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench import control_burst, control_enqueue, control_hold, control_reaction
from bench.control_dispatch import GOAL_IDLE_P50_S, GOAL_PER_S
from bench.control_figures import quantile
from bench.control_meter import CONTROL_PLANE

OURS, PEER, GOAL = "tab:blue", "tab:grey", "tab:red"

Samples = Mapping[str, Any]


def draw(part: str, samples: Samples, path: Path) -> None:
    """Draw the part's picture."""
    figure = _DRAWN[part](samples)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# --- Enqueue --------------------------------------------------------------------------------------------------------


def _enqueue(samples: Samples) -> Any:
    figure, (bulk, single) = plt.subplots(1, 2, figsize=(14, 5), layout="constrained")
    rates: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples["samples"]:
        rates[sample["variant"]].append(sample["per_s"])
    one_by_one = {name: found for name, found in rates.items() if name.endswith(control_enqueue.SINGLE)}
    _bars(bulk, {name: found for name, found in rates.items() if name not in one_by_one})
    _bars(single, one_by_one)
    bulk.axvline(control_enqueue.GOAL_BULK_PER_S, color=GOAL, linestyle="--", label="goal")
    bulk.legend()
    bulk.set_title("in bulk")
    single.set_title("one by one, one producer")
    return figure


def _bars(axis: Axes, rates: Mapping[str, Sequence[float]]) -> None:
    names = sorted(rates, key=lambda name: median(rates[name]))
    for place, name in enumerate(names):
        colour = PEER if name.startswith((control_enqueue.CELERY, control_enqueue.PROCRASTINATE)) else OURS
        axis.barh(place, median(rates[name]), color=colour, height=0.6)
        axis.plot(rates[name], [place] * len(rates[name]), "o", color="black", markersize=4)
    axis.set_yticks(range(len(names)), [name if _is_peer(name) else f"MegaFlow, {name}" for name in names])
    axis.set_xlabel("accepted tasks per second (bar: median, dots: rounds)")
    axis.set_xlim(left=0)


def _is_peer(name: str) -> bool:
    return name.startswith((control_enqueue.CELERY, control_enqueue.PROCRASTINATE))


# --- Dispatch -------------------------------------------------------------------------------------------------------


def _dispatch(samples: Samples) -> Any:
    figure, (bursts, probes) = plt.subplots(1, 2, figsize=(14, 5), layout="constrained")
    modes = list(dict.fromkeys(burst["mode"] for burst in samples["bursts"]))
    for place, mode in enumerate(modes):
        rates = [burst["tasks"] / burst["took_s"] for burst in samples["bursts"] if burst["mode"] == mode]
        bursts.bar(place, median(rates), color=OURS, width=0.5)
        bursts.plot([place] * len(rates), rates, "o", color="black", markersize=4)
    bursts.set_xticks(range(len(modes)), modes)
    bursts.axhline(GOAL_PER_S, color=GOAL, linestyle="--", label="goal")
    bursts.set_ylabel("attempts per second, accepted to claimed")
    bursts.set_title(f"{samples['scale']['burst']} tasks at once, slots free")
    bursts.legend()
    _latencies(probes, samples["probes"])
    return figure


def _latencies(axis: Axes, probes: Sequence[Samples]) -> None:
    levels = sorted({probe["waiting"] for probe in probes})
    for share, style in ((0.5, "o-"), (0.99, "s--")):
        found = [
            median(quantile(probe["claim_s"], share) * 1000 for probe in probes if probe["waiting"] == level)
            for level in levels
        ]
        axis.plot([max(level, 1) for level in levels], found, style, color=OURS, label=f"p{share * 100:g}")
    axis.axhline(GOAL_IDLE_P50_S * 1000, color=GOAL, linestyle=":", label="goal of p50 when idle")
    axis.set_xscale("log")
    axis.set_xticks([max(level, 1) for level in levels], [str(level) for level in levels])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("other tasks waiting in line")
    axis.set_ylabel("accepted to claimed, ms")
    axis.set_title("one task, with free slots, beside a line that may not run")
    axis.legend()


# --- Hold -----------------------------------------------------------------------------------------------------------


def _hold(samples: Samples) -> Any:
    figure, axes = plt.subplots(2, 2, figsize=(13, 9), layout="constrained")
    scale = {"cores": control_hold.GOAL_CORES, "memory_bytes": control_hold.GOAL_MEMORY_BYTES} | samples["scale"]
    panels: tuple[tuple[str, Callable[[Samples], float], float | None], ...] = (
        ("control plane, cores over the wave", lambda w: w["cores"][CONTROL_PLANE], scale["cores"]),
        (
            "control plane, memory in MiB",
            lambda w: w["memory_bytes"][CONTROL_PLANE] / (1 << 20),
            scale["memory_bytes"] / (1 << 20),
        ),
        ("lease writes per second while all run", lambda w: w["lease_writes_per_s"], None),
        (
            "wave's time to one task and the stated ramp",
            lambda w: w["wave_s"] / (w["alone_s"] + samples["stated_ramp_s"][f"{w['mode']} {w['tasks']}"]),
            control_hold.GOAL_WAVE,
        ),
    )
    for axis, (title, figure_of, goal) in zip(axes.flat, panels, strict=True):
        for mode in dict.fromkeys(wave["mode"] for wave in samples["waves"]):
            waves = [wave for wave in samples["waves"] if wave["mode"] == mode]
            axis.plot([wave["tasks"] for wave in waves], [figure_of(wave) for wave in waves], "o-", label=mode)
        if goal is not None:
            axis.axhline(goal, color=GOAL, linestyle="--", label="goal: at most")
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.set_xlabel("attempts running at once")
        axis.set_title(title)
        axis.legend()
    return figure


# --- Reaction and fairness ------------------------------------------------------------------------------------------


def _reaction(samples: Samples) -> Any:
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for slots in dict.fromkeys(reaction["slots"] for reaction in samples["reactions"]):
        found = sorted(s * 1000 for r in samples["reactions"] if r["slots"] == slots for s in r["empty_s"])
        axis.plot(found, [(place + 1) / len(found) for place in range(len(found))], label=f"{slots} slots")
    axis.axvline(control_reaction.GOAL_P50_S * 1000, color=GOAL, linestyle="--", label="goal of p50")
    axis.axhline(0.5, color="lightgrey", linewidth=0.8)
    axis.set_xlim(left=0)
    axis.set_xlabel("ms that a slot stood empty between two tasks")
    axis.set_ylabel("share of slots")
    axis.legend()
    return figure


def _burst(samples: Samples) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for axis, key, goal_s, label in zip(
        axes,
        ("launch_s", "reaction_s"),
        (control_burst.GOAL_LAUNCH_S, control_burst.GOAL_P99_S),
        ("seconds from accepted to an instance asked for", "seconds from an end to its slot's next claim"),
        strict=True,
    ):
        for number, round_ in enumerate(samples["rounds"]):
            found = sorted(round_[key])
            share = [(place + 1) / len(found) for place in range(len(found))]
            axis.plot(found, share, label=f"round {number + 1}")
        axis.axvline(goal_s, color=GOAL, linestyle="--", label="goal")
        axis.set_xlim(left=0)
        axis.set_xlabel(label)
        axis.set_ylabel("share")
        axis.legend()
    return figure


def _fairness(samples: Samples) -> Any:
    rounds = [shares for shares in samples["shares"] if shares["round"] == 0]
    figure, axes = plt.subplots(1, len(rounds), figsize=(6 * len(rounds), 5), layout="constrained", squeeze=False)
    for axis, shares in zip(axes[0], rounds, strict=True):
        weights = shares["weights"]
        users = list(shares["started"])
        per_s = [shares["started"][user] / weights.get(user, 1.0) / shares["window_s"] for user in users]
        axis.bar(users, per_s, color=[PEER, *[OURS] * (len(users) - 1)])
        axis.tick_params(axis="x", rotation=60)
        axis.set_ylabel("tasks started per second and weight")
        axis.set_title(f"order: {shares['order']}{', weighted' if weights else ''}")
    return figure


_DRAWN: dict[str, Callable[[Samples], Any]] = {
    "enqueue": _enqueue,
    "dispatch": _dispatch,
    "hold": _hold,
    "reaction": _reaction,
    "fairness": _fairness,
    "crowd": _hold,
    "burst": _burst,
}
