"""Ports of an environment without a network that lead to us, and the way out that a policy gives it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from app.environments.runtimes.oci import OciEnvironment, OciProvider
from app.errors import EnvironmentFailed
from app.models.spec import EnvironmentSpec, Network
from app.settings import Settings
from tests.integration.oci_ground import left_over, tags
from tests.integration.oci_ground import oci as oci
from tests.integration.oci_ground import oci_cache as oci_cache
from tests.integration.oci_ground import oci_programs as oci_programs
from tests.integration.oci_ground import oci_settings as oci_settings
from tests.integration.oci_ground import tiny as tiny

ASK = "exec 3<>/dev/tcp/127.0.0.1/{port} || exit 5; printf '{words}' >&3; cat <&3"


def ask(environment: OciEnvironment, port: int | str, words: str = "hello") -> tuple[int | None, bytes]:
    told = environment.run(f'bash -c "{ASK.format(port=port, words=words)}"', timeout_s=10)
    return told.exit_code, told.stdout


def echo(connection: socket.socket) -> None:
    connection.sendall(b"heard " + connection.recv(100))
    connection.close()


@pytest.fixture
def own(oci: OciProvider, tiny: EnvironmentSpec, oci_settings: Settings) -> Iterator[OciEnvironment]:
    spec = tiny.model_copy(update={"network": Network.MODEL_ONLY})
    environment = oci.create(spec, tags(oci_settings.installation), timeout_s=30)
    yield environment
    environment.destroy()


def test_a_port_inside_leads_to_us_until_it_is_closed(own: OciEnvironment) -> None:
    assert ask(own, 8000) == (5, b""), "nothing is there by itself"
    forward = own.forward(8000, echo)
    assert ask(own, forward.port) == (0, b"heard hello")
    forward.close()
    assert ask(own, 8000) == (5, b"")


def test_a_reset_ends_a_port_and_frees_it(own: OciEnvironment) -> None:
    own.forward(8000, echo)
    assert own.reset().clean
    assert ask(own, 8000) == (5, b"")
    own.forward(8000, echo)
    assert ask(own, 8000) == (0, b"heard hello")


def test_a_destroyed_environment_has_no_ports(own: OciEnvironment) -> None:
    own.destroy()
    with pytest.raises(EnvironmentFailed, match="destroyed"):
        own.forward(8000, echo)


# --- Allowed hosts ----------------------------------------------------------------------------------------------------


@pytest.fixture
def allowed(tiny: EnvironmentSpec) -> EnvironmentSpec:
    return tiny.model_copy(update={"network": Network.ALLOWLIST, "allowed_hosts": ("allowed.example",)})


PROXY = "exec 3<>/dev/tcp/127.0.0.1/${http_proxy##*:} || exit 5"
ASKED = "GET http://forbidden.example/ HTTP/1.1\\r\\nHost: forbidden.example\\r\\nConnection: close\\r\\n\\r\\n"
FETCH = f"{PROXY}; printf '{ASKED}' >&3; head -n 1 <&3"


def refused(environment: OciEnvironment) -> bool:
    """Whether the proxy inside answers, and says no to a host that is not on the list."""
    environment.put("/fetch", FETCH.encode())
    told = environment.run("bash /fetch", timeout_s=10)
    return told.exit_code == 0 and b" 403 " in told.stdout


def test_the_way_out_is_there_for_every_command_and_through_every_beginning(
    oci: OciProvider, allowed: EnvironmentSpec, oci_settings: Settings
) -> None:
    spec = allowed.model_copy(update={"setup": (f"bash -c '{PROXY}' && echo reached > /set-up",)})
    environment = oci.create(spec, tags(oci_settings.installation), timeout_s=30)
    assert environment.get("/set-up") == b"reached\n", "set-up commands have it, too"
    assert refused(environment), "it began anew on the snapshot"
    assert environment.reset().clean
    assert refused(environment), "and after a reset"
    told = environment.describe()["egress"]
    assert told["policy"] == "allowlist"
    assert told["hosts"] != {}
    shell = environment.shell()
    assert b"HTTPS_PROXY=http://127.0.0.1" in shell.run("env", timeout_s=10).stdout
    shell.close()
    environment.destroy()
    assert left_over(oci_settings.home) == []


def test_the_tasks_own_variables_go_before_those_of_the_way_out(
    oci: OciProvider, allowed: EnvironmentSpec, oci_settings: Settings
) -> None:
    spec = allowed.model_copy(update={"env": {**allowed.env, "NO_PROXY": "mine"}})
    environment = oci.create(spec, tags(oci_settings.installation), timeout_s=30)
    assert environment.run('echo "$NO_PROXY $no_proxy"', timeout_s=10).stdout.startswith(b"mine localhost")
    environment.destroy()


def test_where_no_way_out_was_asked_for_there_is_none(own: OciEnvironment) -> None:
    assert b"proxy" not in own.run("env", timeout_s=10).stdout.lower()
    assert ask(own, 3128) == (5, b"")
