"""python -m tests.chaos.launchers PROGRAM [ARGUMENT]: install the faults of the plan, then run the product's main."""

from __future__ import annotations

import importlib
import sys

from tests.chaos.launchers import faults


def main() -> int:
    program = importlib.import_module(faults.MODULES[sys.argv[1]])
    faults.install(faults.plan_of_environment())
    return int(program.main(*sys.argv[2:]) or 0)


if __name__ == "__main__":
    sys.exit(main())
