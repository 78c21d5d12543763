"""A recorded environment hands on the services of what it records, and says when there are none."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, cast

import pytest

from app.environments.contract import ServiceMemory
from app.environments.recorded import RecordedEnvironment
from app.environments.runtimes.compose.services import Several
from app.errors import EnvironmentFailed
from app.ledger.receipts import Owner
from app.models.shell import CommandResult, Services, Shell
from tests.unit.folder_shell import FolderShell

OWNER = Owner(*(uuid.UUID(int=number) for number in range(4)))


class Single(FolderShell):
    id = "single"


class Pair(FolderShell):
    """The least that is taken for an environment of several containers."""

    id = "pair"
    services = ("main", "db")
    logs = things = lambda self: None

    def memory_beside(self) -> dict[str, ServiceMemory]:
        return {"db": ServiceMemory(1000, 2)}

    def service(self, name: str) -> Shell:
        if name != "db":
            raise EnvironmentFailed(f"no service {name!r}")
        return cast(Shell, FolderShell(self.root / name))

    def run_in(self, service: str, command: str, *, timeout_s: float) -> CommandResult:
        return self.service(service).run(command, timeout_s=timeout_s)

    def assure(self) -> None:
        raise EnvironmentFailed("found it ended")


def recorded(environment: Any) -> RecordedEnvironment:
    return RecordedEnvironment(environment, [], OWNER, cast(Any, None))


def test_services_are_reached_through_the_record(tmp_path: Path) -> None:
    pair = recorded(Pair(tmp_path))
    assert pair.services == ("main", "db")
    pair.service("db").put("/said", b"by db")
    assert (tmp_path / "db" / "said").read_bytes() == b"by db"
    assert pair.run_in("db", "pwd", timeout_s=10).text().strip() == str(tmp_path / "db" / "testbed")
    assert pair.memory_beside() == {"db": ServiceMemory(1000, 2)}
    with pytest.raises(EnvironmentFailed, match="no service 'nobody'"):
        pair.service("nobody")
    with pytest.raises(EnvironmentFailed, match="found it ended"):
        pair.assure()


def test_one_container_has_no_services_and_says_so(tmp_path: Path) -> None:
    single = recorded(Single(tmp_path))
    assert single.services == ()
    assert single.memory_beside() == {}
    single.assure()
    for use in (lambda: single.service("db"), lambda: single.run_in("db", "true", timeout_s=5)):
        with pytest.raises(EnvironmentFailed, match="has no services"):
            use()


def test_only_what_has_things_of_its_own_is_taken_for_several(tmp_path: Path) -> None:
    assert isinstance(Pair(tmp_path), Several)
    for one in (recorded(Pair(tmp_path)), recorded(Single(tmp_path))):
        assert not isinstance(one, Several)
        assert isinstance(one, Services)
