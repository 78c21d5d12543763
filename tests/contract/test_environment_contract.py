"""One suite for every kind of environment: what agents and graders may rely on, whatever they run in."""

from __future__ import annotations

import io
import tarfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.environments.base import Environment, EnvironmentProvider
from app.errors import EnvironmentFailed, SpecInvalid
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.contract.conftest import Create
from tests.contract.environment_grounds import Ground, tags_of, tar_of

MEBI = 1 << 20


# --- Commands -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("true", 0),
        ("exit 7", 7),
        ("exit 255", 255),
        ("no-such-command", 127),
        ("kill -9 $$", 137),
        ("kill -15 $$", 143),
    ],
)
def test_the_exit_code_is_exact(shared: Environment, command: str, code: int) -> None:
    result = shared.run(command, timeout_s=20)
    assert (result.exit_code, result.timed_out) == (code, False)


def test_the_two_streams_come_apart_and_binary_safe(shared: Environment) -> None:
    result = shared.run(r"printf '\000\377\n\r'; printf 'to\000err\376' >&2", timeout_s=20)
    assert result.stdout == b"\x00\xff\n\r"
    assert result.stderr == b"to\x00err\xfe"
    assert result.text().endswith("err\ufffd")


def test_a_command_reads_its_input_to_the_end(shared: Environment) -> None:
    sent = bytes(range(256)) * 4096
    assert shared.run("cat", stdin=sent, timeout_s=20).stdout == sent


def test_input_that_nobody_reads_hurts_nobody(shared: Environment) -> None:
    assert shared.run("exec 0<&-; echo done", stdin=b"x" * (4 * MEBI), timeout_s=20).stdout == b"done\n"


def test_without_input_a_reader_sees_the_end_at_once(shared: Environment) -> None:
    assert shared.run("cat; echo ended", timeout_s=20).stdout == b"ended\n"


def test_long_output_keeps_its_head_and_its_tail(shared: Environment) -> None:
    result = shared.run("echo first; head -c 8000000 /dev/zero | tr '\\0' x; echo; echo last", timeout_s=60)
    assert result.exit_code == 0
    assert result.truncated
    assert result.stdout.startswith(b"first\nxxx")
    assert result.stdout.endswith(b"xxx\nlast\n")
    assert 2 * MEBI <= len(result.stdout) < 2 * MEBI + 100


def test_two_mebibytes_are_kept_whole(shared: Environment) -> None:
    result = shared.run("head -c 2097152 /dev/zero", timeout_s=60)
    assert (len(result.stdout), result.truncated) == (2 * MEBI, False)


def test_the_working_folder_is_the_tasks_unless_named(shared: Environment) -> None:
    assert shared.run("pwd", timeout_s=20).stdout.endswith(b"/testbed\n")
    shared.put("/elsewhere/x", b"")
    assert shared.run("pwd", cwd="/elsewhere", timeout_s=20).stdout.endswith(b"/elsewhere\n")


def test_a_missing_working_folder_is_an_answer_that_names_it(shared: Environment) -> None:
    result = shared.run("true", cwd="/not/there", timeout_s=20)
    assert result.exit_code == 126
    assert b"/not/there" in result.stderr


def test_variables_come_from_the_task_and_the_call(shared: Environment) -> None:
    result = shared.run('echo "$GIVEN, $ADDED"', env={"ADDED": "by 'the' call\n"}, timeout_s=20)
    assert result.stdout == b"by the task, by 'the' call\n\n"


def test_the_workers_own_variables_stay_outside(shared: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_WORKERS_SECRET", "hush")
    assert b"hush" not in shared.run("env", timeout_s=20).stdout


def test_a_command_longer_than_an_argument_may_be_runs(shared: Environment) -> None:
    assert (
        shared.run(f"# {'x' * 300_000}\nread line; echo got $line", stdin=b"it\n", timeout_s=20).stdout == b"got it\n"
    )


def test_commands_run_side_by_side(shared: Environment) -> None:
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda n: shared.run(f"sleep 0.5; echo {n}; exit {n}", timeout_s=30), range(8)))
    assert [(r.exit_code, r.stdout) for r in results] == [(n, f"{n}\n".encode()) for n in range(8)]


def test_a_background_process_neither_delays_nor_dies(own: Environment) -> None:
    begun = time.monotonic()
    result = own.run(
        "(sleep 3; i=0; while [ $i -lt 30 ]; do echo $i; i=$((i+1)); done; echo x > alive) & exit 5", timeout_s=30
    )
    assert result.exit_code == 5
    assert time.monotonic() - begun < 2.9
    assert own.run("sleep 3.5; cat alive", timeout_s=30).stdout == b"x\n"


def test_a_command_that_closes_its_streams_is_waited_for(shared: Environment) -> None:
    begun = time.monotonic()
    assert shared.run("exec >&- 2>&-; sleep 0.5; exit 4", timeout_s=20).exit_code == 4
    assert time.monotonic() - begun >= 0.5


# --- Timeout --------------------------------------------------------------------------------------------------------

