"""Debian's Slurm for tests: a controller and nodes of this machine, with ports, keys and folders of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.services import free_port, missing, short_folder
from tests.waiting import eventually

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")

_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=5
MessageTimeout=5
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
NodeName={first} NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port} CPUs=8 RealMemory=4000
NodeName={second} NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port} CPUs=8 RealMemory=4000
PartitionName=day Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=closed Nodes=ALL MaxTime=INFINITE State=DOWN
"""
NODES = ("one", "two")


class SlurmCluster:
    """`PARTITION` day takes jobs; closed queues them for ever. Commands find it by SLURM_CONF=`conf`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        """Start everything; nodes take jobs at the end."""
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        ports = {"port": free_port(), "first_port": free_port(), "second_port": free_port()}
        host = socket.gethostname().partition(".")[0]
        self.conf.write_text(
            _CONF.format(host=host, folder=self.folder, first=NODES[0], second=NODES[1], **ports).lstrip()
        )
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._start("munged", "munged", "--foreground", f"--socket={self.folder}/munge.socket", *files)
        eventually((self.folder / "munge.socket").exists, within_s=20)
        self.start_controller()
        for node in NODES:
            self.start_node(node)

    def end(self) -> None:
        """End every process that belongs to it, also of jobs."""
        for job in self.ask("squeue", "--noheader", "--format=%A", check=False).split():
            self.ask("scancel", "--signal=KILL", job, check=False)
        for process in reversed(self._processes.values()):
            _kill_tree(process.pid)
            process.wait()
        self._end_steps()

    def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D")
        eventually(lambda: "UP" in self.ask("scontrol", "ping", check=False), within_s=30)

    def stop_controller(self) -> None:
        """As an administrator does: its state is on disk."""
        self._stop("slurmctld", signal.SIGTERM)

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)
        ready = {"idle", "mixed", "allocated"}
        eventually(lambda: self._state(node) in ready, f"the node {node}", within_s=30)

    def _state(self, node: str) -> str:
        return self.ask("sinfo", "--noheader", f"--nodes={node}", "--partition=day", "--format=%T", check=False).strip()

    def take_node(self, node: str) -> None:
        """It loses power: its daemon, its jobs' daemons and their processes; then the controller is told."""
        self._stop(node, signal.SIGKILL)
        self._end_steps(node)
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=power")

    def node_of(self, handle: str) -> str:
        return self.ask("squeue", "--noheader", "--format=%N", f"--jobs={handle}").strip()

    def ask(self, *command: str, check: bool = True) -> str:
        """A command of Slurm's as an administrator types it."""
        environment = os.environ | {"SLURM_CONF": str(self.conf)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def _start(self, name: str, *command: str) -> None:
        environment = os.environ | {"SLURM_CONF": str(self.conf)}
        with (self.folder / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/"
            )

    def _stop(self, name: str, number: signal.Signals) -> None:
        process = self._processes.pop(name)
        process.send_signal(number)
        process.wait(30)

    def _end_steps(self, node: str | None = None) -> None:
        """Daemons of jobs (slurmstepd) leave their node's daemon, and are known by its spool folder alone."""
        spools = [str(self.folder / f"spool-{name}") for name in ([node] if node else NODES)]
        for process in psutil.process_iter(["name", "cmdline"]):
            with suppress(psutil.Error):
                if process.info["name"] == "slurmstepd":
                    folders = [process.cwd(), *(file.path for file in process.open_files())]
                    if any(folder.startswith(tuple(spools)) for folder in folders):
                        _kill_tree(process.pid)


def _kill_tree(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def absent_programs() -> list[str]:
    """What this machine lacks for it."""
    found = [program for program in PROGRAMS if shutil.which(program) is None]
    return found if os.geteuid() == 0 else [*found, "root"]


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Two nodes of this machine, for the length of the block."""
    if absent := absent_programs():
        missing(f"Slurm of Debian: {', '.join(absent)}")
    with short_folder() as folder:
        cluster = SlurmCluster(folder)
        try:
            cluster.begin()
            yield cluster
        finally:
            cluster.end()
