"""A task that means harm, or is only clumsy: host and neighbours do not notice, the attempt is told what happened."""

from __future__ import annotations

import io
import json
import socket
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from app.environments.contract import Environment, EnvironmentProvider
from app.environments.isolation.fingerprint import Fingerprint, differences
from app.errors import EnvironmentOverLimit, SpecInvalid, StationError
from app.host import archives
from app.models.resources import KillAt
from app.models.spec import EnvironmentSpec, Resources
from app.settings import Settings
from app.workers.command_logs import CommandLogs
from app.workers.limit_account import LimitAccount
from tests.contract.conftest import Create
from tests.contract.environment_fixtures import FIXTURES, Fixture, tags_of, tar_of
from tests.contract.residues import DEEP, remove_deep
from tests.waiting import eventually

MEBI = 1 << 20
Confined = Callable[[Resources], Environment]


@pytest.fixture(
    scope="module",
    params=[one.param() for one in FIXTURES if one.isolates and not one.name.startswith(("docker-", "kube"))],
)
def fixture(request: pytest.FixtureRequest) -> Fixture:
    """Those that isolate, once per way of making them: how commands get inside changes nothing here."""
    found: Fixture = request.param
    return found


@pytest.fixture
def confined(provider: EnvironmentProvider, spec: EnvironmentSpec, settings: Settings) -> Iterator[Confined]:
    """Makes environments with other limits; they go whatever happens."""
    made: list[Environment] = []

    def make(limits: Resources) -> Environment:
        wanted = spec.model_copy(update={"resources": limits})
        made.append(provider.create(wanted, tags_of(settings.installation), timeout_s=60))
        return made[-1]

    yield make
    for environment in made:
        environment.destroy()


@pytest.fixture(scope="module")
def neighbour(create: Create) -> Iterator[Environment]:
    environment = create()
    yield environment
    environment.destroy()


def python(environment: Environment, code: str, timeout_s: float = 30) -> str:
    result = environment.run("python3 -", stdin=code.encode(), timeout_s=timeout_s)
    assert result.ok, result.text()[-2000:]
    return result.stdout.decode()


def answers(environment: Environment) -> bool:
    return environment.run("echo well", timeout_s=20).stdout == b"well\n"


_own_commands = pytest.mark.needs("own_commands")


@_own_commands
@pytest.mark.parametrize(
    "bomb",
    [
        "bash -c ':() { : | : & }; :'; sleep 60",
        'exec python3 -c "import os, signal\n'
        "for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True:\n    try:\n        if os.fork() == 0: os.setsid()\n"
        '    except OSError: pass"',
    ],
    ids=["of-a-shell", "that-ignores-signals"],
)
def test_a_fork_bomb_is_over_with_its_command_and_told(confined: Confined, neighbour: Environment, bomb: str) -> None:
    limits = Resources(pids=64, cpus=0.5)
    bombed, account = confined(limits), LimitAccount(limits)
    account.watch(bombed)
    quiet = _refused(neighbour)
    assert account.look()["processes"] == {"limit": 64, "refused": {"agent": 0}}
    with ThreadPoolExecutor(1) as threads:
        exploding = threads.submit(bombed.run, bomb, timeout_s=10)
        eventually(lambda: (_refused(bombed) or 0) > 0, "a process is refused", within_s=9)
        assert answers(neighbour)
        with closing(socket.create_server(("127.0.0.1", 0))), ThreadPoolExecutor(4) as own:
            assert list(own.map(str, range(4))) == ["0", "1", "2", "3"], "the host has processes left"
        result = exploding.result(timeout=90)  # a shell that cannot fork may give up before its time
        assert result.timed_out or not result.ok
    assert answers(bombed)
    eventually(lambda: bombed.stats().processes < 10, "the killed ones are counted no more", within_s=20)
    refused = account.look()["processes"]["refused"]["agent"]
    assert refused > 0
    assert _refused(neighbour) == quiet
    bombed.destroy()
    assert account.look()["processes"]["refused"] == {"agent": refused}, "what was known stays"


