"""Where calls go, with which key, and what is remembered of engines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest

from app.agents.external import known_agents
from app.errors import LimitInvalid, SpecInvalid
from app.ledger.model_replicas import plain_url
from app.model_service.gateway import routes as routes_module
from app.model_service.gateway.congestion import CongestionWindow
from app.model_service.gateway.engines import waiting_of
from app.model_service.gateway.keys import Keys
from app.model_service.gateway.routes import Routes
from app.model_service.serving import CallRefusal
from app.models.model_calls import ENGINE_FAULTS, CallEnd, ModelLimits, ModelSession
from app.models.spec import ModelChoice
from app.settings import Settings
from app.submission import specs_for

OURS = "https://provider.test/v1"
THEIRS = "http://other.test/v1"
SECRETS = [
    "http://user:s3cret@engine.test/v1",
    "http://s3cret@engine.test/v1",
    "http://engine.test/v1?key=s3cret",
    "http://engine.test/v1#s3cret",
    "http://engine.test:s3cret/v1",
    "http://engine.test:99999/v1",
    "http://engine.test/v1\ns3cret",
]


def routes_of(**values: Any) -> Routes:
    settings = Settings(model_base_url=OURS, model_api_key_env="PROVIDER_SECRET", **values)
    return Routes(settings, cast(Any, None))


def session(base_url: str | None = None, api_key_env: str | None = None) -> ModelSession:
    return ModelSession(
        attempt_id=uuid4(),
        number=1,
        task_id=uuid4(),
        run_id=uuid4(),
        user="u",
        agent="a",
        task_name="t",
        replica=0,
        model=ModelChoice(name="m", base_url=base_url, api_key_env=api_key_env),
        limits=ModelLimits(),
        live=True,
    )


def key_of(routes: Routes, base_url: str | None, api_key_env: str | None) -> str | None:
    target = routes.choose(session(base_url, api_key_env), "m", {})
    assert target is not None
    return target.api_key_env


async def test_the_settings_key_goes_to_the_settings_engine_alone() -> None:
    routes = routes_of()
    assert key_of(routes, None, None) == "PROVIDER_SECRET"
    assert key_of(routes, THEIRS, None) is None


async def test_a_key_goes_only_to_urls_that_it_was_registered_for() -> None:
    routes = routes_of()
    assert key_of(routes, None, "PROVIDER_SECRET") == "PROVIDER_SECRET"
    assert key_of(routes, OURS + "/", "PROVIDER_SECRET") == "PROVIDER_SECRET"
    for url, name in [(THEIRS, "PROVIDER_SECRET"), (OURS, "OTHER_API_KEY"), (None, "OTHER_API_KEY")]:
        with pytest.raises(CallRefusal) as refused:
            routes.choose(session(url, name), "m", {})
        assert f"`megaflow models add m {url or OURS} --api-key-env {name}`" in refused.value.message
        assert refused.value.end in ENGINE_FAULTS, "not the agent's fault"


async def test_a_shared_installation_calls_registered_urls_alone() -> None:
    routes = routes_of(shared_installation=True)
    assert key_of(routes, OURS, None) is None
    with pytest.raises(CallRefusal, match="megaflow models add m http://other"):
        routes.choose(session(THEIRS), "m", {})


@pytest.mark.parametrize("url", SECRETS)
async def test_a_url_with_a_secret_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(LimitInvalid) as refused:
        plain_url(url)
    assert "\ns3cret" in url or "s3cret" not in str(refused.value)

    routes = routes_of()
    with pytest.raises(CallRefusal) as told:
        routes.choose(session(url), "m", {})
    assert told.value.end is CallEnd.UNAUTHORISED
    assert "s3cret" not in told.value.message
    assert not list(routes.engines), "so that /health and /metrics cannot show it"


@pytest.mark.parametrize(
    "wrong",
    [ModelChoice(name="m", base_url=SECRETS[0]), ModelChoice(name="m", api_key_env="sk-s3cret value")],
)
def test_a_submission_with_a_secret_is_refused(wrong: ModelChoice) -> None:

    with pytest.raises(SpecInvalid) as refused:
        specs_for([], agent="nop", mode="auto", model=wrong, known=known_agents(Settings()))
    assert "s3cret" not in str(refused.value)
    good = ModelChoice(name="m", base_url=THEIRS, api_key_env="OTHER_API_KEY")
    assert specs_for([], agent="nop", mode="auto", model=good, known=known_agents(Settings())) == []


async def test_engines_of_no_route_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_module, "_UNROUTED_MOST", 8)

    routes = routes_of()
    held = routes.choose(session("http://held.test/v1"), "m", {})
    assert held is not None
    assert held.engine.window.try_enter()
    for number in range(100):
        routes.choose(session(f"http://engine-{number}.test/v1"), "m", {})
    assert len(list(routes.engines)) <= 9
    assert held.engine in list(routes.engines), "a call is there"
    lone = routes.engine("http://lone.test/v1")
    routes.apply([])
    assert lone not in list(routes.engines)
    await routes.close()


# --- Windows, keys, loads -------------------------------------------------------------------------------------------


async def test_an_engine_that_says_at_once_is_not_asked_at_once() -> None:
    window = CongestionWindow()
    window.busy(time.monotonic(), 0.0)
    assert not window.try_enter()
    for _ in range(1200):
        window.busy(time.monotonic() + 1, 0.0)
    assert 10 < window._paused_until - time.monotonic() <= 15
    window.close()


def test_a_key_file_that_is_no_text_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff\xfe\x00")
    keys = Keys({"ONE": f"file:{tmp_path / 'key'}", "TWO": "file:/no\0where"})
    assert keys.value("ONE") is keys.value("TWO") is None


@pytest.mark.parametrize("value", [b"1.2.3", b"1e999", b"+", b"e"])
def test_odd_metrics_say_nothing(value: bytes) -> None:
    assert waiting_of(b"vllm:num_requests_waiting " + value + b"\n") is None
