"""Names of limits: which can be set, what stands for all, where the others are set."""

from __future__ import annotations

import pytest

from app.errors import LimitInvalid
from app.images.task_images import registry_of
from app.ledger.limits import kind_of
from app.model_service.limiter import CallLimit, limits_of

WHO = {"user": "alice", "run": "r1", "model": "org/m:7b"}


def test_a_name_is_a_kind_and_a_subject_which_may_hold_colons() -> None:
    assert kind_of("image_pulls:localhost:5000") == ("image_pulls", "localhost:5000")
    assert kind_of("model_tokens:model:org/m:7b") == ("model_tokens:model", "org/m:7b")
    assert kind_of("environment_starts:*") == ("environment_starts", "*")


@pytest.mark.parametrize("name", ["", ":", "image_pulls", "image_pulls:", "model_tokens:alice", "Image_pulls:x", "x:y"])
def test_an_unknown_name_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(LimitInvalid, match=r"known: environment_starts:NAME.*nothing was changed"):
        kind_of(name)


@pytest.mark.parametrize(
    ("name", "better"), [("slots:ephemeral.standard", "classes set"), ("quota:running:bob", "quota set")]
)
def test_a_limit_that_lives_elsewhere_says_where(name: str, better: str) -> None:
    with pytest.raises(LimitInvalid, match=better):
        kind_of(name)


def test_a_call_is_bound_by_what_is_set_for_it_and_else_for_all() -> None:
    capacities = {
        "model_requests:user:alice": 5,
        "model_requests:user:*": 1,
        "model_tokens:run:*": 100,
        "model_concurrency:model:org/m:7b": 2,
        "model_concurrency:user:bob": 1,
    }
    found = limits_of(capacities, WHO, 30)
    assert found == [
        CallLimit("model_requests:user:alice", "requests", 5, 1),
        CallLimit("model_tokens:run:r1", "tokens", 100, 30),
        CallLimit("model_concurrency:model:org/m:7b", "concurrency", 2, 1),
    ]
    assert all(kind_of(bound.name) for bound in found), "what binds can be set"


@pytest.mark.parametrize(
    ("reference", "registry"),
    [
        ("python:3.11", "docker.io"),
        ("swebench/sweb.eval:latest", "docker.io"),
        ("index.docker.io/library/python", "docker.io"),
        ("ghcr.io/org/image@sha256:00", "ghcr.io"),
        ("localhost:5000/a/b:v1", "localhost:5000"),
        ("localhost/a", "localhost"),
    ],
)
def test_an_image_is_counted_at_the_registry_that_it_comes_from(reference: str, registry: str) -> None:
    assert registry_of(reference) == registry