def test_the_number_of_processes_is_bounded(confined: Confined) -> None:
    environment = confined(Resources(pids=32))
    code = (
        "import subprocess\nmade = []\ntry:\n    while len(made) < 100: made.append(subprocess.Popen(['sleep', '9']))\n"
        "except OSError as error: print(error.errno)\nprint(len(made))\nfor one in made: one.kill()"
    )
    told = python(environment, code).split()
    assert told[0] == "11", "EAGAIN"
    assert int(told[1]) < 32
    refused = _refused(environment)
    assert refused in (1, 2), "Python tries a second way"
    assert answers(environment)
    assert _refused(environment) == refused, "who stays within the limit is refused nothing"


def _refused(environment: Environment) -> int | None:
    return environment.processes_refused()


def test_who_fills_the_disk_is_ended_and_told(confined: Confined, neighbour: Environment, fixture: Fixture) -> None:
    filler = confined(Resources(disk_bytes=64 * MEBI))
    with pytest.raises(EnvironmentOverLimit, match="disk"):
        filler.run("head -c 300000000 /dev/zero > /testbed/filled; sleep 20; echo survived", timeout_s=45)
    with pytest.raises(EnvironmentOverLimit, match="disk"):
        filler.run("true", timeout_s=10)
    assert answers(neighbour)


@_own_commands
def test_who_fills_the_disk_where_no_path_leads_is_ended_too(confined: Confined, settings: Settings) -> None:
    filler = confined(Resources(disk_bytes=64 * MEBI))
    assert filler.run(DEEP, timeout_s=30).ok
    hidden = "import os\nwhile 'residue-deep' in os.listdir(): os.chdir('residue-deep')\n"
    write = "with open('filled', 'wb') as f:\n    for _ in range(300): f.write(bytes(1 << 20))\n"
    try:
        with pytest.raises(EnvironmentOverLimit, match="disk"):
            filler.run(f"python3 - <<'CODE'\n{hidden}{write}import time; time.sleep(20)\nCODE", timeout_s=40)
    finally:
        remove_deep(settings.home)


def test_shared_memory_is_small_and_counts(confined: Confined) -> None:
    environment = confined(Resources(memory_bytes=256 * MEBI))
    result = environment.run("head -c 100000000 /dev/zero > /dev/shm/x", timeout_s=30)
    assert (result.exit_code, result.out_of_memory, b"space" in result.stderr) == (1, False, True)
    assert answers(environment)


@_own_commands
@pytest.mark.parametrize(
    ("command", "code", "out_of_memory"),
    [
        ("exec python3 -c 'bytearray(200 << 20)'", 137, True),
        ("python3 -c 'bytearray(200 << 20)'; exit 3", 3, True),
        ("kill -KILL $$", 137, False),
        ("kill -SEGV $$", 139, False),
        ("ulimit -v 100000; python3 -c 'bytearray(200 << 20)'", 1, False),
        ("exit 137", 137, False),
    ],
)
def test_out_of_memory_is_told_apart(confined: Confined, command: str, code: int, out_of_memory: bool) -> None:
    result = confined(Resources(memory_bytes=64 * MEBI)).run(command, timeout_s=30)
    assert (result.exit_code, result.out_of_memory) == (code, out_of_memory)