BEAT = "while :; do date +%s%N > {name}.new; mv {name}.new {name}; sleep 0.05; done"


def beats(environment: Environment, name: str) -> bool:
    """Whether the loop that writes `name` is alive."""
    look = f"cat {name}; sleep 0.6; cat {name}"
    lines = environment.run(look, timeout_s=20).stdout.split()
    return len(lines) == 2 and lines[0] != lines[1]


@pytest.mark.parametrize(
    "start",
    [
        "sh -c '{loop}'",
        "sh -c '{loop}' & wait",
        "setsid sh -c '{loop}' > /dev/null 2>&1 & sleep 60",
        "trap '' TERM INT HUP; sh -c '{loop}'",
        "setsid sh -c \"setsid sh -c '{loop}' & sleep 60\" & sleep 60",
    ],
)
def test_a_timeout_kills_the_whole_tree(own: Environment, start: str) -> None:
    begun = time.monotonic()
    result = own.run("echo before; " + start.format(loop=BEAT.format(name="beat")), timeout_s=1)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"before\n")
    assert time.monotonic() - begun < 4
    assert not beats(own, "beat")


def test_a_timeout_spares_other_commands_and_servers(own: Environment) -> None:
    own.run(f"setsid sh -c '{BEAT.format(name='server')}' > /dev/null 2>&1 &", timeout_s=20)
    other = ThreadPoolExecutor(1).submit(own.run, "sleep 3; echo whole", timeout_s=30)
    assert own.run("sleep 60", timeout_s=1).timed_out
    assert other.result().stdout == b"whole\n"
    assert beats(own, "server")


# --- Files ----------------------------------------------------------------------------------------------------------


def test_a_file_comes_back_as_it_went_with_its_folders_and_mode(shared: Environment) -> None:
    content = bytes(range(256)) * 5000
    shared.put("/data/a b/ü/x.bin", content, mode=0o750)
    assert shared.get("/data/a b/ü/x.bin") == content
    assert shared.run("stat -c %a x.bin .", cwd="/data/a b/ü", timeout_s=20).stdout == b"750\n755\n"


def test_a_file_is_replaced(shared: Environment) -> None:
    shared.put("/data/twice", b"longer before")
    shared.put("/data/twice", b"after")
    assert shared.get("/data/twice") == b"after"


def test_what_a_command_wrote_can_be_read_also_through_a_link(shared: Environment) -> None:
    shared.run("printf 'not utf-8: \\377' > out; ln -s out link", timeout_s=20)
    assert shared.get("/testbed/link") == b"not utf-8: \xff"


@pytest.mark.parametrize("path", ["/not/there", "/testbed", "/testbed/dangling"])
def test_what_is_no_file_is_not_found(shared: Environment, path: str) -> None:
    shared.run("ln -sf /nowhere/at/all dangling", timeout_s=20)
    with pytest.raises(FileNotFoundError):
        shared.get(path)


def test_a_tree_is_unpacked_into_a_new_and_into_an_old_folder(shared: Environment) -> None:
    for version in (b"one", b"two"):
        shared.put_tree(tar_of({"a/b.txt": version, "run.sh": b"echo ran"}), "/tree/deep")
        assert shared.get("/tree/deep/a/b.txt") == version
    assert shared.run("./run.sh", cwd="/tree/deep", timeout_s=20).stdout == b"ran\n"


def test_a_tree_comes_back_as_it_went(shared: Environment) -> None:
    shared.run(
        "mkdir -p back/deep; cd back; printf a > a; printf 'b\\377' > deep/b; chmod 750 deep/b; ln -s a l", timeout_s=20
    )
    with tarfile.open(fileobj=io.BytesIO(shared.get_tree("/testbed/back"))) as tar:
        members = {
            member.name.removeprefix("./").rstrip("/"): member for member in tar if member.name not in (".", "./")
        }
        assert set(members) == {"a", "deep", "deep/b", "l"}
        assert (members["l"].linkname, members["deep/b"].mode, members["deep"].isdir()) == ("a", 0o750, True)
        content = tar.extractfile(members["deep/b"])
        assert content is not None
        assert content.read() == b"b\xff"
    shared.put_tree(shared.get_tree("/testbed/back"), "/tree/again")
    assert shared.get("/tree/again/deep/b") == b"b\xff"


@pytest.mark.parametrize("path", ["/not/there", "/testbed/no-folder"])
def test_what_is_no_folder_is_not_found(shared: Environment, path: str) -> None:
    shared.put("/testbed/no-folder", b"x")
    with pytest.raises(FileNotFoundError):
        shared.get_tree(path)


@pytest.mark.parametrize("name", ["../outside", "/../../outside", "a/../../outside"])
def test_a_tree_that_leads_outside_is_refused(shared: Environment, name: str) -> None:
    with pytest.raises(SpecInvalid, match="outside"):
        shared.put_tree(tar_of({name: b"x"}), "/tree/checked")


def test_what_is_no_archive_is_refused(shared: Environment) -> None:
    with pytest.raises(SpecInvalid, match="tar"):
        shared.put_tree(b"no tar" * 1000, "/tree")


