"""Draws the pass rates of a report, with their intervals, into a file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import OptionInvalid
from app.evaluation.export import new_place
from app.texts import clean

if TYPE_CHECKING:
    from app.evaluation.report import Report, Slice

_FORMS = (".png", ".svg")
_MOST_ROWS = 40
_MOST_LETTERS = 40
_BLUE, _GREY = "#2b6cb0", "#a0aec0"


def check_place(file: Path) -> None:
    """Raises: OptionInvalid: unsupported file ending; ModuleNotFoundError: the extra is missing."""
    if file.suffix.lower() not in _FORMS:
        raise OptionInvalid(f"--plot: expected a file that ends in {' or '.join(_FORMS)}, found {str(file)!r}")
    import matplotlib  # noqa: F401


def draw(made: Report, file: Path) -> None:
    """Writes the plot of a report. Raises: ExportRefused: the file exists, or its folder does not."""
    import matplotlib
    from matplotlib.figure import Figure

    parts = _parts(made)
    # Names come from users: a `$` is not a formula, and a character that the font lacks is drawn as a box.
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings(), new_place(file) as part:
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(8, 2.2 + 0.28 * max(len(parts), 4)), layout="constrained")
        figure.suptitle(f"{_short(made.run)}, {made.created_at:%Y-%m-%d}: {made.headline.scored} tasks scored")
        axes = figure.subplots()
        axes.set(title="pass rate, with its 95 % interval", xlabel="%", xlim=(0, 100))
        axes.set_yticks(range(len(parts)), [f"{name} ({one.scored})" for name, one in parts])
        axes.set_ylim(max(len(parts), 1) - 0.5, -0.5)  # the first at the top
        axes.grid(axis="x", alpha=0.4)
        for row, (_, one) in enumerate(parts):
            assert one.rate is not None
            bounds = [100 * one.rate.low, 100 * one.rate.high]
            axes.plot(bounds, [row, row], color=_GREY, linewidth=5, solid_capstyle="butt")
            axes.plot([100 * one.rate.value], [row], "o", color=_BLUE, clip_on=False)
        figure.savefig(part, dpi=120, format=file.suffix.lower().lstrip("."))


def _parts(made: Report) -> list[tuple[str, Slice]]:
    """Returns the whole run, the parts of each division that has several, and the baselines; at most 40."""
    parts = [(made.headline.name, made.headline)]
    for division, slices in made.by.items():
        if len(slices) > 1 and division != "end reason":  # an end reason is a result itself
            parts += [(f"{division}: {one.name}", one) for one in slices]
    parts += [(one.name, one) for one in made.baselines]
    return [(_short(name), one) for name, one in parts if one.rate is not None][:_MOST_ROWS]


def _short(name: str) -> str:
    plain = " ".join(clean(name).split())
    return plain if len(plain) <= _MOST_LETTERS else f"{plain[: _MOST_LETTERS - 1]}…"
