"""Task folders: Terminal-Bench 1 and 2. The same mistake, in a folder that is no repository."""

from __future__ import annotations

from collections.abc import Mapping

from tests.matrix.fixture import Fixture, Kind, named
from tests.matrix.repository import BUG, FILES, FIX, HIDDEN_TESTS, MISTAKE, SENTENCE, TEST_FILE, Image, Patches

_RECIPE = "ARG BASE_IMAGE=megaflow/base:bookworm\nFROM ${BASE_IMAGE}\nWORKDIR /app\nCOPY src /app/src\n"
_SOURCE = {name: FILES[name] for name in FILES if name.startswith("src/")}
_COMPOSE = """services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
      - ${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}
"""
_TASK_YAML = f"""instruction: |-
  {SENTENCE}
  Correct it in /app.
author_name: MegaFlow
difficulty: easy
category: software-engineering
tags: [python]
parser_name: pytest
max_agent_timeout_sec: 180.0
max_test_timeout_sec: 60.0
run_tests_in_same_shell: false
megaflow:
  network: none
"""
_TESTED = "cd /app && PYTHONPATH=src python3 -m pytest -p no:cacheprovider"


def _below(folder: str, files: Mapping[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def _solved(kind: Kind) -> str:
    body = MISTAKE if kind is Kind.WRONG else FIX
    return f"#!/bin/bash\nsed -i 's/{BUG.replace('[', '.').replace(']', '.')}/{body}/' /app/src/shop/cart.py\n"


def terminal_bench(patches: Patches) -> Fixture:
    del patches
    names = named("shop-cart-{}")
    coloured = f"#!/bin/bash\n{_TESTED} --color=yes $TEST_DIR/test_outputs.py -rA\nexit 3\n"
    files: dict[str, str] = {}
    for kind, name in names.items():
        tested = f"#!/bin/bash\n{_TESTED} $TEST_DIR/test_outputs.py -rA\n"
        files |= _below(
            name,
            {
                "task.yaml": _TASK_YAML, "Dockerfile": _RECIPE, "docker-compose.yaml": _COMPOSE, **_SOURCE,
                "run-tests.sh": coloured if kind is Kind.PECULIAR else tested, "solution.sh": _solved(kind),
                "tests/test_outputs.py": HIDDEN_TESTS[TEST_FILE],
            },
        )  # fmt: skip
    return Fixture(
        dataset="terminal-bench",
        title="Terminal-Bench",
        source="terminal-bench 0.2.18, handlers/trial_handler.py (task.yaml) and parsers/pytest_parser.py",
        peculiarity="pytest's summary decides, in colours too; the exit code of run-tests.sh means nothing",
        names=names,
        files=files,
    )


def terminal_bench_2(patches: Patches) -> Fixture:
    del patches
    names = named("shop-total-{}")
    image = "alexgshaw/shop-total:20251031"
    files: dict[str, str] = {}
    for kind, name in names.items():
        strange = kind is Kind.PECULIAR
        prebuilt = f'docker_image = "{image}"\n' if strange else ""
        as_json = 'printf \'{"reward": %s, "tests": 3}\' $reward >/logs/verifier/reward.json\n'
        rewarded = as_json if strange else "echo $reward >/logs/verifier/reward.txt\n"
        files |= _below(
            name,
            {
                "task.toml": 'version = "1.0"\n[metadata]\nauthor_name = "MegaFlow"\n[agent]\ntimeout_sec = 180.0\n'
                f"[verifier]\ntimeout_sec = 60.0\n[environment]\n{prebuilt}allow_internet = false\n"
                "workdir = \"/app\"\n",
                "instruction.md": f"{SENTENCE}\nCorrect it in /app.\n", "environment/Dockerfile": _RECIPE,
                **_below("environment", _SOURCE), "solution/solve.sh": _solved(kind),
                "tests/test.sh": f"#!/bin/bash\n{_TESTED} /tests/test_outputs.py -rA && reward=1 || reward=0\n"
                f"{rewarded}",
                "tests/test_outputs.py": HIDDEN_TESTS[TEST_FILE],
            },
        )  # fmt: skip
    return Fixture(
        dataset="terminal-bench-2",
        title="Terminal-Bench 2",
        source="harbor 0.25.0, models/task/config.py and verifier/verifier.py",
        peculiarity="an image that was built before, and a reward.json of several numbers in place of reward.txt",
        names=names,
        files=files,
        images=(Image((image,), place="/app", workdir="/app"),),
        in_table=False,
    )
