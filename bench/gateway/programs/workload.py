"""The programs: 256 a seed, kept in programs-SEED.json.gz beside this file.

    python -m bench.gateway.programs.workload     (writes the files again, byte for byte)

How they were drawn. Turns: a Pareto distribution with exponent 1 between 5 and 100, so that half of the programs have
fewer than 10 and most of the work is in the long ones. A conversation begins with 1,500 to 4,000 tokens; each turn adds
the answer (lognormal, median 150 tokens, times a factor of the program itself) and what the tool printed (lognormal,
median 490, at most 8,000), up to 128,000. Tools take 25 ms on average, exponentially.

They arrive by a Poisson process. Its rate is 1.0 of what the engines could do if no prefix were ever computed twice.
"""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path

SEEDS = (1, 2, 3)
PROGRAMS = 256
FEW = 64
USERS = {"alice": 0.4, "bob": 0.3, "carol": 0.2, "dave": 0.1}
"""Each with that share of the programs."""
REPLICAS, SLOTS, CACHED_TOKENS = 2, 2, 100_000
"""Engines, calls at once in each, and the tokens of prefixes that each keeps."""
BASE_S, PROMPT_TOKEN_S, ANSWER_TOKEN_S = 0.0025, 1.25e-6, 2.5e-4
"""What a call takes: for itself, for each token of its prompt that is not kept, for each token of its answer. About a
hundredth of what a large model on one accelerator takes."""
_FOLDER = Path(__file__).parent
_LOAD = 1.0
_FEWEST_TURNS, _MOST_TURNS = 5, 100
_CONTEXT_MOST = 128_000
_TOOL_S = 0.025


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: int  # tokens, the conversation so far among them
    answer: int
    tool_s: float  # after it


@dataclass(frozen=True, slots=True)
class Program:
    at_s: float
    user: str
    turns: tuple[Turn, ...]


def read(seed: int) -> list[Program]:
    """The programs of one seed, in the order in which they come."""
    kept = json.loads(gzip.decompress(_file(seed).read_bytes()))
    return [Program(at, user, tuple(Turn(*turn) for turn in turns)) for at, user, turns in kept]


def _file(seed: int) -> Path:
    return _FOLDER / f"programs-{seed}.json.gz"


def _draw(seed: int) -> list[Program]:
    chance = random.Random(seed)
    drawn = [(chance.choices(list(USERS), list(USERS.values()))[0], _turns(chance)) for _ in range(PROGRAMS)]
    rate = _LOAD * REPLICAS * SLOTS / (sum(_work_s(turns) for _, turns in drawn) / PROGRAMS)
    at_s = 0.0
    found = []
    for user, turns in drawn:
        at_s += chance.expovariate(rate)
        found.append(Program(round(at_s, 4), user, turns))
    return found


def _turns(chance: random.Random) -> tuple[Turn, ...]:
    count = int(_FEWEST_TURNS / (1 - chance.random() * (1 - _FEWEST_TURNS / _MOST_TURNS)))
    words = chance.lognormvariate(0.0, 0.5)
    prompt = chance.randint(1500, 4000)
    turns = []
    for _ in range(count):
        answer = int(min(4000, max(20, words * chance.lognormvariate(5.0, 0.8))))
        turns.append(Turn(prompt, answer, round(chance.expovariate(1 / _TOOL_S), 4)))
        prompt = min(_CONTEXT_MOST, prompt + answer + int(min(8000, chance.lognormvariate(6.2, 1.0))))
    return tuple(turns)


def _work_s(turns: tuple[Turn, ...]) -> float:
    """Engine seconds of a program whose every prefix is kept."""
    before = [0, *(turn.prompt + turn.answer for turn in turns)]
    return sum(
        BASE_S + max(0, turn.prompt - kept) * PROMPT_TOKEN_S + turn.answer * ANSWER_TOKEN_S
        for turn, kept in zip(turns, before, strict=False)
    )


def main() -> None:
    for seed in SEEDS:
        told = [
            [one.at_s, one.user, [[turn.prompt, turn.answer, turn.tool_s] for turn in one.turns]] for one in _draw(seed)
        ]
        _file(seed).write_bytes(gzip.compress(json.dumps(told, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
