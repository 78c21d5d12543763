"""What `make bench-train` is measured on: workload.json beside this file.

python -m bench.training.workload     (writes the file again, the same bytes)

Synthetic. No published trace has what a training step needs (durations of the replicas of one task, with their turns),
so durations are drawn once from a log-normal, in units of their median, and some are made stragglers; conversations are
drawn once with turns, answers and tool results of log-normal lengths. The file is committed so that everybody measures
the same.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("workload.json")
_SEED, _DURATIONS, _CONVERSATIONS = 22, 400, 64
_SIGMA, _STRAGGLER = 0.45, 8.0
_MOST_TOKENS = 32_768
"""Of a conversation."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Durations are in units of their median; a conversation is a list of (tokens before the answer, answer)."""

    about: str
    durations: dict[str, list[float]]
    conversations: list[list[tuple[int, int]]]

    def run_s(self, name: str, median_s: float) -> str:
        """The durations as a distribution of simulated attempts, in seconds."""
        return "any_of:" + ",".join(f"{value * median_s:.4g}" for value in self.durations[name])


def load() -> Workload:
    """The committed workload."""
    found = json.loads(FILE.read_text())
    turns = [[(before, answer) for before, answer in one] for one in found["conversations"]]
    return Workload(found["about"], found["durations"], turns)


def make() -> Workload:
    """The workload that the file holds."""
    dice = random.Random(_SEED)
    plain = [dice.lognormvariate(0.0, _SIGMA) for _ in range(_DURATIONS)]
    about = (
        "Synthetic. durations: 400 draws of a log-normal (median 1, sigma 0.45); in `stragglers` 5 % of them take 8"
        " times as long, in `many_stragglers` 20 %. conversations: 64, of 6 to 40 turns; answers and what comes before"
        " them have log-normal lengths, at most 32,768 tokens together. Made by bench/training/workload.py."
    )
    durations = {"plain": plain, "stragglers": _slowed(plain, 0.05), "many_stragglers": _slowed(plain, 0.20)}
    rounded = {name: [round(value, 4) for value in values] for name, values in durations.items()}
    return Workload(about, rounded, [_conversation(dice) for _ in range(_CONVERSATIONS)])


def _slowed(plain: Sequence[float], share: float) -> list[float]:
    """Every so-many-th takes longer."""
    step = round(1 / share)
    return [value * (_STRAGGLER if place % step == 0 else 1.0) for place, value in enumerate(plain)]


def _conversation(dice: random.Random) -> list[tuple[int, int]]:
    turns: list[tuple[int, int]] = []
    total = 0
    for turn in range(dice.randint(6, 40)):
        before = round(dice.lognormvariate(7.3, 0.3) if turn == 0 else dice.lognormvariate(5.5, 1.0))
        answer = max(1, round(dice.lognormvariate(4.8, 0.8)))
        total += before + answer
        if total > _MOST_TOKENS:
            break
        turns.append((before, answer))
    return turns


def main() -> int:
    """Write the file."""
    made = make()
    lines = [
        f'"about": {json.dumps(made.about)}',
        *(f'"{name}": {json.dumps(values)}' for name, values in made.durations.items()),
    ]
    conversations = ",\n".join(json.dumps(one) for one in made.conversations)
    text = (
        f'{{{lines[0]},\n"durations": {{\n' + ",\n".join(lines[1:]) + f'}},\n"conversations": [\n{conversations}]}}\n'
    )
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
