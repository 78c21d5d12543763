"""The table of programs: who outlives whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from app.model_service.gateway.app import LAST_S
from app.model_service.recording.ledger import CLOSE_S
from app.settings import Settings
from app.stack.programs import Stage, programs


def test_the_way_to_the_models_outlives_whoever_walks_it(tmp_path: Path) -> None:
    """Attempts that are told to stop have their calls put on record: by the gateway, in PostgreSQL."""
    table = {one.name: one.stage for one in programs(Settings(home=tmp_path, database_url=None, broker_url=None))}
    order = sorted(Stage, reverse=True)  # of stopping
    for name in ("gateway", "model"):
        assert order.index(table["nursery"]) < order.index(table[name]) < order.index(table["postgres"])


def _needed_s(command: Sequence[str]) -> float:
    """How long a gateway that is told to stop may take: calls end, cut ones are counted, all of it is written."""
    grace_s = int(command[list(command).index("--grace") + 1])
    return grace_s + LAST_S + CLOSE_S


def test_a_gateway_is_not_killed_before_its_calls_are_on_record(tmp_path: Path) -> None:
    [gateway] = [one for one in programs(Settings(home=tmp_path)) if one.name == "gateway"]
    assert _needed_s(gateway.command) + 5 <= gateway.stop_wait_s
    compose = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text())["services"]["gateway"]
    assert _needed_s(compose["command"]) + 5 <= int(compose["stop_grace_period"].removesuffix("s"))
