"""Where everything stands: every goal that was set, what was measured of it, and first of all which are missed.

python -m bench.standing     (writes results/README.md, of what the files beside it say; measures nothing)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import control_record
from bench.environments.goals import Kept, Verdict, summary, unmeasured, verdicts
from bench.record import RESULTS

PAGE = "README.md"
_FILES = {
    "environments": ("Environments", "make bench-env"),
    "images": ("The image cache, simulated", "python -m bench.images"),
    "control": ("The control plane", "make bench-control"),
    "gateway": ("The inference gateway", "make bench-gateway"),
    "train": ("Training", "make bench-train"),
    "web": ("The web server", "make bench-web"),
    "paper": ("The paper's figures, and beyond", "make paper"),
    "auto": ("Mode auto in virtual time", "python -m bench.auto"),
    "trace": ("Recorded runs again", "python -m bench.trace"),
}
_HEAD = """# Where it stands

Written by `python -m bench.standing` of the files in this folder, whose figures the benchmarks measured; nothing here
is put in by hand. Goals in seconds were set on one machine at one time: where a row of the same run says how the bare
engine fared, compare with that first ([how environments are compared](../environments/README.md)).
"""


def page(folder: Path) -> str:
    """The page of that folder's results, as Markdown."""
    known = {name: control_record.load(folder / f"{name}.json") for name in _FILES}
    files = (line for name, kept in known.items() for line in _file(name, kept, folder))
    return "\n".join([_HEAD, *_missed(known), *files])


def write(folder: Path = RESULTS) -> Path:
    """Write it beside the results; where it stands."""
    place = folder / PAGE
    place.write_text(page(folder))
    return place


def _missed(known: Mapping[str, Kept]) -> Iterator[str]:
    yield "## Missed\n"
    missed = [(name, verdict) for name, kept in known.items() for verdict in verdicts(kept) if not verdict.holds]
    if not missed:
        yield "No goal is.\n"
        return
    yield "| what | measured | goal |\n|---|---|---|"
    for name, verdict in missed:
        yield f"| {_FILES[name][0]}: {_told(verdict)} |"
    yield ""


def _file(name: str, kept: Kept, folder: Path) -> Iterator[str]:
    title, command = _FILES[name]
    yield f"## {title}\n"
    if not kept:
        yield f"Not measured yet: `{command}`.\n"
        return
    days = sorted({str(told["measured_at"])[:10] for told in kept.values()})
    yield f"`{command}`, {' to '.join(dict.fromkeys((days[0], days[-1])))}, {_machine(kept)}: {summary(kept)}.\n"
    yield "| goal of | measured | goal | holds |\n|---|---|---|---|"
    for verdict in verdicts(kept):
        holds = "yes" if verdict.holds else "**no**"
        yield f"| {_told(verdict)} | {holds} |"
    yield ""
    yield from (f"Not measured: {who}: {why}\n" for who, why in unmeasured(kept))
    pictures = sorted(path.name for form in (f"{name}.png", f"{name}-*.png") for path in folder.glob(form))
    yield " ".join(f"[{picture.removesuffix('.png')}]({picture})" for picture in pictures) + "\n"


def _told(verdict: Verdict) -> str:
    """The cells that say what was measured, how much, and how much was wanted."""
    what = verdict.metric if verdict.metric.startswith(verdict.part) else f"{verdict.part}: {verdict.metric}"
    amounts = (_amount(value, verdict.unit) for value in (verdict.value, verdict.goal))
    return " | ".join((what.replace("|", "\\|"), *amounts))


def _amount(value: Any, unit: str) -> str:
    return "-" if value is None else f"{value:g} {unit}".strip() if isinstance(value, int | float) else str(value)


def _machine(kept: Kept) -> str:
    """Of the part that was measured last."""
    last = max(kept.values(), key=lambda told: str(told["measured_at"]))["machine"]
    return f"{last['cores']} cores, {last['memory_bytes'] / 2**30:.0f} GiB"


if __name__ == "__main__":
    sys.stdout.write(f"{write()}\n")