@_own_commands
def test_the_guaranteed_size_is_told_inside_and_the_kill_at_size_is_the_limit(confined: Confined) -> None:
    most = KillAt(cpus=0.2, memory_bytes=256 * MEBI)
    environment = confined(Resources(cpus=0.1, memory_bytes=64 * MEBI, kill_at=most))
    assert environment.run("nproc; echo $MAKEFLAGS", timeout_s=20).stdout == b"1\n-j1\n"
    assert environment.run("python3 -c 'bytearray(120 << 20)'", timeout_s=30).ok, "more than is guaranteed"
    before = environment.throttled_s()
    busy = "import os, time\nos.fork()\nwhile time.process_time() < 0.2: pass\n"
    assert before is not None

    def throttled() -> bool:  # again on a full host, where they wait for a processor and not for their limit
        assert environment.run("python3 -", stdin=busy.encode(), timeout_s=100).ok
        return (environment.throttled_s() or 0) - before > 0.3

    eventually(throttled, "two want a processor each, and have a fifth of one together", within_s=120)
    # Without a controller that counts it, it is the processes' own: of one that ended, once it has been waited for.
    usage = eventually(lambda: (told := environment.usage()) and (told.cpu_s or 0) > 0.3 and told, within_s=10)
    assert usage.cpu_s < 30
    assert 0 < (usage.memory_bytes or 0) < 256 * MEBI
    result = environment.run("exec python3 -c 'bytearray(400 << 20)'", timeout_s=30)
    assert (result.out_of_memory, b"limit of 268435456 bytes" in result.stderr) == (True, True), result
    assert (environment.memory_kills(), environment.host_kills()) == (1, 0)


def test_a_memory_hog_is_not_blamed_on_the_next_command_nor_on_neighbours(
    confined: Confined, neighbour: Environment
) -> None:
    environment = confined(Resources(memory_bytes=64 * MEBI))
    assert environment.run("exec python3 -c 'bytearray(200 << 20)'", timeout_s=30).out_of_memory
    assert not environment.run("kill -KILL $$", timeout_s=20).out_of_memory
    assert not neighbour.run("kill -KILL $$", timeout_s=20).out_of_memory
    assert not neighbour.stats().oom_kills


def test_those_who_were_killed_for_memory_are_counted_and_crashes_are_not(confined: Confined) -> None:
    limits = Resources(memory_bytes=64 * MEBI)
    environment = confined(limits)
    account = LimitAccount(limits)
    assert account.look() == {}, "nothing is watched"
    assert environment.run("exec python3 -c 'bytearray(200 << 20)'", timeout_s=30).out_of_memory
    account.watch(environment)
    environment.run("kill -KILL $$", timeout_s=20)
    environment.run("kill -SEGV $$", timeout_s=20)
    assert account.look()["memory"] == {"limit_bytes": 64 * MEBI, "killed": {"agent": 0}}
    for _ in range(2):  # as a child, whose command ends well
        environment.run("python3 -c 'bytearray(200 << 20)'; true", timeout_s=30)
    account.look()
    account.stage = "grading"
    environment.run("python3 -c 'bytearray(200 << 20)'; true", timeout_s=30)
    found = account.look()
    assert found["memory"]["killed"] == {"agent": 2, "grading": 1}
    environment.destroy()
    assert account.look() == found, "what was known stays"


@_own_commands
def test_a_log_of_a_long_output_takes_nothing_inside(confined: Confined, tmp_path: Path) -> None:
    environment = confined(Resources(disk_bytes=64 * MEBI))
    before = Fingerprint.take(environment)
    assert environment.keep_logs(CommandLogs(tmp_path, 256 * MEBI))
    result = environment.run("head -c 150000000 /dev/zero; sleep 2.5", timeout_s=60)  # as long as a disk is looked at
    environment.keep_logs(None)
    assert (result.exit_code, result.logs) == (0, ("0001.stdout",)), "its disk limit does not pay for it"
    assert (tmp_path / "0001.stdout").stat().st_size == 150_000_000
    assert differences(before, Fingerprint.take(environment)) == ()


def test_swap_is_not_used_beyond_the_memory_limit(confined: Confined) -> None:
    environment = confined(Resources(memory_bytes=64 * MEBI))
    told = environment.run(
        "cat /sys/fs/cgroup/memory/memory.memsw.limit_in_bytes || cat /sys/fs/cgroup/memory.swap.max", timeout_s=20
    ).stdout.split()
    if not told:
        pytest.skip("this kernel does not count swap")
    assert int(told[0]) in (64 * MEBI, 0)


