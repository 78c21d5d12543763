"""What is the local environment's own: what it refuses, and ports of this host that end with it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from app.environments.runtimes.local.environment import LocalProvider
from app.errors import SpecInvalid
from app.models.spec import Build, Bundle, EnvironmentKind, EnvironmentSpec, Reuse
from app.settings import Settings
from megaflow.contract.environments.fixture import tags_of, tar_of

CONTEXT = tar_of({"setup.sh": b"true\n"})
BUNDLE = Bundle(sha256=hashlib.sha256(CONTEXT).hexdigest(), size_bytes=len(CONTEXT))
SPEC = EnvironmentSpec(kind=EnvironmentKind.LOCAL, build=Build(context=BUNDLE))


def test_a_folder_is_not_shared(tmp_path: Path) -> None:
    provider = LocalProvider(Settings(home=tmp_path), fetch_bundle=lambda bundle: pytest.fail("nothing is fetched"))
    with pytest.raises(SpecInvalid, match="shared-readonly"):
        provider.create(SPEC.model_copy(update={"reuse": Reuse.SHARED_READONLY}), tags_of("test"), timeout_s=5)
    assert list(tmp_path.iterdir()) == []
