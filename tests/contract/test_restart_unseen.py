"""A container restarted before its judge where only the engine shows its files: honest work is not suspect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.environments.contract import Environment
from app.grading.protected import decide
from tests.contract.conftest import Create
from tests.contract.environment_fixtures import FIXTURES, Fixture
from tests.contract.test_restart import TROJAN, output

OF_ENGINES = [one for one in FIXTURES if one.isolates and one.name != "oci"]


@pytest.fixture(scope="module", params=[one.param() for one in OF_ENGINES])
def fixture(request: pytest.FixtureRequest) -> Fixture:
    found: Fixture = request.param
    return found


HONEST = """\
mkdir -p /app/config && echo port=1 >/app/config/service.ini && cd /app && git init -q . && git config user.name Me
printf '[user]\\n\\tname = Me\\n' >/root/.gitconfig
python3 -m venv --without-pip /app/venv && echo /srv/lib >/app/venv/lib/python3.11/site-packages/own.pth
mkdir -p /srv/lib && echo 'print(1)' >/srv/lib/own.py && python3 -m compileall -q /usr/lib/python3.11/json /srv/lib
python3 -c 'import py_compile; py_compile.compile("/usr/lib/python3.11/this.py")'
printf '#!/bin/sh\\n' >/usr/bin/rustc && chmod 755 /usr/bin/rustc
"""
HIDDEN = {
    "printf '[core]\\n\\tfsmonitor = /srv/evil\\n' >>/app/.git/config": "/app/.git/config",
    "echo 'import os; os.system(0)' >/usr/lib/python3/dist-packages/z.pth": "/usr/lib/python3/dist-packages/z.pth",
    "ln -s /srv/evil /app/config/config": "/app/config/config",
    TROJAN.format("/usr/local/bin/grep"): "/usr/local/bin/grep",
    "rm /usr/bin/head": "/usr/bin/head",
}
"""Attacks, and what of them is suspect."""


@pytest.fixture
def unseen(create: Create) -> Iterator[Environment]:
    """As where a worker runs in a container itself."""
    made = create()
    main = getattr(made, "_main", made)
    if main.describe()["kind"] != "kubernetes":  # no layer of a pod is ever seen
        assert main._layer is not None
        main._layer = None
    yield made
    made.destroy()


def test_ordinary_work_is_not_suspect_where_only_the_engine_shows_files(unseen: Environment) -> None:
    output(unseen, HONEST)
    restart = unseen.restart(decide)
    assert (restart.killed, restart.suspect) == (0, ())
    assert any("/__pycache__/this." in path for path in restart.put_back)
    assert output(unseen, "python3 -c 'import this' | head -1; cat /app/config/service.ini").splitlines() == [
        "The Zen of Python, by Tim Peters",
        "port=1",
    ]


def test_what_changes_a_judge_is_suspect_where_only_the_engine_shows_files(unseen: Environment) -> None:
    output(unseen, HONEST)
    for attack in HIDDEN:
        output(unseen, attack)
    unseen.put("/etc/ld.so.preload", b"/tmp/evil.so\n")
    restart = unseen.restart(decide)
    assert set(restart.suspect) == set(HIDDEN.values())
    assert "/etc/ld.so.preload" in restart.put_back
    assert output(unseen, "wc -c </etc/ld.so.preload") == "0"