@_own_commands
def test_who_ignores_all_signals_dies_with_its_time(own: Environment) -> None:
    code = (
        "import os, signal, time\n"
        "for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
        "for _ in range(3):\n    os.fork()\n    os.setsid() if os.getpid() != os.getsid(0) else None\n"
        "while True: time.sleep(0.01)"
    )
    begun = time.monotonic()
    assert own.run("python3 -", stdin=code.encode(), timeout_s=1).timed_out
    assert time.monotonic() - begun < 12
    assert own.stats().processes == 0


@_own_commands
@pytest.mark.parametrize("command", ["kill -9 1", "kill -9 -1", "kill -TERM 1", "kill -STOP 1; kill -STOP -1"])
def test_who_kills_everybody_kills_no_more_than_itself(own: Environment, neighbour: Environment, command: str) -> None:
    own.run(f"{command}; sleep 0.2", timeout_s=3)
    assert answers(own)
    assert answers(neighbour)


_CALLS = {  # numbers of x86-64; the arguments do no harm where a call is allowed
    "mount": (165, b"none", b"/mnt", b"tmpfs", 0, 0),
    "umount2": (166, b"/proc/keys", 0),
    "pivot_root": (155, b"/mnt", b"/mnt"),
    "chroot": (161, b"/mnt"),
    "unshare of users": (272, 0x10000000),
    "unshare of mounts": (272, 0x00020000),
    "unshare of networks": (272, 0x40000000),
    "setns": (308, 0, 0),
    "reboot": (169, 0xFEE1DEAD, 672274793, 0x00000000, 0),
    "kexec_load": (246, 0, 0, 0, 0),
    "init_module": (175, 0, 0, b""),
    "delete_module": (176, b"no_such_module", 0),
    "bpf": (321, 0, 0, 0),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "keyctl": (250, 0, -3, 1),
    "add_key": (248, b"user", b"residue", b"x", 1, -3),
    "request_key": (249, b"user", b"residue", 0, -3),
    "settimeofday": (164, 0, 0),
    "clock_settime": (227, 0, 0),
    "clock_adjtime by a step": (305, 0, b"\x01" + bytes(207)),
    "sethostname": (170, b"x", 1),
    "swapon": (167, b"/no/such/file", 0),
    "acct": (163, b"/no/such/file"),
    "quotactl": (179, 0x80000100, b"/dev/null", 0, 0),
    "open_by_handle_at": (304, -100, 0, 0),
    "iopl": (172, 3),
    "syslog": (103, 5, 0, 0),
    "fanotify_init": (300, 0, 0),
    "userfaultfd": (323, 0),
    "mknod of a disk": (133, b"/srv/disk", 0o060644, 0xFE00),
    "nice of the real time": (144, 0, 1, b"\x01\0\0\0"),
    "more open files than the limit": (160, 7, b"\xff" * 7 + b"\0" + b"\xff" * 7 + b"\0"),
}
_CALL = """
import ctypes, errno, json, sys
libc = ctypes.CDLL(None, use_errno=True)
told = {}
for name, (number, *given) in json.load(sys.stdin).items():
    ready = [bytes.fromhex(one) if isinstance(one, str) else ctypes.c_long(one) for one in given]
    ctypes.set_errno(0)
    answer = libc.syscall(ctypes.c_long(number), *ready)
    told[name] = "done" if answer != -1 else errno.errorcode[ctypes.get_errno()]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def answered(shared: Environment) -> dict[str, str]:
    if shared.run("uname -m", timeout_s=20).stdout != b"x86_64\n":
        pytest.skip("the numbers of these calls are another machine's")
    shared.put("/srv/call.py", _CALL.encode())
    sent = {name: [one.hex() if isinstance(one, bytes) else one for one in given] for name, given in _CALLS.items()}
    result = shared.run("python3 /srv/call.py", stdin=json.dumps(sent).encode(), timeout_s=30)
    assert result.ok, result.text()
    told: dict[str, str] = json.loads(result.stdout)
    return told


@pytest.mark.parametrize("call", _CALLS, ids=lambda call: call.replace(" ", "-"))
def test_a_call_that_reaches_beyond_is_refused(answered: dict[str, str], call: str) -> None:
    assert answered[call] in ("EPERM", "EACCES", "ENOSYS")


@pytest.mark.parametrize(
    "attempt",
    [
        "echo 1 > /proc/sys/kernel/printk",
        "echo core > /proc/sys/kernel/core_pattern",
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        "echo b > /proc/sysrq-trigger",
        "mkdir /sys/x || echo 1 > /sys/kernel/profiling",
        "for c in . memory; do cd /sys/fs/cgroup/$c && [ -e tasks ] && echo 0 > cgroup.procs && exit 0; done; exit 1",
        "for c in . pids; do cd /sys/fs/cgroup/$c && [ -e cgroup.procs ] && mkdir mine && exit 0; done; exit 1",
        "for f in memory/memory.limit_in_bytes memory.max; do"
        " [ -e /sys/fs/cgroup/$f ] && echo 99999999999 > /sys/fs/cgroup/$f && exit 0; done; exit 1",
        "echo -1000 > /proc/self/oom_score_adj",
        "mount -o remount,rw /proc/sys || mount -o remount,rw /sys",
        "mount -t cgroup -o memory none /mnt || mount -t cgroup2 none /mnt",
        "chattr +i /etc/hosts",
        "date -s @1000000000",
        "dmesg",
        "head -c 1 /proc/kcore | grep -q . || head -c 1 /dev/mem || head -c 1 /dev/vda",
        "ls /proc/1/root/../../../home/*/.ssh",
    ],
)
def test_what_would_change_or_show_the_host_is_refused(shared: Environment, attempt: str) -> None:
    assert not shared.run(attempt, timeout_s=10).ok


def test_the_kernels_own_files_are_masked(shared: Environment) -> None:
    files, folders = "keys timer_list sched_debug kcore latency_stats", "/sys/firmware /proc/acpi /proc/scsi"
    shown = f"cd /proc; head -qc 100 {files}; ls -A {folders}"
    told = shared.run(f"({shown}) 2>/dev/null | grep -v '^/\\|^$'", timeout_s=20)
    assert told.stdout == b""


def test_a_set_uid_program_gives_nobody_more(shared: Environment) -> None:
    made = "cp /usr/bin/id /srv/id && chmod 4755 /srv/id && setpriv --reuid=65534 --regid=65534 --clear-groups /srv/id"
    told = shared.run(made, timeout_s=20)
    assert told.stdout.startswith(b"uid=65534"), told.text()
    assert b"euid" not in told.stdout


def test_a_process_has_few_privileges_a_filter_and_no_more_to_gain(shared: Environment) -> None:
    status = dict(
        line.split(":\t") for line in shared.run("cat /proc/self/status", timeout_s=20).stdout.decode().splitlines()
    )
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    allowed = {0, 1, 3, 4, 5, 6, 7}  # CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID
    for kind in ("CapBnd", "CapPrm", "CapEff"):
        assert {bit for bit in range(64) if int(status[kind], 16) >> bit & 1} <= allowed


def test_limits_are_set_core_dumps_off_and_open_files_bounded(shared: Environment) -> None:
    told = shared.run("ulimit -c; ulimit -Hc; ulimit -Hn", timeout_s=20).stdout.split()
    assert told[0] == b"0"
    assert told[1] == b"0", "a core dump would start the host's own program for it, or fill the disk"
    assert int(told[2]) <= 1 << 20


def test_raw_sockets_are_refused(shared: Environment) -> None:
    tries = "AF_INET, SOCK_RAW, 1", "AF_INET6, SOCK_RAW, 58", "AF_PACKET, SOCK_RAW, 768", "AF_PACKET, SOCK_DGRAM, 768"
    code = "from socket import *\n" + "".join(
        f"try: socket({one}); print('made {one}')\nexcept OSError: pass\n" for one in tries
    )
    assert python(shared, code) == ""


def test_neither_processes_nor_files_nor_sockets_of_others_are_seen(
    own: Environment, neighbour: Environment, tmp_path: Path
) -> None:
    name = f"mf-{uuid.uuid4().hex}"
    neighbour.put(f"/srv/{name}", b"secret")
    serve = (
        f"import socket, time\none = socket.socket(socket.AF_UNIX); one.bind('\\0{name}'); one.listen()\n"
        f"two = socket.create_server(('127.0.0.1', 4719))\nopen('/srv/ready', 'w').close()\ntime.sleep(20)"
    )
    neighbour.put("/srv/serve.py", serve.encode())
    neighbour.run(f"python3 /srv/serve.py {name} > /dev/null 2>&1 &", timeout_s=20)
    neighbour.run("while [ ! -e /srv/ready ]; do sleep 0.05; done", timeout_s=15)
    reach = f"""
