"""Draws a report into a file: pass rates with intervals, rewards by replica, dollars per solved task."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import OptionInvalid
from app.evaluation.export import new_place
from app.evaluation.report import BASELINES
from app.models.outcome import TaskResult
from app.texts import clean

if TYPE_CHECKING:
    from app.evaluation.report import Report, Slice

_FORMS = (".png", ".svg")
_MOST_BARS = 40
_MOST_LETTERS = 40
_BLUE, _GREY, _RED = "#2b6cb0", "#a0aec0", "#c53030"


def check_place(file: Path) -> None:
    """Raises: OptionInvalid: unsupported file ending; ModuleNotFoundError: the extra is missing."""
    if file.suffix.lower() not in _FORMS:
        raise OptionInvalid(f"--plot: expected a file that ends in {' or '.join(_FORMS)}, found {str(file)!r}")
    import matplotlib  # noqa: F401


def draw(made: Report, results: Iterable[TaskResult], file: Path) -> None:
    """Writes the plots of a report and its tasks. Raises: ExportRefused: the file exists, or its folder does not."""
    import matplotlib
    from matplotlib.figure import Figure

    rates, costs = _rates(made), _costs(made)
    by_replica = _rewards(results)
    # Names come from users: a `$` is not a formula, and a character that the font lacks is drawn as a box.
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings(), new_place(file) as part:
        warnings.simplefilter("ignore")
        height = 2.2 + 0.28 * max(len(rates), len(costs), 8)
        figure = Figure(figsize=(15, height), layout="constrained")
        figure.suptitle(f"{_short(made.run)}, {made.created_at:%Y-%m-%d}: {made.headline.scored} tasks scored")
        first, second, third = figure.subplots(1, 3)
        _draw_rates(first, rates)
        _draw_rewards(second, by_replica)
        _draw_costs(third, costs)
        figure.savefig(part, dpi=120, format=file.suffix.lower().lstrip("."))


def _rates(made: Report) -> list[tuple[str, Slice]]:
    """Returns the whole run, the parts of each division that has several, and the baselines; at most 40."""
    parts = [(made.headline.name, made.headline)]
    for division, slices in made.by.items():
        if len(slices) > 1 and division != "end reason":  # an end reason is a result itself
            parts += [(f"{division}: {one.name}", one) for one in slices]
    parts += [(one.name, one) for one in made.baselines]
    return [(_short(name), one) for name, one in parts if one.rate is not None][:_MOST_BARS]


def _costs(made: Report) -> list[tuple[str, float]]:
    """Returns the cost per solved task by agent and model, where prices are known and something was solved."""
    costs = [(_short(one.name), one.cost_per_solved_usd) for one in made.by.get("agent", ())]
    return [(name, cost) for name, cost in costs if cost is not None][:_MOST_BARS]


def _rewards(results: Iterable[TaskResult]) -> dict[int, list[float]]:
    """Returns the rewards of scored tasks by replica, without scripted tasks and baselines."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for one in results:
        if one.verdict is not None and one.verdict.counts and not one.scripted and one.agent not in BASELINES:
            rewards[one.replica].append(one.verdict.reward or 0.0)
    return dict(sorted(rewards.items()))


def _short(name: str) -> str:
    plain = " ".join(clean(name).split())
    return plain if len(plain) <= _MOST_LETTERS else f"{plain[: _MOST_LETTERS - 1]}…"


def _draw_rates(axes: Any, parts: Sequence[tuple[str, Slice]]) -> None:
    axes.set(title="pass rate, with its 95 % interval", xlabel="%", xlim=(0, 100))
    _rows(axes, [f"{name} ({one.scored})" for name, one in parts])
    for row, (_, one) in enumerate(parts):
        assert one.rate is not None
        axes.plot(
            [100 * one.rate.low, 100 * one.rate.high], [row, row], color=_GREY, linewidth=5, solid_capstyle="butt"
        )
        axes.plot([100 * one.rate.value], [row], "o", color=_BLUE, clip_on=False)


def _draw_rewards(axes: Any, by_replica: dict[int, list[float]]) -> None:
    """Draws a circle for each reward of a replica, sized by its frequency, and a line at the mean."""
    axes.set(title="rewards by replica, and their mean", xlabel="replica", ylabel="reward")
    axes.set_xticks(list(by_replica), [str(one) for one in by_replica])
    for replica, rewards in by_replica.items():
        counts, mean = Counter(rewards), sum(rewards) / len(rewards)
        sizes = [600 * count / len(rewards) for count in counts.values()]
        axes.scatter([replica] * len(counts), list(counts), s=sizes, color=_BLUE, alpha=0.5)
        axes.plot([replica - 0.3, replica + 0.3], [mean, mean], color=_RED)
    axes.margins(y=0.1)
    _say_if_empty(axes, by_replica, "nothing scored")


def _draw_costs(axes: Any, costs: Sequence[tuple[str, float]]) -> None:
    axes.set(title="cost per solved task", xlabel="US dollars")
    _rows(axes, [name for name, _ in costs])
    axes.barh(range(len(costs)), [cost for _, cost in costs], height=0.5, color=_BLUE)
    _say_if_empty(axes, costs, "unknown")


def _rows(axes: Any, names: Sequence[str]) -> None:
    """Names the rows, the first at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.4)
    _say_if_empty(axes, names, "unknown")


def _say_if_empty(axes: Any, found: object, text: str) -> None:
    if not found:
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_GREY)
