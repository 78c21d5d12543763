"""A container restarted between agent and judge: no process of the agent lives, the judge's tools are the image's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.environments.contract import Environment, EnvironmentProvider
from app.grading.protected import decide
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from megaflow.contract.environments.fixtures import tags_of
from tests.contract.conftest import Create
from tests.contract.environment_fixtures import FIXTURES, Fixture

SEEN = [one for one in FIXTURES if one.isolates and not one.name.startswith(("docker-", "kube"))]
TROJAN = "printf '#!/bin/true\\n' >{0} && chmod 755 {0}"


@pytest.fixture(scope="module", params=[one.param() for one in SEEN])
def fixture(request: pytest.FixtureRequest) -> Fixture:
    found: Fixture = request.param
    return found


@pytest.fixture
def environment(create: Create) -> Iterator[Environment]:
    made = create()
    yield made
    made.destroy()


def output(environment: Environment, command: str) -> str:
    result = environment.run(command, timeout_s=20)
    assert result.ok, result.text()
    return result.stdout.decode().strip()


def test_no_process_outlives_a_restart_and_files_of_the_task_do(environment: Environment) -> None:
    output(environment, "echo answer >/srv/answer; (setsid sleep 987 >/dev/null 2>&1 &) ; sleep 0.2")
    restart = environment.restart(decide)
    assert restart.killed >= 1
    assert output(environment, "cat /srv/answer") == "answer"
    assert "987" not in output(environment, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").replace("cat ", "")


def test_shells_and_interpreters_are_the_images_after_a_restart(environment: Environment) -> None:
    before = output(environment, "sha256sum /usr/bin/bash /usr/bin/cat")
    attack = [
        "cp /usr/bin/bash /usr/bin/bash.real",
        "mv /usr/bin/bash /usr/bin/bash.old && " + TROJAN.format("/usr/bin/bash"),
        TROJAN.format("/usr/bin/cat.new") + " && mv /usr/bin/cat.new /usr/bin/cat",
        TROJAN.format("/usr/local/bin/grep"),
        "rm -f /usr/bin/head",
        "echo /tmp/evil.so >/etc/ld.so.preload.new",
    ]
    for command in attack:
        output(environment, command)
    restart = environment.restart(decide)
    assert set(restart.put_back) >= {"/usr/bin/bash", "/usr/bin/cat", "/usr/local/bin/grep", "/usr/bin/head"}
    assert output(environment, "sha256sum /usr/bin/bash /usr/bin/cat") == before
    assert output(environment, "command -v grep; echo abc | head -c 1").split() == ["/usr/bin/grep", "a"]
    assert output(environment, "test -e /usr/bin/bash.real && echo kept") == "kept"


def test_a_preloaded_library_is_gone_after_a_restart(environment: Environment) -> None:
    environment.put("/etc/ld.so.preload", b"/tmp/evil.so\n")
    assert "/etc/ld.so.preload" in environment.restart(decide).put_back
    assert output(environment, "test -e /etc/ld.so.preload || echo none") == "none"


def test_a_restarted_environment_takes_commands_files_and_further_restarts(environment: Environment) -> None:
    for turn in range(2):
        environment.restart(decide)
        environment.put(f"/srv/{turn}", b"x")
    assert output(environment, "ls /srv | wc -l") == "2"


def test_programs_inside_are_told_the_tasks_processors(environment: Environment) -> None:
    assert output(environment, "nproc; echo $MAKEFLAGS $PYTEST_XDIST_AUTO_NUM_WORKERS").split() == ["2", "-j2", "2"]


def test_names_that_are_no_text_or_too_deep_are_no_fault_of_the_restart(environment: Environment) -> None:
    deep = "n=$(head -c 200 /dev/zero | tr '\\0' x); cd /srv; for i in $(seq 23); do mkdir $n && cd $n || break; done"
    output(
        environment, f"{deep}; printf x >\"$(printf '/usr/local/bin/\\377')\"; ln -s /usr/bin/cat /usr/local/bin/grep"
    )
    restart = environment.restart(decide)
    assert "/usr/local/bin/grep" in restart.put_back
    assert all(path.isprintable() for path in (*restart.put_back, *restart.suspect))


def test_what_a_set_up_changed_stays_and_what_the_agent_changed_after_it_goes(
    provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings
) -> None:
    left_running = f"{TROJAN.format('/usr/local/bin/head')}; (setsid sleep 300 >/dev/null 2>&1 &)"
    wanted = spec.model_copy(update={"setup": (left_running,)})
    made = provider.create(wanted, tags_of(settings.installation), timeout_s=60)
    try:
        output(made, f"{TROJAN.format('/usr/local/bin/grep')}; touch /srv/answer")
        restart = made.restart(decide)
        assert "/usr/local/bin/grep" in restart.put_back
        assert output(made, "ls /usr/local/bin/head /srv/answer") == "/srv/answer\n/usr/local/bin/head"
    finally:
        made.destroy()
