"""Part 6, rollout: mini-swe-agent through all of MegaFlow, beside the same framework run by hand on the same answers.

Both have the same installation, prompts, image and replay engine, which answers at once: all that we add shows.
By hand means the framework's own command line and its own docker environment, with their defaults, straight at the
engine: no gateway, no record, no bridge. Compared is what both do: container, framework, every step of it, until
the framework has ended. Ours is from claimed to the agent's end; what only ours does (instance, patch, grading,
artifacts, teardown) is told apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from app.agents.installation import Installer
from app.agents.mini_swe_agent.adapter import MiniSweAgent
from app.host.engine import engine_of
from app.models.outcome import Phase, TaskResult
from app.models.spec import AgentTask, Mode
from app.stack import engine
from bench import system
from bench.control_figures import median_ratio
from bench.control_record import Part
from bench.environments import agent as scripted
from bench.environments.figures import Panel
from bench.gateway.crew import Say
from bench.record import Row, row
from bench.system import System

GOAL_TIMES = 1.05
TASK = "pallets__itsdangerous-1"
BY_HAND = "mini-swe-agent by hand"
OURS = {Mode.EPHEMERAL: "MegaFlow, ephemeral", Mode.PERSISTENT: "MegaFlow, persistent"}
_WORDS = "Keep a diary of modules, as the benchmark's script says"
_LABEL = "megaflow.bench=rollout"
_TIMEOUT_S = 900
_SPANS = {
    "environment": (Phase.CLAIMED, Phase.ENVIRONMENT_READY),
    "agent": (Phase.AGENT_STARTED, Phase.AGENT_ENDED),
    "rest": (Phase.AGENT_ENDED, Phase.TORN_DOWN),
}


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int = 5
    steps: tuple[int, ...] = (20, 100)


QUICK = Scale(rounds=1, steps=(5,))

Found = dict[str, list[dict[str, float]]]


def measure(scale: Scale, say: Say) -> Part:
    """Raises: MegaFlowError, RuntimeError: no engine, no framework, or a rollout that did not do its task."""
    rows: list[Row] = []
    panels: list[Panel] = []
    found: dict[int, Found] = {}
    with tempfile.TemporaryDirectory(prefix="mfb-") as folder:
        scripts = Path(folder) / "scripts"
        scripts.mkdir()
        for steps in scale.steps:
            (scripts / f"bench-{steps}.yaml").write_text(yaml.safe_dump(script(steps)))
        with system.running(TASK, say, replay_scripts=(scripts,)) as running, _swept(running):
            say("installing the framework")
            mini = MiniSweAgent(Installer(running.settings.tools)).install().folder / "bin" / "mini"
            for steps in scale.steps:
                found[steps] = _rounds(scale.rounds, steps, running, mini, Path(folder), say)
    for steps, taken in found.items():
        rows += _rows(f"rollout of {steps} steps", taken)
        shown = {name: [median(told["whole"] for told in rounds)] for name, rounds in taken.items()}
        panels.append(Panel(f"rollout of {steps} steps, until the agent's end", "s", shown))
    return Part(rows, {"found": found, "scale": scale, "panels": panels}, {MiniSweAgent.name: MiniSweAgent.version})


def script(steps: int) -> dict[str, Any]:
    """The model's side: so many commands, then the submission."""
    turns: list[dict[str, Any]] = [{"thought": "On.", "command": command} for command in scripted.script(steps)]
    return {"match": words(steps), "turns": [*turns, {"thought": "Done.", "submit": True}]}


def words(steps: int) -> str:
    """The sentence by which the replay engine knows the conversation."""
    return f"{_WORDS}: {steps} steps."


def _rounds(count: int, steps: int, running: System, mini: Path, folder: Path, say: Say) -> Found:
    task = _task(running.task, steps)
    ways: dict[str, Callable[[], dict[str, float]]] = {
        BY_HAND: partial(_by_hand, running, task, mini, folder),
        **{name: partial(_ours, running, task, mode) for mode, name in OURS.items()},
    }
    say("walking all ways once")
    for walk in ways.values():
        walk()
    found: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    names = list(ways)
    for number in range(count):
        for offset in range(len(names)):
            name = names[(number + offset) % len(names)]
            say(f"{steps} steps, round {number + 1} of {count}: {name}")
            found[name].append(ways[name]())
    return dict(found)


def _task(task: AgentTask, steps: int) -> AgentTask:
    limits = task.limits.model_copy(update={"max_steps": steps + 10})
    return task.model_copy(update={"name": f"bench-{steps}", "description": words(steps), "limits": limits})


