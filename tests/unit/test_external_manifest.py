"""Manifests and results of external agents: what is right is read, what is wrong is told and never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.agents.external import external_traits, read
from app.agents.external.framework import ENDINGS, MAY_SAY, RESULT, ending
from app.agents.external.manifest import read_all
from app.agents.framework import Ended, Placement, Stop
from app.errors import SettingsInvalid
from app.models.endings import EndReason
from app.models.model_calls import Dialect
from app.settings import Settings
from tests.contract.agents.example import EXAMPLE

GOOD = 'protocol = "megaflow-agent/1"\nname = "mine"\nversion = "2"\nargv = ["{tool}/run"]\n'


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    file = tmp_path / "agent.toml"
    file.write_text(GOOD)
    return file


def test_the_example_is_one() -> None:
    found = read(EXAMPLE)
    assert (found.name, found.placement, found.speaks) == ("sketch", Placement.OUTSIDE, Dialect.CHAT)
    assert (found.folder / "agent.py").is_file()


def test_producers_learn_what_a_task_needs(manifest: Path) -> None:
    inside = manifest.with_name("inside.toml")
    inside.write_text(GOOD.replace("mine", "within") + 'placement = "inside"\nneeds_model = false\nsummary = "s"\n')
    found = external_traits(Settings(agent_manifests=(manifest, inside)))
    assert found["mine"].needs_model
    assert found["mine"].tools == ()
    assert (found["within"].needs_model, found["within"].tools, found["within"].summary) == (False, ("within",), "s")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("megaflow-agent/1", "megaflow-agent/2"), "megaflow-agent/1.*found 'megaflow-agent/2'"),
        (('name = "mine"\n', ""), "name: expected a value"),
        (('"mine"', '"Not A Name"'), "name: "),
        (('argv = ["{tool}/run"]', "argv = []"), "argv: "),
        (('argv = ["{tool}/run"]', 'argv = "run"'), "argv: "),
        (('version = "2"', 'version = "2"\nverson = "2"'), "verson: "),
        (('version = "2"', 'version = "2"\nplacement = "beside"'), "placement: "),
        (('version = "2"', 'version = "2"\ndialect = "klingon"'), "dialect: "),
        (('version = "2"', 'version = "2"\nbundle = "nowhere"'), "'nowhere'"),
        (('version = "2"', 'version = "2"\nbundle = "x"\ninstall = ["true"]'), "found both"),
        (('version = "2"', 'version = "2"\nfile = "x"'), "unknown key 'file'"),
        (('["{tool}/run"]', '["run"]\nplacement = "inside"'), "{tool}"),
        (('name = "mine"', "name = "), "in TOML"),
    ],
)
def test_a_wrong_manifest_is_refused_by_the_name_of_its_key(
    manifest: Path, change: tuple[str, str], complaint: str
) -> None:
    manifest.write_text(GOOD.replace(*change))
    with pytest.raises(SettingsInvalid, match=complaint) as refused:
        read(manifest)
    assert str(manifest) in str(refused.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match="in TOML"):
        read(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsInvalid, match="in TOML"):
        read(tmp_path / "binary.toml")


def test_names_are_used_once_and_ours_are_ours(manifest: Path) -> None:
    again = manifest.with_name("again.toml")
    again.write_text(GOOD)
    with pytest.raises(SettingsInvalid, match=r"as in .*agent\.toml"):
        read_all([manifest, again])
    again.write_text(GOOD.replace("mine", "oracle"))
    with pytest.raises(SettingsInvalid, match="which MegaFlow uses"):
        external_traits(Settings(agent_manifests=(again,)))


RIGHT: dict[str, Any] = {
    "protocol": "megaflow-agent/1",
    "end_reason": "submitted",
    "detail": "done",
    "steps": 3,
    "usage": {"prompt_tokens": 5},
}


@pytest.fixture
def ended(tmp_path: Path) -> Ended:
    for name in ("stdout", "stderr"):
        (tmp_path / name).write_text(f"what it wrote to {name}\n")
    (tmp_path / "home").mkdir()
    return Ended(Stop.ITSELF, 1, tmp_path / "stdout", tmp_path / "stderr", tmp_path / "home")


def test_a_result_is_taken_as_it_says(ended: Ended) -> None:
    (ended.home / RESULT).write_text(json.dumps(RIGHT))
    found = ending(ended)
    assert (found.reason, found.detail, found.steps) == (EndReason.SUBMITTED, "done", 3)
    assert found.usage == {"prompt_tokens": 5.0}


@pytest.mark.parametrize("reason", MAY_SAY)
def test_every_end_that_an_adapter_may_tell_is_taken(ended: Ended, reason: EndReason) -> None:
    (ended.home / RESULT).write_text(json.dumps({"protocol": "megaflow-agent/1", "end_reason": reason}))
    assert ending(ended).reason is reason is ENDINGS[reason.value]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"protocol": "megaflow-agent/9"}, "megaflow-agent/9"),
        ({"protocol": None}, "protocol: "),
        ({"end_reason": "cancelled"}, "end_reason"),
        ({"end_reason": ["submitted"]}, "end_reason"),
        ({"reward": 1.0}, "reward"),
        ({"detail": {}}, "detail"),
        ({"steps": -1}, "steps"),
        ({"steps": True}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"usage": [1]}, "usage"),
        ({"usage": {"cost_usd": -1}}, "cost_usd"),
        ({"usage": {"a\0": 1}}, "usage"),
        ({"usage": {"cost_usd": "1"}}, "cost_usd"),
        ({"usage": {"cost_usd": float("nan")}}, "cost_usd"),
        ({"usage": {"cost_usd": float("inf")}}, "cost_usd"),
        ({"usage": {str(at): 1 for at in range(100)}}, "usage"),
    ],
)
def test_a_wrong_result_is_the_adapters_error_and_says_why(
    ended: Ended, change: dict[str, Any], complaint: str
) -> None:
    (ended.home / RESULT).write_text(json.dumps(RIGHT | change))
    found = ending(ended)
    assert found.reason is EndReason.AGENT_ERROR
    assert complaint in found.detail


def test_no_result_is_told_with_what_it_wrote(ended: Ended) -> None:
    found = ending(ended)
    assert found.reason is EndReason.AGENT_ERROR
    assert "exit code 1" in found.detail
    assert "what it wrote to stderr" in found.detail


def test_a_link_is_no_result(ended: Ended, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text(json.dumps(RIGHT))
    (ended.home / RESULT).symlink_to(tmp_path / "elsewhere")
    assert ending(ended).reason is EndReason.AGENT_ERROR
