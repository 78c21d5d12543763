"""Large artifacts by links into the store: for a browser's click, for who asks, and never unless it is set."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.request import urlopen

import pytest

from app.artifacts import open_store
from app.ledger.users import Scope
from app.settings import Settings
from tests.integration.test_reports import verdict
from tests.integration.web_fixture import Web, web
from tests.moto_server import serving_moto, some_credentials
from tests.services import MakeSettings

__all__ = ["web"]

_CLICK = {"sec-fetch-mode": "navigate"}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_moto(tmp_path_factory.mktemp("s3") / "server.log") as endpoint:
        yield endpoint


@pytest.fixture
def settings(make_settings: MakeSettings, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    some_credentials(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    open_store("s3://evidence/deep", create_bucket=True)
    return make_settings(artifacts_url="s3://evidence/deep", artifact_links_bytes=10)


def test_a_click_leads_to_the_store_and_scripts_get_the_bytes(web: Web) -> None:
    attempt = web.reports.attempt(web.reports.run("night", {"click-1": verdict(1.0)}))
    path = f"/api/v1/attempts/{attempt.id}/artifacts/patch"
    with web.user() as client:
        content = client.get(path).content
    assert len(content) > 10
    with web.browser() as browser:
        found = browser.get(path, headers=_CLICK, follow_redirects=False)
        assert found.status_code == 302
        assert found.headers["cache-control"] == "no-store"
        with urlopen(found.headers["location"], timeout=10) as reply:
            assert reply.read() == content
            assert reply.headers["Content-Disposition"] == "attachment"
        fetched = browser.get(path, headers={"sec-fetch-mode": "cors"}, follow_redirects=False)
        assert (fetched.status_code, fetched.content) == (200, content)
    with web.user() as client:
        assert client.get(path, params={"link": "true"}, follow_redirects=False).status_code == 302
        assert client.get(path, follow_redirects=False).content == content
    for least in (1 << 20, 0):  # larger than it is, unset
        other = web.settings.model_copy(update={"artifact_links_bytes": least})
        with Web(other, web.database, web.reports).browser() as browser:
            assert browser.get(path, headers=_CLICK, params={"link": "true"}, follow_redirects=False).content == content
    with web.user("another", scope=Scope.READ) as client:
        assert client.get(path, headers=_CLICK, follow_redirects=False).status_code == 404
