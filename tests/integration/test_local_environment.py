"""What is the local environment's own: what it refuses, and ports of this host that end with it."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import time
import uuid
from pathlib import Path

import pytest

from app.environments.contract import Tags
from app.environments.runtimes.local import LocalProvider
from app.environments.sweeper import Sweeper
from app.errors import EnvironmentFailed, SpecInvalid
from app.models.spec import Build, Bundle, EnvironmentKind, EnvironmentSpec, Reuse
from app.settings import Settings
from megaflow.contract.environments.ground import tags_of, tar_of

CONTEXT = tar_of({"setup.sh": b"true\n"})
BUNDLE = Bundle(sha256=hashlib.sha256(CONTEXT).hexdigest(), size_bytes=len(CONTEXT))
SPEC = EnvironmentSpec(kind=EnvironmentKind.LOCAL, build=Build(context=BUNDLE))


def test_a_folder_is_not_shared(tmp_path: Path) -> None:
    provider = LocalProvider(Settings(home=tmp_path), fetch_bundle=lambda bundle: pytest.fail("nothing is fetched"))
    with pytest.raises(SpecInvalid, match="shared-readonly"):
        provider.create(SPEC.model_copy(update={"reuse": Reuse.SHARED_READONLY}), tags_of("test"), timeout_s=5)
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_that_could_not_be_copied_leaves_nothing(tmp_path: Path) -> None:
    provider = LocalProvider(Settings(home=tmp_path), fetch_bundle=lambda bundle: CONTEXT)
    environment = provider.create(SPEC, tags_of("test"), timeout_s=20)
    environment.put("/testbed/large", os.urandom(2 << 20))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(EnvironmentFailed, match="could not be copied"):
            environment.snapshot(tags_of("test"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "snapshots" / "local").iterdir()) == []
    environment.destroy()


def test_the_sweeper_takes_overdue_snapshots_and_halves_of_them(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, installation="test", docker_url="unix:///nowhere")
    provider = LocalProvider(settings, fetch_bundle=lambda bundle: CONTEXT)
    owner = tags_of("test")
    environment = provider.create(SPEC, owner, timeout_s=20)
    late = Tags.without_attempt("test", uuid.uuid4(), time.time() - 1)
    kept, overdue = environment.snapshot(owner), environment.snapshot(late)
    half = tmp_path / "snapshots" / "local" / "half"  # as its maker leaves it when it is killed
    (half / ".root").mkdir(parents=True)
    (half / "owner.json").write_text(json.dumps(late.labels()))
    (half / ".root").chmod(0o500)
    assert Sweeper(settings).sweep({owner.instance_id}).removed == 2
    assert sorted(path.name for path in half.parent.iterdir()) == [kept.id]
    with pytest.raises(EnvironmentFailed, match="gone"):
        provider.create_from(overdue, SPEC, owner, timeout_s=20)
    environment.destroy()
    assert Sweeper(settings).sweep(set(), ended=[owner.instance_id]).removed == 1
    assert list(half.parent.iterdir()) == []


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