# --- Ours -----------------------------------------------------------------------------------------------------------


def _ours(running: System, task: AgentTask, mode: Mode) -> dict[str, float]:
    handle = running.flow.enqueue(task, agent="mini-swe-agent", mode=mode, model="replay")
    result = handle.result(timeout=_TIMEOUT_S)
    if result.end_reason is None or result.end_reason.value != "submitted":
        raise RuntimeError(f"expected a rollout that submits; found {result.end_reason}: {result.failure}")
    return spans(running.torn_down(result))


def spans(result: TaskResult) -> dict[str, float]:
    """Seconds of the parts of an attempt; `whole` is what is compared."""
    phases = result.attempts[-1].phases

    def between(begin: Phase, end: Phase) -> float:
        return (phases[end] - phases[begin]).total_seconds()

    told = {name: between(*doors) for name, doors in _SPANS.items() if set(doors) <= phases.keys()}
    return {"whole": between(Phase.CLAIMED, Phase.AGENT_ENDED), **told}


# --- By hand --------------------------------------------------------------------------------------------------------


def _by_hand(running: System, task: AgentTask, mini: Path, folder: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        home = Path(place)
        trajectory = home / "mini.traj.json"
        (home / "job.yaml").write_text(yaml.safe_dump(configuration(task, running.image)))
        command = [
            str(mini),
            "-c",
            "mini.yaml",
            "-c",
            str(home / "job.yaml"),
            "-o",
            str(trajectory),
        ]
        begun = time.monotonic()
        done = subprocess.run(  # noqa: S603 (the framework's own command line)
            command,
            env=_variables(running, mini, home),
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        whole_s = time.monotonic() - begun
        status = _status(trajectory)
        if status != "Submitted":
            raise RuntimeError(
                f"{BY_HAND}: expected a submission; found {status!r}: {(done.stdout + done.stderr)[-800:]}"
            )
    return {"whole": whole_s}


def configuration(task: AgentTask, image: str) -> dict[str, Any]:
    """What is laid over the framework's mini.yaml: the same as by us, but for the environment."""
    return {
        "run": {"task": task.description},
        "agent": {"mode": "yolo", "confirm_exit": False, "step_limit": task.limits.max_steps, "cost_limit": 0},
        "model": {
            "model_name": "openai/replay",
            "cost_tracking": "ignore_errors",
            "model_kwargs": {"timeout": 120.0, "max_retries": 0},
        },
        "environment": {
            "environment_class": "docker",
            "image": image,
            "cwd": task.environment.workdir,
            "timeout": int(task.limits.command_timeout_s),
            "run_args": ["--rm", "--label", _LABEL],
        },
    }


def _variables(running: System, mini: Path, home: Path) -> dict[str, str]:
    return {
        "PATH": f"{mini.parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "DOCKER_HOST": engine.engine_url(running.settings),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": str(home / "mswea"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MODE": "PRODUCTION",
        "OPENAI_API_BASE": running.settings.replay_endpoint(),
        "OPENAI_API_KEY": "none",
    }


def _status(trajectory: Path) -> str:
    if not trajectory.exists():
        return ""
    told = json.loads(trajectory.read_text())
    return str(told.get("info", {}).get("exit_status", ""))


@contextmanager
def _swept(running: System) -> Iterator[None]:
    """The framework ends its containers by itself, ten seconds later; here nothing may be left at the end."""
    try:
        yield
    finally:
        connected = engine_of(running.settings)
        for container in connected.api.containers(all=True, filters={"label": _LABEL}):
            connected.remove(container["Id"])


# --- Figures --------------------------------------------------------------------------------------------------------


def _rows(label: str, found: Found) -> list[Row]:
    by_hand = [told["whole"] for told in found[BY_HAND]]
    rows = [row(f"{label}: {BY_HAND}", median(by_hand), "s")]
    for name in OURS.values():
        rounds = found[name]
        rows.append(row(f"{label}: {name}", median(told["whole"] for told in rounds), "s"))
        rows += [
            row(f"{label}: {name}: {span}", median(told[span] for told in rounds), "s")
            for span in _SPANS
            if all(span in told for told in rounds)
        ]
        ratio = median_ratio([told["whole"] for told in rounds], by_hand)
        rows.append(row(f"{label}: {name}, against {BY_HAND}", ratio, "x", goal=GOAL_TIMES, better="less"))
    return rows