import socket, sys
for family, address in ((socket.AF_UNIX, '\\0{name}'), (socket.AF_INET, ('127.0.0.1', 4719))):
    try: socket.socket(family).connect(address); print('reached', address)
    except OSError: pass
"""
    assert python(neighbour, reach).count("reached") == 2, "there is something to be reached"
    assert python(own, reach) == ""
    with closing(socket.socket(socket.AF_UNIX)) as host:
        host.bind(f"\0{name}-host")
        host.listen()
        assert python(own, reach.replace(name, f"{name}-host")) == ""
    seen = own.run(f"cat /proc/[0-9]*/cmdline /proc/net/unix | tr '\\0' ' '; ls /srv {tmp_path}", timeout_s=20).text()
    assert name not in seen.replace("No such file", "")
    assert int(own.run("ls -d /proc/[0-9]* | wc -l", timeout_s=20).stdout) < 10


def test_no_address_but_its_own_is_reached(shared: Environment, fixture: Fixture) -> None:
    with closing(socket.create_server(("0.0.0.0", 0))) as server:
        port = server.getsockname()[1]
        targets = [
            ("127.0.0.1", port),
            ("169.254.169.254", 80),
            ("172.17.0.1", port),
            ("10.0.0.1", 53),
            ("1.1.1.1", 53),
        ]
        code = (
            f"import socket\nfor target in {targets!r}:\n    try: socket.create_connection(target, 1); print(target)\n"
            "    except OSError: pass\n"
        )
        assert python(shared, code) == ""
    interfaces = shared.run("cat /proc/net/dev", timeout_s=20).text().count(":")
    assert interfaces == (2 if fixture.kind == "compose" else 1), "a loopback, and one to services beside it if any"


def test_no_socket_of_an_engine_is_inside(shared: Environment) -> None:
    found = shared.run(
        "find / -xdev -type s 2>/dev/null; find /run /var/run /dev -name '*.sock' 2>/dev/null", timeout_s=30
    )
    assert found.stdout == b""
    mounts = shared.run("cat /proc/self/mountinfo", timeout_s=20).text()
    assert not any(word in mounts for word in ("docker.sock", "containerd.sock", "crun.sock"))


def _tar(*members: tuple[str, bytes, str]) -> bytes:
    """Members by name, type and where they lead (or what they hold)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, more in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o6755
            if kind == tarfile.REGTYPE:
                member.size = len(more)
                tar.addfile(member, io.BytesIO(more.encode()))
                continue
            member.linkname, member.devmajor, member.devminor = more, 1, 3
            tar.addfile(member)
    return buffer.getvalue()