@pytest.mark.parametrize("path", ["relative", "", "/", "/.."])
def test_a_path_that_is_not_absolute_is_a_programming_error(shared: Environment, path: str) -> None:
    with pytest.raises(ValueError, match="absolute"):
        shared.put(path, b"")


# --- Life -----------------------------------------------------------------------------------------------------------


def test_destroy_aborts_a_running_command_quickly(create: Create) -> None:
    environment = create()
    running = ThreadPoolExecutor(1).submit(environment.run, "sleep 60", timeout_s=90)
    time.sleep(0.5)
    begun = time.monotonic()
    environment.destroy()
    with pytest.raises(EnvironmentFailed, match="destroyed"):
        running.result(timeout=3)
    assert time.monotonic() - begun < 3


def test_after_destroy_everything_fails_and_destroy_is_safe_again(create: Create) -> None:
    environment = create()
    environment.destroy()
    environment.destroy()
    calls: list[Callable[[], object]] = [
        lambda: environment.run("true", timeout_s=5),
        lambda: environment.put("/x", b""),
        lambda: environment.get("/x"),
        lambda: environment.put_tree(tar_of({"x": b""}), "/x"),
        lambda: environment.get_tree("/testbed"),
        lambda: environment.shell().run("true", timeout_s=5),
        lambda: environment.stream(["/bin/cat"]),
        lambda: environment.stats(),
    ]
    for call in calls:
        with pytest.raises(EnvironmentFailed):
            call()
    assert not environment.reset().clean


def test_destroy_from_many_threads_is_safe(create: Create) -> None:
    environment = create()
    barrier = threading.Barrier(4)

    def end() -> None:
        barrier.wait()
        environment.destroy()

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(end) for _ in range(4)]:
            done.result()


def test_destroy_does_not_wait_for_shells_that_ignore_signals(create: Create) -> None:
    environment = create()
    environment.run("trap '' TERM; sleep 60 > /dev/null 2>&1 &", timeout_s=10)
    begun = time.monotonic()
    environment.destroy()
    assert time.monotonic() - begun < 3


def test_set_up_commands_have_run_and_a_failing_one_is_told(
    provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings
) -> None:
    wanted = spec.model_copy(update={"setup": ("echo one > set-up", "echo two >> set-up")})
    environment = provider.create(wanted, tags_of(settings.installation), timeout_s=60)
    assert environment.get("/testbed/set-up") == b"one\ntwo\n"
    proof = environment.reset()
    assert not proof.clean or environment.get("/testbed/set-up") == b"one\ntwo\n", "what a set-up made is in no image"
    environment.destroy()
    broken = spec.model_copy(update={"setup": ("echo sorry; exit 3",)})
    with pytest.raises(EnvironmentFailed, match=r"(?s)3.*sorry"):
        provider.create(broken, tags_of(settings.installation), timeout_s=60)


def test_two_environments_do_not_share_files(create: Create, own: Environment) -> None:
    other = create()
    own.put("/testbed/mine", b"")
    with pytest.raises(FileNotFoundError):
        other.get("/testbed/mine")
    other.destroy()


def test_a_description_says_what_it_is_and_how_long_it_took(create: Create, ground: Ground) -> None:
    environment = create()
    told = environment.describe()
    assert (told["kind"], told["id"], told["origin"], told["path"]) == (ground.kind, environment.id, "fresh", "cold")
    assert told["image"]
    assert told["phases"].keys() >= {"image", "create", "set_up"}
    assert all(0 <= seconds < 60 for seconds in told["phases"].values())
    environment.destroy()
    assert environment.describe()["phases"]["teardown"] > 0


def test_what_it_uses_can_be_asked_for(own: Environment) -> None:
    before = own.stats().processes
    own.run("sleep 30 > /dev/null 2>&1 & sleep 30 > /dev/null 2>&1 &", timeout_s=20)
    assert own.stats().processes == before + 2


def test_a_sweep_takes_ours_but_what_is_kept_and_nobody_elses(
    provider: EnvironmentProvider, spec: EnvironmentSpec
) -> None:
    mine, other = (f"test-{uuid.uuid4().hex[:8]}" for _ in range(2))
    left, kept = (provider.create(spec, tags_of(mine), timeout_s=60) for _ in range(2))
    foreign = provider.create(spec, tags_of(other), timeout_s=60)
    assert provider.sweep(installation=mine, keep={kept.id: True, left.id: False}) == [left.id]
    assert kept.run("true", timeout_s=20).ok
    assert foreign.run("true", timeout_s=20).ok
    with pytest.raises(EnvironmentFailed):
        left.run("true", timeout_s=20)
    assert set(provider.sweep(installation=mine)) == {kept.id}
    assert set(provider.sweep(installation=other)) == {foreign.id}
    for environment in (left, kept, foreign):
        environment.destroy()


def test_a_prepared_image_is_named_the_same_again(
    provider: EnvironmentProvider, spec: EnvironmentSpec, tmp_path: Path
) -> None:
    assert provider.prepare_image(spec, timeout_s=60) == provider.prepare_image(spec, timeout_s=60)
