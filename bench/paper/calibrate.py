"""Measures the phases of real runs here for the simulation: `calibration.json` beside this file.

    python -m bench.paper.calibrate                      (runs demo tasks on a stack of its own; three minutes)
    python -m bench.paper.calibrate --ledger URL         (of the attempts that this ledger has, instead)

Phases are read from the ledger, as any run leaves them. What an image costs to unpack is measured on the engine: the
files of the base image, packed, imported anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import psycopg
from docker import APIClient

from app.models.spec import EnvironmentKind, Mode
from app.stack import engine
from bench import record, system
from bench.paper.data import CALIBRATION
from bench.system import System

TASK = "pallets__itsdangerous-1"
KINDS = (EnvironmentKind.DOCKER, EnvironmentKind.OCI)
_EACH, _IMPORTS = 12, 5
_SPANS = {
    "start_s": ("image_ready", "environment_ready"),
    "agent_s": ("agent_started", "agent_ended"),
    "grade_s": ("agent_ended", "graded"),
    "store_s": ("graded", "stored"),
    "teardown_s": ("stored", "torn_down"),
}

_PHASES = """
SELECT coalesce(s.body::jsonb->'task'->'environment'->>'kind', 'docker') AS kind, a.mode, a.phases,
    extract(epoch FROM i.ready_at - i.requested_at)::float8 AS boot_s,
    extract(epoch FROM a.dispatched_at - t.accepted_at)::float8 AS admit_s
FROM attempts a JOIN tasks t ON t.id = a.task_id JOIN specs s ON s.digest = t.spec_digest
    LEFT JOIN instances i ON i.id = a.instance_id
WHERE a.state = 'finished' AND a.phases ? 'torn_down'
"""


def of_ledger(url: str) -> dict[str, Any]:
    """Seconds of each phase by kind of environment, of every attempt that went well, and of instances' boots."""
    found: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with psycopg.connect(url) as connection:
        for kind, mode, phases, boot_s, admit_s in connection.execute(_PHASES):
            at = {name: datetime.fromisoformat(when) for name, when in phases.items()}
            for name, (since, until) in _SPANS.items():
                if since in at and until in at:
                    found[kind][name].append((at[until] - at[since]).total_seconds())
            found[kind]["admit_s"].append(admit_s)
            if mode == Mode.EPHEMERAL and boot_s is not None:
                found[kind]["boot_s"].append(boot_s)
    return {kind: dict(spans) for kind, spans in sorted(found.items())}


def _run(ours: System) -> dict[str, Any]:
    for kind in KINDS:
        environment = ours.task.environment.model_copy(update={"kind": kind})
        task = ours.task.model_copy(update={"environment": environment})
        for mode in (Mode.EPHEMERAL, Mode.PERSISTENT):
            for _ in range(_EACH):  # one at a time: what each costs by itself
                ours.torn_down(ours.flow.enqueue(task, agent="oracle", mode=mode).result(timeout=300))
    return of_ledger(ours.settings.database())


def _unpacking(ours: System) -> dict[str, Any]:
    """Seconds and processor seconds of the engine for one image's files, and how large they are, packed and not."""
    client = APIClient(base_url=engine.engine_url(ours.settings), timeout=300)
    made = client.create_container(ours.image, "true")["Id"]
    with tempfile.NamedTemporaryFile(suffix=".tar") as plain, tempfile.TemporaryDirectory() as folder:
        for block in client.export(made):
            plain.write(block)
        client.remove_container(made)
        packed = Path(folder) / "image.tar.gz"
        _pack(Path(plain.name), packed)
        took = [_import(client, packed) for _ in range(_IMPORTS)]
        sizes = {"disk_bytes": Path(plain.name).stat().st_size, "packed_bytes": packed.stat().st_size}
    return {**sizes, "took_s": [one[0] for one in took], "cpu_s": [one[1] for one in took]}


def _pack(plain: Path, packed: Path) -> None:
    import gzip
    import shutil

    with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
        shutil.copyfileobj(source, target, 1 << 20)


def _import(client: APIClient, packed: Path) -> tuple[float, float]:
    before, begun = _engine_cpu_s(), time.monotonic()
    told = json.loads(client.import_image_from_file(str(packed), repository="megaflow-calibration").splitlines()[-1])
    took = time.monotonic() - begun, _engine_cpu_s() - before
    client.remove_image(told["status"], force=True)
    return took


def _engine_cpu_s() -> float:
    """Of the engine and what it starts to unpack."""
    total = 0.0
    for process in psutil.process_iter(["name"]):
        if process.info["name"] in ("dockerd", "containerd"):
            times: Any = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def main() -> int:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(prog="python -m bench.paper.calibrate", description=__doc__)
    parser.add_argument("--ledger", help="read the phases of this database instead of running anything; keeps the rest")
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(CALIBRATION.read_text()) if CALIBRATION.exists() else {}
    if given.ledger:
        kept["environments"] = of_ledger(given.ledger)
    else:
        with system.running(TASK, lambda text: print(text, file=sys.stderr)) as ours:
            kept = {"environments": _run(ours), "unpacking": _unpacking(ours)}
    told = {"measured_at": datetime.now(UTC).isoformat(timespec="seconds"), "machine": record.machine({}).value}
    CALIBRATION.write_text(json.dumps(_rounded({**told, **kept}), indent=1) + "\n")
    print(f"written: {CALIBRATION}")
    return 0


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