EVIL = {
    "a path with dots": _tar(("a/../../escaped", tarfile.REGTYPE, "x")),
    "a link and a file through it": _tar(("l", tarfile.SYMTYPE, "/srv"), ("l/escaped", tarfile.REGTYPE, "x")),
    "a link upwards": _tar(("l", tarfile.SYMTYPE, "../.."), ("l/escaped", tarfile.REGTYPE, "x")),
    "links in a chain": _tar(
        ("a", tarfile.SYMTYPE, "."), ("a/b", tarfile.SYMTYPE, ".."), ("a/b/escaped", tarfile.REGTYPE, "x")
    ),
    "a hard link to outside": _tar(("l", tarfile.LNKTYPE, "../../etc/passwd"), ("l", tarfile.REGTYPE, "escaped")),
    "a device": _tar(("disk", tarfile.CHRTYPE, "")),
    "a pipe": _tar(("pipe", tarfile.FIFOTYPE, "")),
}


@pytest.mark.parametrize("archive", EVIL.values(), ids=[name.replace(" ", "-") for name in EVIL])
def test_an_archive_does_not_reach_out_of_its_folder_inside(shared: Environment, archive: bytes) -> None:
    state = "ls -A / /srv /evil 2>/dev/null; cksum /etc/passwd"
    shared.run("rm -rf /evil; mkdir -p /evil", timeout_s=20)
    before = shared.run(state, timeout_s=20).stdout
    with suppress(SpecInvalid):
        shared.put_tree(archive, "/evil/here/deep")
    shared.run("rm -rf /evil/here", timeout_s=20)
    assert shared.run(state, timeout_s=20).stdout == before
    assert answers(shared)


