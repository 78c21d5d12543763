"""How images are called, which layers they share, what a registry's words mean, how full is full."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from app.errors import SettingsInvalid
from app.images import references
from app.images.engine_index import layers_of
from app.images.logins import login_for, logins_of
from app.images.registry_refusals import RefusalKind, refusal_of
from app.images.sync import items_of
from app.models.spec import SEVERAL, Build, Bundle, Compose, EnvironmentKind, EnvironmentSpec
from app.settings import Settings


def step(size: int, created_by: str) -> dict[str, object]:
    return {"Size": size, "CreatedBy": created_by}


def recipe(digit: str, dockerfile: str = "Dockerfile") -> EnvironmentSpec:
    bundle = Bundle(sha256=digit * 64, size_bytes=1)
    return EnvironmentSpec(build=Build(context=bundle, dockerfile=dockerfile))


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("python:3.11", ["m:5000/p/library/python:3.11"]),
        ("docker.io/python:3.11", ["m:5000/p/library/python:3.11"]),
        ("swebench/x:1", ["m:5000/p/swebench/x:1"]),
        ("ghcr.io/a/b/c", ["m:5000/p/a/b/c"]),
        ("sha256:" + "a" * 64, []),
        ("ghcr.io/a/b:1@sha256:00ff", ["m:5000/p/a/b:1@sha256:00ff", "m:5000/p/a/b:sha256-00ff"]),
    ],
)
def test_a_mirror_keeps_the_path(reference: str, expected: list[str]) -> None:
    assert references.in_mirror("m:5000/p/", reference) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b", ("a/b", "latest")),
        ("a/b:1", ("a/b", "1")),
        ("a/b@sha256:ff", ("a/b", "sha256:ff")),
        ("b:1@sha256:ff", ("b", "sha256:ff")),
        ("127.0.0.1:5000/b", ("127.0.0.1:5000/b", "latest")),
    ],
)
def test_repository_and_tag_are_told_apart(path: str, expected: tuple[str, str]) -> None:
    assert references.manifest_of(path) == expected


def test_an_image_of_a_dataset_is_synced_once_and_other_recipes_apart() -> None:
    specs = [recipe("1"), EnvironmentSpec(image="x"), recipe("1"), recipe("1", "Other"), recipe("2")]
    specs.append(EnvironmentSpec(kind=EnvironmentKind.LOCAL, image="y"))
    found = items_of(specs, "m:1", "base:1")
    assert [(item.tasks, item.spec.label) for item in found] == [
        (2, "build:111111111111"),
        (1, "x"),
        (1, "build:111111111111"),
        (1, "build:222222222222"),
    ]
    assert len({item.target for item in found}) == 4
    assert items_of(specs, "m:1", "base:2")[0].target != found[0].target


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ('error parsing HTTP 429 response body: unexpected end of JSON input: ""', RefusalKind.BUSY),
        ("toomanyrequests: You have reached your pull rate limit.", RefusalKind.BUSY),
        ("received unexpected HTTP status: 503 Service Unavailable", RefusalKind.BUSY),
        ("manifest unknown", RefusalKind.ABSENT),
        ("manifest for 127.0.0.1:5000/x:1 not found: manifest unknown: manifest unknown", RefusalKind.ABSENT),
        ("unauthorized: authentication required", RefusalKind.DENIED),
        ("pull access denied for x, repository does not exist or may require 'docker login'", RefusalKind.DENIED),
        ("no matching manifest for linux/amd64 in the manifest list entries", RefusalKind.PLATFORM),
        ("reading manifest 1 in r/x: received unexpected HTTP status: 429 Too Many Requests", RefusalKind.BUSY),
        ("reading blob sha256:00: fetching blob: invalid status code from registry 503", RefusalKind.BUSY),
        ("reading blob sha256:00: fetching blob: invalid status code from registry 404", RefusalKind.OTHER),
        ("reading manifest 1 in r/x: StatusCode: 404, page not found", RefusalKind.ABSENT),
        ("no image found in manifest list for architecture amd64, OS linux", RefusalKind.PLATFORM),
        ('Get "http://127.0.0.1:429/v2/": dial tcp 127.0.0.1:500: connect: connection refused', RefusalKind.OTHER),
    ],
)
def test_what_a_registry_says_is_understood(said: str, expected: RefusalKind) -> None:
    assert refusal_of(said) is expected


def test_logins_come_from_the_settings_and_are_never_shown() -> None:
    settings = Settings(registry_auth='{"r:5000": "me:pass:word"}')
    found = login_for(settings, "r:5000")
    assert found == {"username": "me", "password": "pass:word"}
    assert "me:pass" not in repr(settings)
    for wrong in ("hunter2", '["hunter2"]'):
        with pytest.raises(SettingsInvalid) as caught:
            login_for(Settings(registry_auth=wrong), "r:5000")
        assert "hunter2" not in str(caught.value)


def test_a_build_is_told_all_logins_by_the_names_that_the_engine_has_for_registries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert logins_of(Settings()) == {}
    word = base64.b64encode(b"you:word").decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"r:5000": {"auth": word}, "s:5000": {"auth": word}}}))
    found = logins_of(Settings(registry_auth='{"r:5000": "me:pass", "docker.io": "hub:pass"}'))
    assert {name: (login["username"], login["password"]) for name, login in found.items()} == {
        "s:5000": ("you", "word"),
        "r:5000": ("me", "pass"),
        "docker.io": ("hub", "pass"),
        "https://index.docker.io/v1/": ("hub", "pass"),
    }
    (tmp_path / "docker-credential-broken").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "docker-credential-broken").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "config.json").write_text('{"credsStore": "broken"}')
    assert set(logins_of(Settings(registry_auth='{"r:5000": "me:pass"}'))) == {"r:5000"}


def test_a_project_has_a_key_of_its_own_by_what_decides_on_its_images() -> None:
    def project(digit: str = "0", **more: str) -> EnvironmentSpec:
        return EnvironmentSpec(compose=Compose(context=Bundle(sha256=digit * 64, size_bytes=1), **more))

    several = [project(), project("1"), project(file="other.yaml"), project(service="web")]
    assert len({references.key_of(spec) for spec in several}) == 4
    assert references.key_of(project()) == references.key_of(project().model_copy(update={"workdir": "/elsewhere"}))
    assert references.key_of(project()).startswith(SEVERAL)


def test_a_history_that_does_not_fit_loses_no_bytes() -> None:
    found = layers_of(["x", "y"], [step(1, "c"), step(2, "b"), step(4, "a")])
    assert [layer.size_bytes for layer in found] == [4, 3]
    assert [layer.size_bytes for layer in layers_of(["x", "y"], [step(5, "a")])] == [5, 0]
    assert layers_of([], []) == ()
