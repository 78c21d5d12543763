"""Services that cannot be started, and services that run out of memory: which one it was is said."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import ServiceUnhealthy
from app.host.engine import Engine
from app.settings import Settings
from app.workers.limit_account import LimitAccount
from tests.integration.test_compose_environment import (
    SMALL,
    Create,
    engine,
    left,
    provider,
    services,
    settings,
)
from tests.integration.test_compose_environment import create as create
from tests.waiting import eventually

__all__ = ["engine", "provider", "settings"]
pytestmark = pytest.mark.docker

MIB = 1 << 20


@pytest.fixture
def broken(base_image_tag: str) -> dict[str, bytes]:
    """The recipe of an image with an entrypoint that is not there and a script whose interpreter is not."""
    script = "printf '#!/nope\\n' >/run.sh && chmod 755 /run.sh"
    return {"broken/Dockerfile": f'FROM {base_image_tag}\nRUN {script}\nENTRYPOINT ["/nope"]\n'.encode()}


# --- What cannot be executed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "code", "said"),
    [
        ("command: [no-such-program, --port, '1']", 127, "no-such-program"),
        ("command: [/nope, serve]", 127, "/nope"),
        ("entrypoint: [/nope]", 127, "/nope"),
        ("entrypoint: [/run.sh]", 127, "/run.sh"),
        ("command: [/etc/passwd], entrypoint: []", 126, "/etc/passwd"),
        ("command: [/nope], user: '1234'", 127, "/nope"),
    ],
    ids=["name", "path", "entrypoint", "interpreter", "no program", "another user"],
)
def test_a_command_of_main_that_cannot_be_executed_is_told_and_nothing_is_left(
    create: Create, engine: Engine, settings: Settings, broken: dict[str, bytes], keys: str, code: int, said: str
) -> None:
    source = "build: broken" if "/run.sh" in keys else "image: BASE"
    with pytest.raises(ServiceUnhealthy, match=rf"'main' did not start \(exit code {code}\)") as caught:
        create(f"services: {{main: {{{source}, {keys}}}}}", files=broken)
    assert str(caught.value).partition("Its log ends with:")[2].count(said) == 1
    assert left(engine, settings) == []


@pytest.mark.parametrize(("command", "code"), [("no-such-program", 127), ("/nope", 127), ("/etc/passwd", 126)])
def test_it_is_told_also_where_the_shell_is_bash(create: Create, base_image_tag: str, command: str, code: int) -> None:
    files = {"bash/Dockerfile": f"FROM {base_image_tag}\nRUN ln -sf bash /bin/sh\n".encode()}
    with pytest.raises(ServiceUnhealthy, match=rf"'main' did not start \(exit code {code}\)"):
        create(f"services: {{main: {{build: bash, command: [{command}]}}}}", files=files)
    environment = create(
        "services: {main: {build: bash, command: [sh, -c, 'echo $$BASH_VERSION; sleep 60']}}", files=files
    )
    eventually(lambda: environment.logs().get("main", b"").startswith(b"5"))


def test_the_entrypoint_of_mains_image_goes_before_a_command_of_the_file(
    create: Create, broken: dict[str, bytes]
) -> None:
    with pytest.raises(ServiceUnhealthy, match=r"'main' did not start \(exit code 127\): .*'/nope serve'"):
        create("services: {main: {build: broken, command: [serve]}}", files=broken)
    environment = create("services: {main: {build: broken}}", files=broken)
    assert environment.run("echo well", timeout_s=20).text() == "well\n"


@pytest.mark.parametrize("code", [0, 3, 126, 127])
def test_what_a_command_of_main_ends_with_is_its_own_affair(create: Create, code: int) -> None:
    environment = create(f"services: {{main: {{image: BASE, command: [sh, -c, 'echo ran; exit {code}']}}}}")
    eventually(lambda: environment.logs() == {"main": b"ran\n"})


def test_nothing_of_the_start_is_left_in_the_commands_variables(create: Create) -> None:
    names = "{own: 1, now: 2, looks: 3, code: 4}"
    command = "[sh, -c, 'echo $$own $$now $$looks $$code; sleep 60']"
    environment = create(f"services: {{main: {{image: BASE, environment: {names}, command: {command}}}}}")
    eventually(lambda: environment.logs() == {"main": b"1 2 3 4\n"})


@pytest.mark.parametrize("keys", ["image: BASE, command: [/nope]", "build: broken", "image: BASE, user: nobody-here"])
def test_a_service_that_the_engine_cannot_start_is_named(
    create: Create, engine: Engine, settings: Settings, broken: dict[str, bytes], keys: str
) -> None:
    with pytest.raises(ServiceUnhealthy, match=r"service 'db': .*(/nope|nobody-here)"):
        create(f"services: {{main: {{image: BASE}}, db: {{{keys}}}}}", files=broken)
    assert left(engine, settings) == []


# --- Memory -----------------------------------------------------------------------------------------------------------

HOG = "python3 -c 'bytearray(200 << 20)'"
PAIR = "services: {main: {image: BASE}, db: {image: BASE, mem_limit: 64m, command: COMMAND}}"


def short(told: dict[str, dict[str, Any]]) -> dict[str, bool]:
    return {name: one["out_of_memory"] for name, one in told.items()}


def test_a_service_in_which_somebody_was_killed_for_memory_is_told_by_name(create: Create) -> None:
    environment = create(PAIR.replace("COMMAND", "[sleep, '600']"))
    environment.run_in("db", f"{HOG}; true", timeout_s=30)
    account = LimitAccount(SMALL)
    account.watch(environment)
    assert account.look()["memory"] == {"limit_bytes": SMALL.memory_bytes, "killed": {"agent": 0}}
    environment.run_in("db", f"{HOG}; true", timeout_s=30)
    account.look()
    account.stage = "grading"
    environment.run_in("db", f"{HOG}; {HOG}; true", timeout_s=30)
    environment.run_in("db", "kill -KILL $$", timeout_s=30)
    db = {"limit_bytes": 64 * MIB, "killed": {"agent": 1, "grading": 2}}
    found = {"limit_bytes": SMALL.memory_bytes, "killed": {"agent": 0, "grading": 0}, "services": {"db": db}}
    assert account.look()["memory"] == found
    told = services(environment)
    assert short(told) == {"main": False, "db": True}
    assert (told["db"]["state"], environment.run("true", timeout_s=20).ok) == ("running", True)
    environment.destroy()
    assert short(services(environment)) == {"main": False, "db": True}
    assert account.look()["memory"] == found, "what was known stays"


def test_a_service_that_ends_for_memory_in_mid_task_is_told_by_name(create: Create) -> None:
    command = "[sh, -c, 'while [ ! -e /go ]; do sleep 0.05; done; exec python3 -c \"bytearray(200 << 20)\"']"
    environment = create(PAIR.replace("COMMAND", command))
    account = LimitAccount(SMALL)
    account.watch(environment)
    assert short(services(environment)) == {"main": False, "db": False}
    environment.run_in("db", "touch /go", timeout_s=20)
    eventually(lambda: services(environment)["db"]["state"] != "running")
    told = services(environment)
    assert (told["db"]["exit_code"], short(told)) == (137, {"main": False, "db": True})
    found = account.look()["memory"]
    assert found["services"] == {"db": {"limit_bytes": 64 * MIB, "killed": {"agent": 1}}}
    assert environment.run("true", timeout_s=20).ok
    environment.run(f"{HOG}; true", timeout_s=30)
    assert short(services(environment)) == {"main": True, "db": True}
    assert environment.reset().clean
    assert short(services(environment)) == {"main": False, "db": False}


def test_a_service_that_runs_out_of_memory_while_it_starts_is_told_so(create: Create) -> None:
    with pytest.raises(ServiceUnhealthy, match="'db' ended with exit code 137, out of memory"):
        create(
            PAIR.replace("COMMAND", "[python3, -c, 'bytearray(200 << 20)']").replace(
                "BASE}", "BASE, depends_on: [db]}", 1
            )
        )
