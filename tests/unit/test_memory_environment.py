"""What is the memory environment's own: ordered troubles, given images and programs, its proven reset, its refusals."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.environments import provider_for
from app.environments.contract.ground import tags_of, tar_of
from app.environments.memory import EMPTY, Call, Fault, MemoryEnvironment, MemoryProvider, Trouble
from app.environments.warm.shared import Borrowed
from app.errors import DiskFull, EnvironmentFailed, ImageBuildFailed, ImageUnavailable, SpecInvalid
from app.models.spec import Build, Bundle, Compose, EnvironmentKind, EnvironmentSpec, Network, Resources, Reuse
from app.settings import Settings

Make = Callable[..., MemoryEnvironment]
SPEC = EnvironmentSpec(kind=EnvironmentKind.MEMORY, image=EMPTY)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[MemoryEnvironment] = []

    def make(*faults: Fault, spec: EnvironmentSpec = SPEC, bundle: bytes = b"", **more: object) -> MemoryEnvironment:
        provider = MemoryProvider(
            Settings(home=tmp_path / "home"),
            fetch_bundle=lambda _: bundle,
            faults=faults,
            **more,  # type: ignore[arg-type]
        )
        made.append(provider.create(spec, tags_of("test"), timeout_s=10))
        return made[-1]

    yield make
    for environment in made:
        environment.destroy()
    assert not (tmp_path / "home").exists()


# --- Troubles -------------------------------------------------------------------------------------------------------


def test_a_fault_is_met_by_whom_it_matches_and_only_so_often(make: Make) -> None:
    environment = make(Fault(Trouble.HANGS, match="pytest", times=1))
    assert environment.run("echo other", timeout_s=5).ok
    hung = environment.run("echo pytest", timeout_s=0.2)
    assert (hung.timed_out, hung.exit_code, hung.stdout) == (True, None, b"")
    assert environment.run("echo pytest", timeout_s=5).stdout == b"pytest\n"


def test_a_fault_without_a_number_is_met_always(make: Make) -> None:
    environment = make(Fault(Trouble.HANGS, times=None))
    assert [environment.run("true", timeout_s=0.1).timed_out for _ in range(3)] == [True] * 3


def test_a_slow_command_begins_late_and_within_its_time(make: Make) -> None:
    environment = make(Fault(Trouble.SLOW, after_s=0.2), Fault(Trouble.SLOW, after_s=5))
    begun = time.monotonic()
    assert environment.run("echo late", timeout_s=5).stdout == b"late\n"
    assert time.monotonic() - begun >= 0.2
    assert environment.run("echo never", timeout_s=0.2).timed_out


def test_out_of_memory_is_told_as_the_kernel_would_and_the_environment_lives(make: Make) -> None:
    environment = make(Fault(Trouble.OUT_OF_MEMORY, match="greedy", after_s=0.1))
    killed = environment.run("echo begun; sleep 20; echo greedy", timeout_s=10)
    assert (killed.exit_code, killed.out_of_memory, killed.stdout) == (137, True, b"begun\n")
    assert b"memory limit" in killed.stderr
    assert environment.run("echo usable", timeout_s=5).stdout == b"usable\n"


def test_an_environment_that_dies_under_a_command_is_gone(make: Make) -> None:
    environment = make(Fault(Trouble.DIES, match="sleep", after_s=0.1))
    shell = environment.shell()
    with pytest.raises(EnvironmentFailed, match="died"):
        shell.run("sleep 20", timeout_s=10)
    with pytest.raises(EnvironmentFailed):
        environment.put("/x", b"")


def test_a_full_disk_is_one_for_commands_and_for_us(make: Make) -> None:
    environment = make(Fault(Trouble.DISK_FULL, match="fill"))
    environment.put("/before", b"x")
    full = environment.run("echo fill > file; cat file", timeout_s=5)
    assert b"No space left" in full.stderr
    assert full.stdout == b""
    with pytest.raises(DiskFull):
        environment.put("/testbed/more", b"x")
    assert environment.get("/before") == b"x"


def test_the_limit_of_the_disk_holds(make: Make) -> None:
    environment = make(spec=SPEC.model_copy(update={"resources": Resources(disk_bytes=64 << 20)}))
    result = environment.run(
        "head -c 70M /dev/zero > file || echo over; rm file; echo x > file && cat file", timeout_s=20
    )
    assert result.stdout == b"over\nx\n"


def test_the_limit_of_processes_holds(make: Make) -> None:
    environment = make(spec=SPEC.model_copy(update={"resources": Resources(pids=16)}))
    with pytest.raises(EnvironmentFailed, match="16 processes"):
        environment.run("while :; do sleep 20 & done", timeout_s=10)
    assert environment.stats().processes == 0
    assert environment.run("echo usable", timeout_s=5).stdout == b"usable\n"


def test_one_that_is_ordered_not_to_be_made_is_not(make: Make) -> None:
    with pytest.raises(EnvironmentFailed, match="ordered"):
        make(Fault(Trouble.NOT_MADE, match="empty"))


# --- Images and programs --------------------------------------------------------------------------------------------


def test_an_image_is_what_was_given(make: Make) -> None:
    image = tar_of({"testbed/code.txt": b"hello\n", "usr/bin/tool.sh": b"#!/bin/sh\necho tool $1\n"})
    environment = make(spec=SPEC.model_copy(update={"image": "mine:1"}), images={"mine:1": image})
    assert environment.run("cat code.txt; tool.sh x", timeout_s=5).stdout == b"hello\ntool x\n"
    with pytest.raises(ImageUnavailable, match=r"memory:empty.*debian:12"):
        make(spec=SPEC.model_copy(update={"image": "debian:12"}))


def build_of(files: dict[str, bytes]) -> tuple[EnvironmentSpec, bytes]:
    context = tar_of(files)
    bundle = Bundle(sha256=hashlib.sha256(context).hexdigest(), size_bytes=len(context))
    return SPEC.model_copy(update={"image": None, "build": Build(context=bundle)}), context


def test_a_build_context_is_set_up_by_its_script(make: Make) -> None:
    spec, context = build_of({"setup.sh": b'set -e\ncp data "$WORKDIR"/ready\n', "data": b"x"})
    assert make(spec=spec, bundle=context).get("/testbed/ready") == b"x"
    spec, context = build_of({"Dockerfile": b"FROM x\n"})
    with pytest.raises(ImageUnavailable, match="Dockerfile"):
        make(spec=spec, bundle=context)
    spec, context = build_of({"setup.sh": b"echo sorry; exit 3"})
    with pytest.raises(ImageBuildFailed, match=r"(?s)3.*sorry"):
        make(spec=spec, bundle=context)


def test_a_program_is_a_function(make: Make) -> None:
    def shout(call: Call) -> int:
        if not call.words:
            return call.complain("expected a word", 64)
        call.write(call.words[0].upper().encode() + b"".join(iter(call.read, b"")))
        return call.run(["echo", "done"])

    environment = make(programs={"shout": shout})
    assert environment.run("echo in | shout out", timeout_s=5).stdout == b"OUTin\ndone\n"
    failed = environment.run("shout", timeout_s=5)
    assert (failed.exit_code, failed.stderr) == (64, b"shout: expected a word\n")


@pytest.mark.parametrize(
    "change",
    [
        {"network": Network.OPEN},
        {"reuse": Reuse.SHARED_READONLY},
        {"image": None, "compose": Compose(context=Bundle(sha256="0" * 64, size_bytes=1))},
    ],
)
def test_a_spec_that_would_have_to_be_pretended_is_refused(make: Make, change: dict[str, object]) -> None:
    with pytest.raises(SpecInvalid, match="expected"):
        make(spec=SPEC.model_copy(update=change))


def test_a_real_program_is_not_there(make: Make) -> None:
    assert make().run("python3 -c 1; echo $?; git status", timeout_s=5).stdout == b"127\n"


# --- Reset and the host ---------------------------------------------------------------------------------------------


def test_a_reset_finds_what_was_left_and_puts_it_right(make: Make) -> None:
    environment = make(spec=SPEC.model_copy(update={"setup": ("echo kept > kept; echo gone > gone",)}))
    before = environment.get_tree("/testbed")
    environment.run(
        "echo changed > kept; rm gone; mkdir new; echo x > new/file; chmod 700 /tmp; sleep 60 &", timeout_s=5
    )
    proof = environment.reset()
    assert (proof.clean, proof.killed, proof.removed, proof.restored) == (True, 1, 1, 3)
    assert environment.get_tree("/testbed") == before
    assert environment.stats().processes == 0
    assert (environment.describe()["origin"], environment.describe()["path"]) == ("recycled", "recycled")
    assert environment.describe()["phases"].keys() == {"reset"}
    environment.adopt(tags_of("test"))
    assert environment.describe()["phases"].keys() == {"hand_out"}, "the reset is nothing that the next attempt paid"
    again = environment.reset()
    assert (again.clean, again.killed, again.removed, again.restored) == (True, 0, 0, 0)


def test_nothing_of_the_host_is_seen_or_left(make: Make) -> None:
    threads = threading.active_count()
    environment = make()
    assert environment.run("[ -e /etc/passwd ] || echo none; [ -e /proc/1 ] || echo nobody", timeout_s=5).stdout == (
        b"none\nnobody\n"
    )
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = children.read_text()
    environment.run("sleep 60 & sleep 60 | sleep 60 &", timeout_s=5)
    assert children.read_text() == before
    environment.destroy()
    give_up = time.monotonic() + 30
    while threading.active_count() > threads:
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_another_provider_of_this_process_sweeps_it(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    one, other = (provider_for(EnvironmentKind.MEMORY, settings, lambda bundle: b"") for _ in range(2))
    made = one.create(SPEC, tags_of("swept"), timeout_s=5)
    assert other.sweep(installation="swept") == [made.id]
    assert other.sweep(installation="swept") == []
    with pytest.raises(EnvironmentFailed):
        made.run("true", timeout_s=5)


def test_an_overdue_snapshot_is_gone(tmp_path: Path) -> None:
    provider = MemoryProvider(Settings(home=tmp_path), fetch_bundle=lambda _: b"")
    environment = provider.create(SPEC, tags_of("overdue"), timeout_s=10)
    overdue = environment.snapshot(replace(tags_of("overdue"), deadline_unix_s=time.time() - 1))
    with pytest.raises(EnvironmentFailed, match="gone"):
        provider.create_from(overdue, SPEC, tags_of("overdue"), timeout_s=10)
    assert provider.sweep(installation="overdue") == [environment.id]


def test_a_snapshot_keeps_nothing_of_processes(tmp_path: Path) -> None:
    provider = MemoryProvider(Settings(home=tmp_path), fetch_bundle=lambda _: b"")
    environment = provider.create(SPEC, tags_of("test"), timeout_s=10)
    for command in ("true", "true", "true", "sleep 30 &"):  # so that its number is nobody's in a new one
        environment.run(command, timeout_s=5)
    made = provider.create_from(environment.snapshot(tags_of("test")), SPEC, tags_of("test"), timeout_s=10)
    fresh = provider.create(SPEC, tags_of("test"), timeout_s=10)
    seen = [len(one.run("ls /proc", timeout_s=5).text().split()) for one in (environment, made, fresh)]
    assert seen == [seen[2] + 1, seen[2], seen[2]]
    provider.sweep(installation="test")


def test_a_borrower_keeps_files_until_it_has_given_the_environment_back(tmp_path: Path) -> None:
    provider = MemoryProvider(Settings(home=tmp_path), fetch_bundle=lambda _: b"")
    environment = provider.create(SPEC, tags_of("test"), timeout_s=10)
    handle = Borrowed(environment)
    handle.put("/testbed/file", b"kept")
    made = provider.create_from(handle.snapshot(tags_of("test")), SPEC, tags_of("test"), timeout_s=10)
    assert made.get("/testbed/file") == b"kept"
    handle.destroy()
    with pytest.raises(EnvironmentFailed, match="given back"):
        handle.snapshot(tags_of("test"))
    provider.sweep(installation="test")
