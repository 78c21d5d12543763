"""The names that a producer imports: there when asked for, and no weight for programs that need none of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import app


@pytest.mark.parametrize("name", app.__all__)
def test_each_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(app, name).__module__.startswith("app.")
    assert name in dir(app)


def test_an_unknown_name_is_refused_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match="'app' has no attribute 'MegaFlows'"):
        app.MegaFlows  # noqa: B018


def test_environments_alone_load_no_database() -> None:
    code = (
        "import sys, app.environments.docker; print([name for name in ('sqlalchemy', 'celery') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "[]"
