"""What commands that change something answer to programs: the keys that their help names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import ANY

from app.cli.json_keys import KEYS
from app.ledger.events import EventRecord
from tests.integration.command import CommandLine


def test_what_changes_something_says_what_in_json(megaflow: CommandLine) -> None:
    def answered(words: str, *more: object) -> dict[str, Any]:
        found: dict[str, Any] = megaflow.json(*words.split(), *more)
        assert set(found) == set(re.sub(r" \[.*?\]", "", KEYS[words]).split()), words
        return found

    run = megaflow.json("submit", "demo", "--agent", "nop", "--limit", 2, "--name", "night")
    ids = {task["task_id"] for task in run["tasks"]}
    assert set(answered("cancel", run["run_id"])["task_ids"]) == ids
    assert answered("cancel", run["run_id"]) == {"task_ids": []}
    told = answered("logs", min(ids))
    assert [event["kind"] for event in told["events"]] == ["task.cancel_requested"]
    assert set(told["events"][0]) == set(EventRecord._fields)
    assert told["agent_log"] == told["test_report"] == "none: no attempt has ended"
    assert set(answered("retry", run["run_id"], "--cancelled")["task_ids"]) == ids
    added = answered("schedule add", "nightly", "0 3 * * *", "demo", "--agent", "nop", "--limit", 1)
    assert added == {"name": "nightly", "cron": "0 3 * * *", "tasks": 1, "next": ANY}
    assert added["next"] == megaflow.json("schedule", "list")[0]["next"]
    assert answered("schedule remove", "nightly") == {"name": "nightly"}
    megaflow("classes", "set", "gpu", "--gpus", 1)
    assert answered("classes remove", "gpu") == {"name": "gpu"}
    hook = answered("webhooks add", "http://127.0.0.1:1/")
    assert answered("webhooks remove", hook["id"])["url"] == hook["url"]


def test_a_rehearsal_of_a_training_says_its_plan_in_json(megaflow: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    steps = {"steps": 1, "groups": 1, "replicas": 2, "scale": 1, "frameworks": {"nop": 1}}
    file.write_text(
        json.dumps({"name": "n", "policy": "p", "datasets": ["demo"], "trainer": {"kind": "external"}, **steps})
    )
    told = megaflow.json("train", file, "--dry-run")
    assert told["plan"][-1] == "would go on at step 0", told
    assert told["problems"] == []
