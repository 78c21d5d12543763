"""An environment of one container has no services, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.environments.contract import Environment
from app.errors import EnvironmentFailed
from app.models.shell import Services
from tests.unit.folder_shell import FolderShell


class Single(FolderShell, Environment):
    id = "single"


def test_one_container_has_no_services_and_says_so(tmp_path: Path) -> None:
    single = Single(tmp_path)
    assert isinstance(single, Services)
    assert (single.services, single.logs(), single.memory_beside(), single.created_resources()) == ((), {}, {}, None)
    single.assure()
    for use in (lambda: single.service("db"), lambda: single.run_in("db", "true", timeout_s=5)):
        with pytest.raises(EnvironmentFailed, match="has no services"):
            use()
