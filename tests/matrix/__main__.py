"""The command line of the compatibility matrix."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from app.settings import PREFIX
from tests.matrix import page
from tests.matrix.fixture import KINDS, Kind
from tests.matrix.fixtures import all_fixtures
from tests.matrix.run import FRAMEWORKS, OURS, SOURCE, Matrix, build_all, commit_of, remove_all, stack

ROOT = Path(__file__).parents[2]


def main() -> int:
    """1 unless every cell and every verdict is as it should be."""
    asked = _arguments()
    fixtures = [one for one in all_fixtures() if not asked.dataset or one.dataset in asked.dataset]
    agents = tuple(name for name in FRAMEWORKS if not asked.agent or name in asked.agent)
    for name in [name for name in os.environ if name.startswith(PREFIX) and name != SOURCE]:
        del os.environ[name]  # the matrix has an installation of its own
    begun = time.monotonic()

    def report(line: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {line}", flush=True)

    with stack(report) as flow, tempfile.TemporaryDirectory(prefix="mf-matrix-") as folder:
        build_all(fixtures, flow.settings)
        report("built the images of the fixtures")
        try:
            matrix = Matrix(flow, Path(folder), report)
            for number, fixture in enumerate(fixtures):
                matrix.submit(fixture, number, OURS, KINDS)
                matrix.submit(fixture, number, agents, (Kind.RIGHT, Kind.PECULIAR))
            matrix.wait(asked.minutes * 60)
        finally:
            remove_all(fixtures, flow.settings)
    minutes = (time.monotonic() - begun) / 60
    page.write(matrix.records, fixtures, asked.out, commit=commit_of(ROOT), minutes=minutes)
    wrong = [record for record in matrix.records if not record.as_expected]
    report(f"{len(matrix.records)} tasks, {len(wrong)} not as they should be; {asked.out / 'compatibility.md'}")
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--dataset", action="append", default=[], metavar="NAME", help="only this one; repeatable")
    parser.add_argument("--agent", action="append", default=[], metavar="NAME", help="only this one; repeatable")
    parser.add_argument("--minutes", type=float, default=40.0, help="for all tasks together")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the page")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