@pytest.mark.parametrize("archive", EVIL.values(), ids=[name.replace(" ", "-") for name in EVIL])
def test_an_archive_from_inside_does_not_reach_out_of_its_folder_here(archive: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "parent" / "here"
    with pytest.raises(SpecInvalid):
        archives.unpack(archive, folder)
    assert sorted(path.name for path in (tmp_path / "parent").iterdir()) == ["here"]
    assert list(tmp_path.iterdir()) == [tmp_path / "parent"]
    assert not any(path.is_fifo() or path.is_char_device() for path in folder.rglob("*"))


def test_set_uid_bits_do_not_come_with_an_archive(shared: Environment, tmp_path: Path) -> None:
    archive = _tar(("program", tarfile.REGTYPE, "x"))
    archives.unpack(archive, tmp_path)
    assert (tmp_path / "program").stat().st_mode & 0o6000 == 0
    shared.put_tree(archive, "/srv/bits")
    assert shared.run("stat -c %a /srv/bits/program", timeout_s=20).stdout == b"755\n"


def test_links_of_the_task_lead_a_read_to_nothing_of_ours(shared: Environment, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    shared.run(
        f"mkdir -p /srv/out && ln -sf {tmp_path}/secret /srv/out/l && ln -sfn {tmp_path} /srv/out/d", timeout_s=20
    )
    for path in ("/srv/out/l", "/srv/out/d/secret"):
        with pytest.raises(FileNotFoundError):
            shared.get(path)
    assert b"of the host" not in shared.get_tree("/srv/out")


@_own_commands
@pytest.mark.parametrize(
    ("make", "path"),
    [
        ("truncate -s 2G /srv/sparse", "/srv/sparse"),
        ("true", "/dev/zero"),
        ("mkfifo /srv/pipe", "/srv/pipe"),
    ],
    ids=["two-gigabytes", "an-endless-device", "a-pipe"],
)
def test_a_file_without_measure_is_refused_and_not_taken_in(own: Environment, make: str, path: str) -> None:
    own.run(make, timeout_s=20)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status_kib("VmRSS")
    with ThreadPoolExecutor(1) as threads, pytest.raises((StationError, FileNotFoundError)):
        threads.submit(own.get, path).result(timeout=30)
    assert _status_kib("VmHWM") - before < 320 << 10, "more than the largest file that is taken"
    assert answers(own)


def _status_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def test_what_is_no_tar_but_unpacks_to_much_is_refused(shared: Environment) -> None:
    bomb = io.BytesIO()
    with tarfile.open(fileobj=bomb, mode="w:gz") as tar:
        member = tarfile.TarInfo("large")
        member.size = 64 * MEBI
        tar.addfile(member, io.BytesIO(bytes(64 * MEBI)))
    with pytest.raises(SpecInvalid):
        shared.put_tree(bomb.getvalue(), "/srv/bomb")
    with pytest.raises(FileNotFoundError):
        shared.get("/srv/bomb/large")
    shared.put_tree(tar_of({"small": b"x"}), "/srv/bomb")
    assert shared.get("/srv/bomb/small") == b"x"
