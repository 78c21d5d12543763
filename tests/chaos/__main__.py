"""The command line of the chaos suite."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from app.settings import PREFIX, Settings
from app.web import chaos
from tests.chaos import cases, report
from tests.chaos.case import REGISTRY
from tests.chaos.run import run_all

OUT = Path(__file__).parents[2] / "chaos" / "results"


def main() -> int:
    """1 unless lost, duplicated and unexpected are 0 in every case."""
    asked = _arguments()
    cases.load(long=asked.long)
    if asked.list:
        print("\n".join(f"{name:<34} {case.about}" for name, case in REGISTRY.items()))
        return 0
    if unknown := [name for name in asked.case if name not in REGISTRY]:
        sys.exit(f"unknown cases {', '.join(unknown)}; known: {', '.join(REGISTRY)}")
    chosen = [case for case in REGISTRY.values() if _chosen(case.name, case.short, asked)]
    shown = chaos.file_of(Settings().home)
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]  # the suite's installations are its own
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begun = time.monotonic()
    verdicts = []
    for verdict in run_all(chosen, asked.out, lambda line: print(line, flush=True)):
        verdicts.append(verdict)
        report.write(verdicts, REGISTRY, asked.out, shown, time.monotonic() - begun)  # a long run may be ended
    bad = [verdict.case for verdict in verdicts if not verdict.passed]
    print(f"{len(verdicts)} cases, {len(bad)} bad {bad or ''}; report in {asked.out}")
    return 1 if bad else 0


def _chosen(name: str, short: bool, asked: argparse.Namespace) -> bool:
    return name in asked.case if asked.case else short or not asked.short


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--short", action="store_true", help="only the few that `make test` runs")
    parser.add_argument("--long", action="store_true", help="the monkey kills for three minutes instead of 20 s")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the report")
    parser.add_argument("--list", action="store_true", help="what there is")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
