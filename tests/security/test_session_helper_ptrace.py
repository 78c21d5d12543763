"""Root inside an environment cannot read, trace or imitate the session helper, which reports outputs and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.environments.contract import Environment
from tests.contract.environment_fixtures import Fixture
from tests.security.environments import RUNTIMES

_CAP_SYS_RESOURCE = 24
_ATTACK = """
import ctypes, errno, json, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
ATTACH, DETACH, SEIZE = 16, 17, 0x4206
PIDFD_OPEN, PIDFD_GETFD, VM_READV = 434, 438, 310

def called(answer):
    return "done" if answer != -1 else errno.errorcode[ctypes.get_errno()]

def opened(path, flags):
    try:
        os.close(os.open(path, flags))
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

def listed(path):
    try:
        return "done" if [os.readlink(f"{path}/{name}") for name in os.listdir(path)] else "empty"
    except OSError as error:
        return errno.errorcode[error.errno]

def attack(pid):
    buffer = ctypes.create_string_buffer(8)
    pieces = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    told = {}
    for name, request in (("attach", ATTACH), ("seize", SEIZE)):
        told[name] = called(libc.ptrace(request, pid, None, None))
        libc.ptrace(DETACH, pid, None, None)
    told["read memory"] = opened(f"/proc/{pid}/mem", os.O_RDONLY)
    told["write memory"] = opened(f"/proc/{pid}/mem", os.O_RDWR)
    told["list files"] = listed(f"/proc/{pid}/fd")
    told["map"] = opened(f"/proc/{pid}/maps", os.O_RDONLY)
    pidfd = libc.syscall(PIDFD_OPEN, pid, 0)
    told["take its files"] = {called(libc.syscall(PIDFD_GETFD, pidfd, number, 0)) for number in range(32)} - {"EBADF"}
    told["take its files"] = ",".join(sorted(told["take its files"]))
    told["read by vector"] = called(libc.syscall(VM_READV, pid, pieces, 1, pieces, 1, 0))
    return told

mine = {os.getpid(), os.getppid()}
helpers = []
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) not in mine and "megaflow" in open(f"/proc/{name}/cmdline").read():
        helpers.append(int(name))
print(json.dumps({pid: attack(pid) for pid in helpers}))
"""
_DEBUG = """
import ctypes, os, signal, subprocess
libc = ctypes.CDLL(None, use_errno=True)
child = subprocess.Popen(["sleep", "60"])
assert libc.ptrace(16, child.pid, None, None) == 0, ctypes.get_errno()
os.waitpid(child.pid, 0)
print(open(f"/proc/{child.pid}/mem", "rb", buffering=0).readable(), bool(os.listdir(f"/proc/{child.pid}/fd")))
child.kill()
"""


@pytest.fixture(scope="module", params=RUNTIMES)
def fixture(request: pytest.FixtureRequest) -> Fixture:
    found: Fixture = request.param
    return found


def python(environment: Environment, code: str) -> str:
    result = environment.run("python3 -", stdin=code.encode(), timeout_s=30)
    assert result.ok, result.text()
    return result.stdout.decode()


def test_the_helper_cannot_be_traced_or_read(shared: Environment) -> None:
    told = json.loads(python(shared, _ATTACK))
    assert "1" in told, "the first process is the helper"
    assert len(told) > 1, "and each connection has one of its own"
    refused = {"EPERM", "EACCES"}
    assert {name: how for one in told.values() for name, how in one.items() if how not in refused} == {}
    assert shared.run("echo well; exit 3", timeout_s=20).exit_code == 3


def test_a_task_can_debug_its_own_processes(shared: Environment) -> None:
    assert python(shared, _DEBUG) == "True True\n"


def test_commands_die_before_the_helper_and_cannot_go_below_its_score(shared: Environment) -> None:
    """At most they become its equal; then the kernel takes the largest, which the helper is not.

    The kernel keeps the floor that a privileged runtime sets. Without CAP_SYS_RESOURCE on the host it is 0.
    """
    score = shared.run("cat /proc/1/oom_score_adj /proc/self/oom_score_adj", timeout_s=20).stdout.split()
    helpers, own = (int(one) for one in score)
    assert own > helpers
    assert helpers >= 500
    floor = helpers if _host_sets_floors() else 0
    for lower in (floor - 1, -1000):
        assert not shared.run(f"echo {lower} > /proc/self/oom_score_adj", timeout_s=20).ok, lower


def _host_sets_floors() -> bool:
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> _CAP_SYS_RESOURCE & 1)
