"""What is the local environment's own: what it refuses, and ports of this host that end with it."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from app.environments.runtimes.local.environment import LocalProvider
from app.environments.sweeper import Sweeper
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


def test_what_a_killed_maker_or_ender_left_without_a_word_whose_it_is_goes_when_it_is_old(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "h", docker_url="unix:///nonexistent/d.sock")
    young, bare, half = (settings.home / "local" / name for name in ("young", "bare", "half"))
    for folder in (young, bare, half):
        (folder / "root").mkdir(parents=True)
    (half / "owner.json").write_text('{"megafl')
    for folder in (bare, half):
        os.utime(folder, (time.time() - 120, time.time() - 120))
    assert Sweeper(settings).sweep(set()).removed == 2
    assert [path.name for path in young.parent.iterdir()] == ["young"]
