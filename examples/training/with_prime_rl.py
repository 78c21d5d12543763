"""Writes each step's samples for prime-rl: an array of msgpack that msgspec decodes as `list[TrainingSample]`.

    python examples/training/with_prime_rl.py NAME POLICY GROUPS STEPS FOLDER

Then prime-rl's `prepare_batch` packs a file's samples for its trainer, which says by `step-N.done` that it has trained.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgpack
from step import Step, connected

from app.experience.adapters import prime_rl


def write(step: Step, file: Path) -> None:
    """The file appears when it is complete."""
    partial = file.with_suffix(".partial")
    partial.write_bytes(msgpack.packb(prime_rl.positional(step.rows)))
    partial.rename(file)


def main(name: str, policy: str, groups: int, steps: int, folder: Path) -> None:
    for number in range(steps):
        step = Step(connected(name, number, policy, "prime-rl"), groups)
        if not step.rows:  # nothing came of its groups
            continue
        write(step, folder / f"step-{number}.msgpack")
        while not (folder / f"step-{number}.done").exists():
            time.sleep(1)
        step.commit(f"v{number + 1}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
