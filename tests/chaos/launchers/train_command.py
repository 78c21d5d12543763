"""Programs of the case that kills `megaflow train`: the command itself, and a trainer elsewhere that trains nothing.

python -m tests.chaos.launchers.train_command loop FILE LOG
python -m tests.chaos.launchers.train_command consumer FILE URL TOKEN LOG
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from uuid import UUID

import yaml

from app.cli import main
from app.client import MegaFlow
from app.errors import MegaFlowError
from app.experience.http import HttpExperience
from app.ledger import experience, training
from app.model_service.publishing import publish

_TRAIN_S = 0.3
_CONSUMER = "chaos"


def _loop(file: str, log: str) -> None:
    """The command; its exit code is written down, and once it has done everything it is not run again."""
    sys.argv = ["megaflow", "train", file]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    with Path(log).open("a") as ends:
        ends.write(f"{code}\n")
    if code == 0:
        threading.Event().wait()
    sys.exit(code)


def version_of(name: str, step: int) -> str:
    """What the consumer calls the weights after a step."""
    return f"{name}-v{step + 1}"


def _consume(file: str, url: str, token: str, log: str) -> None:
    """Every step in its order; what is left of each is asked for, never remembered."""
    config = yaml.safe_load(Path(file).read_text())
    with MegaFlow() as flow:
        step = 0
        while step < config["steps"]:
            try:
                _train(flow, config, step, url, token, Path(log))
                step += 1
            except (MegaFlowError, OSError) as error:
                print(f"step {step}: again: {error}", flush=True)
                time.sleep(0.3)
    threading.Event().wait()


def _train(flow: MegaFlow, config: dict[str, object], step: int, url: str, token: str, log: Path) -> None:
    name, policy, groups = str(config["name"]), str(config["policy"]), int(str(config["groups"]))
    version = version_of(name, step)
    if training.version_state(flow.database, policy, version) == "live":
        return
    run_id = training.run_of(flow.database, "default", f"train:{name}:step-{step}")
    client = HttpExperience(
        url, token, f"{name}-step-{step}", policy=policy, consumer=_CONSUMER, max_staleness=0, patience_s=5
    )
    while run_id is None or (missing := groups - _settled(flow, run_id)) > 0:
        if run_id is None:
            time.sleep(0.2)
            run_id = training.run_of(flow.database, "default", f"train:{name}:step-{step}")
            continue
        batch = client.next_batch(missing, wait_s=1.0)
        if batch is None:
            continue
        with log.open("a") as taken:
            taken.write(json.dumps({"lease": batch.lease, "groups": sorted(batch.groups())}) + "\n")
        time.sleep(_TRAIN_S)
        client.publish(version)
        client.commit(batch, version)
    publish(flow.settings, flow.database, policy, version, takes_over=True, unverified=True)


def _settled(flow: MegaFlow, run_id: UUID) -> int:
    counts = experience.counts(flow.database, run_id)
    return counts.committed + counts.equal + counts.stale + counts.lost


if __name__ == "__main__":
    {"loop": _loop, "consumer": _consume}[sys.argv[1]](*sys.argv[2:])
