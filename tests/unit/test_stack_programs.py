"""The table of programs: who outlives whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from app.errors import InstallationFailed
from app.model_service.gateway.app import LAST_S
from app.model_service.recording.recorder import CLOSE_S
from app.settings import Settings
from app.stack.ports import refuse_in_use
from app.stack.programs import StartStage, programs
from tests.services import free_port, settings_in


def test_the_way_to_the_models_outlives_whoever_walks_it(tmp_path: Path) -> None:
    """Attempts that are told to stop have their calls put on record: by the gateway, in PostgreSQL."""
    table = {one.name: one.stage for one in programs(Settings(home=tmp_path, database_url=None, broker_url=None))}
    order = sorted(StartStage, reverse=True)  # of stopping
    for name in ("gateway", "model"):
        assert order.index(table["launcher"]) < order.index(table[name]) < order.index(table["postgres"])


def _needed_s(command: Sequence[str]) -> float:
    """How long a gateway that is told to stop may take: calls end, cut ones are counted, all of it is written."""
    grace_s = int(command[list(command).index("--grace") + 1])
    return grace_s + LAST_S + CLOSE_S


def test_a_gateway_is_not_killed_before_its_calls_are_on_record(tmp_path: Path) -> None:
    [gateway] = [one for one in programs(Settings(home=tmp_path)) if one.name == "gateway"]
    assert _needed_s(gateway.command) + 5 <= gateway.stop_wait_s
    compose = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text())["services"]["gateway"]
    assert _needed_s(compose["command"]) + 5 <= int(compose["stop_grace_period"].removesuffix("s"))


def test_each_gateway_has_a_port_of_its_own(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, gateways=3, gateway_port=free_port())
    started = [one for one in programs(settings) if one.name.startswith("gateway")]
    assert [one.name for one in started] == ["gateway", "gateway-2", "gateway-3"]
    told = [int(one.command[one.command.index("--port") + 1]) for one in started]
    assert tuple(told) == settings.gateway_ports()
    assert not [one for one in programs(Settings(home=tmp_path, gateway_url="http://a:1")) if "gateway" in one.name]


def test_a_port_that_two_of_ours_want_is_named_before_anything_starts(tmp_path: Path) -> None:
    port = free_port()
    for clash, told in (
        ({"gateway_port": port - 1, "replay_port": port}, rf"{port} for the replay engine.*MEGAFLOW_REPLAY_PORT"),
        ({"gateway_port": port - 1, "metrics_port": port}, rf"{port} for metrics.*MEGAFLOW_METRICS_PORT"),
        ({"gateway_port": 65535}, r"65536 for the model gateway.*MEGAFLOW_GATEWAY_PORT"),
    ):
        with pytest.raises(InstallationFailed, match=told):
            refuse_in_use(settings_in(tmp_path, gateways=2, **clash))
