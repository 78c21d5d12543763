"""The settings: every knob known, every typo refused."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from uuid import uuid4

import pytest

from app.celery_app import CONTROL, build, options
from app.errors import SettingsInvalid
from app.settings import Settings
from app.stack.home import prepare
from tests.services import unset


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    unset(monkeypatch)


def test_a_misspelt_variable_is_refused_and_the_known_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAFLOW_LEASE_SECONDS", "3")
    with pytest.raises(SettingsInvalid, match=r"MEGAFLOW_LEASE_SECONDS.*MEGAFLOW_LEASE_S"):
        Settings()


def test_a_malformed_value_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAFLOW_LEASE_S", "sk-secret")
    with pytest.raises(SettingsInvalid, match="MEGAFLOW_LEASE_S") as found:
        Settings()
    assert "sk-secret" not in str(found.value)


def test_urls_in_the_environment_replace_the_embedded_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAFLOW_DATABASE_URL", "postgresql://u:p@db/x")
    monkeypatch.setenv("MEGAFLOW_BROKER_URL", "redis://r:6379/0")
    settings = Settings()
    assert not settings.embeds_postgres
    assert not settings.embeds_redis
    assert settings.database() == "postgresql://u:p@db/x"
    assert settings.redis() == "redis://r:6379/0"
    assert "p@db" not in repr(settings)


def test_gateways_are_those_of_this_host_or_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().gateway_bases() == ("http://127.0.0.1:8766",)
    assert Settings(gateways=2, gateway_port=9000).gateway_bases() == ("http://127.0.0.1:9000", "http://127.0.0.1:9001")
    assert Settings(bind="::").gateway_bases() == ("http://[::1]:8766",)
    assert Settings(bind="10.0.0.5").replay_endpoint() == "http://10.0.0.5:8765/v1"
    monkeypatch.setenv("MEGAFLOW_GATEWAY_URL", "http://a:1/, https://b:2,http://a:1")
    assert Settings().gateway_bases() == ("http://a:1", "https://b:2")
    assert Settings().gateway_ports() == ()
    with pytest.raises(SettingsInvalid, match=r"MEGAFLOW_GATEWAYS: .*expected 1 beside MEGAFLOW_GATEWAY_URL"):
        Settings(gateways=2)


@pytest.mark.parametrize(
    "wrong", ["b:2", "http://", "http://a:1:https://b:2", "http://a/v1", "http://u:p@a", "http://a:99999", "ftp://a"]
)
def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("MEGAFLOW_GATEWAY_URL", f"http://well:1,{wrong}")
    with pytest.raises(SettingsInvalid, match=r"MEGAFLOW_GATEWAY_URL: .*expected http://HOST:PORT"):
        Settings()


def test_an_attempt_keeps_to_one_gateway_and_one_more_takes_only_its_share() -> None:
    attempts = [uuid4() for _ in range(600)]
    three, four = Settings(gateways=3), Settings(gateways=4)
    before = {attempt: three.gateway_of(attempt) for attempt in attempts}
    assert before[attempts[0]] == Settings(gateways=3).gateway_of(attempts[0])
    assert all(130 < count < 270 for count in Counter(before.values()).values())
    moved = {four.gateway_of(attempt) for attempt in attempts if four.gateway_of(attempt) != before[attempt]}
    assert moved == {"http://127.0.0.1:8769"}


def test_another_process_has_the_same_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = Settings(
        home=tmp_path,
        gateway_url="http://a:1,https://b:2",
        web_proxies="127.0.0.1,10.0.0.0/8",
        shared_installation=True,
        replay_scripts="/a:/b",
        agent_manifests=(Path("/one.yaml"),),
        flower_password="secret",
        swe_agent_source="https://host.example/agent@v1",
        lease_s=7.5,
        image_prefetch=False,
    )
    for name, value in mine.variables().items():
        monkeypatch.setenv(name, value)
    assert Settings() == mine
    nothing = Settings(home=tmp_path, gateway_url="", replay_scripts="")
    for name, value in nothing.variables().items():
        monkeypatch.setenv(name, value)
    again = Settings()
    assert (again.gateway_url, again.replay_scripts) == ((), ())


def test_each_home_has_a_name_of_its_own_and_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two homes on one engine: under one name each would sweep the other's containers."""
    first, second = Settings(home=tmp_path / "a/My Home"), Settings(home=tmp_path / "b/My Home")
    assert re.fullmatch(r"my-home-[0-9a-f]{8}", first.installation)
    assert re.fullmatch(r"my-home-[0-9a-f]{8}", second.installation)
    assert first.installation != second.installation
    (tmp_path / "home").mkdir()
    (tmp_path / "home/installation").touch()  # its maker was killed
    prepare(Settings(home=tmp_path / "home"))
    assert (tmp_path / "home/installation").read_text() == Settings(home=tmp_path / "home").installation + "\n"
    (tmp_path / "link").symlink_to("home")
    assert (tmp_path / "home/artifacts").stat().st_mode & 0o777 == 0o700
    name = Settings(home=tmp_path / "home").installation
    assert Settings(home=tmp_path / "link").installation == name, "one folder, two paths"
    (tmp_path / "home/logs/supervisord.log").touch()
    (tmp_path / "home").rename(tmp_path / "moved")
    prepare(Settings(home=tmp_path / "moved", installation="other"))
    assert Settings(home=tmp_path / "moved").installation == name
    monkeypatch.setenv("MEGAFLOW_INSTALLATION", "mine")
    assert Settings(home=tmp_path / "moved").installation == "mine"


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "installation").write_text("Two words\n")
    with pytest.raises(SettingsInvalid, match="MEGAFLOW_INSTALLATION"):
        Settings(home=tmp_path)
    with pytest.raises(SettingsInvalid, match="LEASE_S"):
        Settings(lease_s=float("inf"))
    with pytest.raises(SettingsInvalid, match="MEGAFLOW_HOME: expected the absolute path"):
        Settings(home=Path(""))
    with pytest.raises(SettingsInvalid, match="MEGAFLOW_HOME: expected the absolute path") as found:
        Settings(home=Path("home"))
    assert "MEGAFLOW_INSTALLATION" not in str(found.value)


def test_every_option_reaches_celery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery ignores names that it does not know; so compare with its own defaults."""
    from celery.app.defaults import NAMESPACES, flatten

    known = {name for name, _ in flatten(NAMESPACES)}
    settings = Settings()
    wanted = options(settings)
    assert set(wanted) - known == set()
    conf = build(settings).conf
    for name, value in wanted.items():
        assert conf[name] == value, name
    assert conf.worker_disable_prefetch is True
    assert conf.task_acks_late is False
    names = [CONTROL, "ephemeral.standard", "persistent.standard", "grading.standard"]
    assert [queue.name for queue in conf.task_queues] == names
    assert len({queue.exchange.name for queue in conf.task_queues[1:]}) == 3, "no message may reach two"


def test_an_empty_folder_that_is_made_a_home_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(0o755)
    prepare(Settings(home=tmp_path / "home"))
    assert (tmp_path / "home").stat().st_mode & 0o006 == 0
