"""What a policy gives a task: variables, URLs."""

from __future__ import annotations

import urllib.request

import pytest

from app.environments.networks import PROXY_PORT, exempted, model_base_url, variables
from app.environments.networks.model_port import takes_raw_bytes, upstream_of
from app.errors import SpecInvalid
from app.models.spec import EnvironmentSpec, Network


def test_only_a_task_with_allowed_hosts_is_pointed_at_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for network in (Network.NONE, Network.MODEL_ONLY, Network.OPEN):
        assert variables(EnvironmentSpec(image="any", network=network)) == {}
    found = variables(EnvironmentSpec(image="any", network=Network.ALLOWLIST, allowed_hosts=("index.test",)))
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    proxies = urllib.request.getproxies()
    assert proxies["https"] == proxies["http"] == f"http://127.0.0.1:{PROXY_PORT}"
    assert urllib.request.proxy_bypass("localhost")
    assert not urllib.request.proxy_bypass("index.test")


def test_what_is_near_is_reached_without_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = EnvironmentSpec(image="any", network=Network.ALLOWLIST, allowed_hosts=("index.test",))
    for name, value in variables(spec, ["shop", "10.222.0.2", "shop"]).items():
        monkeypatch.setenv(name, value)
    assert [bool(urllib.request.proxy_bypass(host)) for host in ("shop:8000", "10.222.0.2", "localhost")] == [True] * 3
    assert not urllib.request.proxy_bypass("index.test")
    assert variables(spec, ["shop", "shop"])["NO_PROXY"] == "localhost,127.0.0.1,::1,shop"
    for network in (Network.NONE, Network.MODEL_ONLY, Network.OPEN):
        assert variables(EnvironmentSpec(image="any", network=network), ["shop"]) == {}
        assert exempted(EnvironmentSpec(image="any", network=network), {"NO_PROXY": "mine"}, ["shop"]) == {}


def test_a_command_of_ours_keeps_what_the_task_exempts_and_takes_no_proxy_to_what_is_near() -> None:
    spec = EnvironmentSpec(image="any", network=Network.ALLOWLIST, allowed_hosts=("index.test",))
    assert exempted(spec, {"NO_PROXY": "mine", "no_proxy": "", "PATH": "/bin"}, ["shop"]) == {
        "NO_PROXY": "mine,localhost,127.0.0.1,::1,shop",
        "no_proxy": "localhost,127.0.0.1,::1,shop",
    }


def test_the_model_keeps_its_path_inside() -> None:
    assert model_base_url("https://api.example.org/v1") == "http://127.0.0.1:8411/v1"
    assert model_base_url("http://10.0.0.1:8000") == "http://127.0.0.1:8411"


@pytest.mark.parametrize(
    ("url", "name", "header", "raw"),
    [
        ("http://127.0.0.1:8000/v1", "127.0.0.1:8000", "127.0.0.1:8000", True),
        ("http://LOCALHOST:8000/v1", "localhost:8000", "localhost:8000", True),
        ("http://[::1]:8000", "[::1]:8000", "[::1]:8000", True),
        ("http://gateway/v1", "gateway:80", "gateway", False),
        ("https://api.example.org/v1", "api.example.org:443", "api.example.org", False),
        ("https://10.0.0.1/v1", "10.0.0.1:443", "10.0.0.1", False),
        ("https://api.example.org:8443/v1", "api.example.org:8443", "api.example.org:8443", False),
    ],
)
def test_an_endpoint_is_named_as_its_server_expects(url: str, name: str, header: str, raw: bool) -> None:
    found = upstream_of(url)
    assert (found.name, found.host_header, takes_raw_bytes(found)) == (name, header, raw)


@pytest.mark.parametrize(
    "url",
    ["", "api.example.org", "ftp://example.org", "http://", "http://u:p@example.org", "http://h:99999", "http://a b"],
)
def test_what_is_no_models_url_is_refused(url: str) -> None:
    with pytest.raises(SpecInvalid, match="expected the model's URL"):
        upstream_of(url)
