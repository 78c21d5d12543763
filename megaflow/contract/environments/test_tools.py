"""Contract of tools: folders of this host that are seen inside, read-only, and not part of the environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.environments.contract import Environment, EnvironmentProvider
from app.environments.isolation.fingerprint import Fingerprint, differences
from app.environments.tools import tool_inside
from app.errors import AgentUnavailable
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from megaflow.contract.environments.fixture import tags_of

_shown = pytest.mark.needs("shows_tools")

NAME = "toy"
HELLO = '#!/bin/sh\necho "hello from ${0##*/}, beside $(cat "${0%/*}/../words")"\n'


@pytest.fixture(scope="module")
def tool(settings: Settings) -> Path:
    """Returns the tool's folder. The provider finds it by a link, as installations may share their tools."""
    return installed(settings, "toy-1")


def installed(settings: Settings, version: str) -> Path:
    folder = settings.home / "tools" / version
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "bin" / "hello").write_text(HELLO)
    (folder / "bin" / "hello").chmod(0o755)
    (folder / "words").write_text(f"{version}\n")
    link = settings.home / "tools" / NAME
    link.unlink(missing_ok=True)
    link.symlink_to(version)
    return folder


@pytest.fixture(scope="module")
def asking(spec: EnvironmentSpec) -> EnvironmentSpec:
    return spec.model_copy(update={"tools": (NAME,)})


@pytest.fixture(scope="module")
def place(asking: EnvironmentSpec, tool: Path) -> str:
    return tool_inside(asking.kind, NAME, tool)


@pytest.fixture(scope="module")
def seeing(
    provider: EnvironmentProvider, asking: EnvironmentSpec, settings: Settings, tool: Path
) -> Iterator[Environment]:
    environment = provider.create(asking, tags_of(settings.installation), timeout_s=60)
    yield environment
    environment.destroy()


@_shown
def test_a_tool_is_seen_and_runs_whoever_the_user_is(seeing: Environment, place: str) -> None:
    assert seeing.run(f"{place}/bin/hello", timeout_s=20).text() == "hello from hello, beside toy-1\n"
    assert seeing.run(f"ls {place}", timeout_s=20).text() == "bin\nwords\n"


@_shown
@pytest.mark.needs("mounts_tools")
def test_nobody_inside_can_change_a_tool(seeing: Environment, place: str, tool: Path) -> None:
    for attempt in (
        f"echo other > {place}/words",
        f"touch {place}/more",
        f"rm {place}/words",
        f"rm -rf {place}",
        f"mv {place} {place}-other",
        f"chmod 777 {place}/words",
        f"mount -o remount,rw {place} && touch {place}/more",
        f"umount {place} && touch {place}/more",
    ):
        assert not seeing.run(attempt, timeout_s=20).ok, attempt
    assert sorted(path.name for path in tool.iterdir()) == ["bin", "words"]
    assert (tool / "words").read_text() == "toy-1\n"


@_shown
def test_a_tool_is_there_after_a_reset_and_is_no_leftover(
    provider: EnvironmentProvider, asking: EnvironmentSpec, settings: Settings, place: str
) -> None:
    environment = provider.create(asking, tags_of(settings.installation), timeout_s=60)
    before = Fingerprint.take(environment)
    environment.run("echo changed > /testbed/changed", timeout_s=20)
    proof = environment.reset()
    if proof.clean:
        assert differences(before, Fingerprint.take(environment)) == ()
        assert environment.run(f"{place}/bin/hello", timeout_s=20).ok
    assert not any("toy" in left for left in proof.left)
    environment.destroy()


@_shown
@pytest.mark.needs("isolates")
def test_an_environment_that_asked_for_none_sees_none(
    provider: EnvironmentProvider, asking: EnvironmentSpec, settings: Settings, place: str
) -> None:
    setup = {"setup": ("echo set up > /testbed/set-up",)}
    first = provider.create(asking.model_copy(update=setup), tags_of(settings.installation), timeout_s=60)
    assert first.run(f"{place}/bin/hello", timeout_s=20).ok, "a set-up does not hide it"
    first.destroy()
    for more in ({}, setup):
        without = asking.model_copy(update={"tools": (), **more})
        environment = provider.create(without, tags_of(settings.installation), timeout_s=60)
        assert not environment.run(f"test -e {place}/words", timeout_s=20).ok
        environment.destroy()


@_shown
def test_a_tool_that_is_not_on_this_host_is_told(
    provider: EnvironmentProvider, asking: EnvironmentSpec, settings: Settings
) -> None:
    with pytest.raises(AgentUnavailable, match="unknown"):
        provider.create(asking.model_copy(update={"tools": ("unknown",)}), tags_of("nobody"), timeout_s=60)
